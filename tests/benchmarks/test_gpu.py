"""The command that runs everything on a GPU: phases that end in every way, what is written of them, and a rehearsal on a CPU."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import contestants
import gpu
import gpu_page
import gpu_steps
import sharded
import speed
from everybit.policies.presets import PRESETS
from machine import describe

DOCS = Path(__file__).parents[2] / "docs"


def phase(name: str, code: str, *, limit: float = 60.0, **options: Any) -> gpu.Phase:
    return gpu.Phase(name, ("-c", code), limit, f"{name}.json", **options)


def writes(path: Path, text: str = "{}") -> str:
    return f"from pathlib import Path; Path({str(path)!r}).write_text({text!r})"


def test_a_phase_that_fails_does_not_keep_others_from_running(tmp_path: Path) -> None:
    chosen = [
        phase("broken", "raise SystemExit(3)"),
        phase("silent", "pass"),
        phase("lacking", "pass", needs=("torch", "no_such_module")),
        phase("well", writes(tmp_path / "well.json")),
    ]
    assert gpu.perform(chosen, "cpu", tmp_path, None) == 1
    held = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: one["status"] for name, one in held["phases"].items()} == {
        "broken": "failed: exit status 3, see broken.log",
        "silent": "failed: it wrote no silent.json",
        "lacking": "not run: no_such_module not installed",
        "well": "passed",
    }
    assert held["device"] == "cpu"
    assert held["phases"]["well"]["machine"]["packages"]["torch"] == importlib.metadata.version("torch")
    # One of them again: what is known of the others is kept, and the status is that of what was run.
    assert gpu.perform([chosen[3]], "cpu", tmp_path, None) == 0
    assert list(json.loads((tmp_path / "gpu.json").read_text())["phases"]) == ["broken", "silent", "lacking", "well"]


def test_a_phase_is_stopped_at_its_limit_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True:\n    pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    outcome = gpu.run(phase("endless", code, limit=3.0), tmp_path, {})
    assert outcome.status == "stopped after 3 s"
    alive.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not alive.exists()


def test_what_an_earlier_run_left_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "silent.json").write_text("{}")
    assert gpu.run(phase("silent", "pass"), tmp_path, {}).status == "failed: it wrote no silent.json"


XML = """<testsuites><testsuite>
<testcase classname="a" name="b"/><testcase classname="a" name="c"><failure/></testcase>
<testcase classname="a" name="d"><skipped/></testcase></testsuite></testsuites>"""


def test_tests_that_were_all_skipped_have_not_passed(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(XML)
    assert gpu.tests_of(tmp_path / "tests.xml") == {"passed": 1, "skipped": 1, "failed": ["a: c"]}
    skipped = XML.replace('<testcase classname="a" name="b"/>', "").replace("<failure/>", "<skipped/>")
    one = gpu.Phase("tests", ("-c", writes(tmp_path / "tests.xml", skipped)), 60, "tests.xml")
    assert gpu.run(one, tmp_path, {}).status == "failed: no test ran"


def test_all_phases_fit_into_half_an_hour_on_a_gpu(tmp_path: Path) -> None:
    full, rehearsed = gpu.phases("cuda", tmp_path), gpu.phases("cpu", tmp_path)
    assert sum(one.limit for one in full) <= gpu.WHOLE
    assert [one.name for one in full] == [one.name for one in rehearsed]
    page = (DOCS / "gpu_measured.md").read_text()
    for one in full:
        assert f"| `{one.name}` |" in page
        assert f"| {one.limit:g} |" in page
    by_name = {one.name: one.command for one in full}
    assert {"--model", "large", "--seeds", "3", "--device", "cuda"} <= set(by_name["compare"])
    assert set(gpu.SHARDED) <= set(sharded.CONTESTANTS)
    run = {contestants.named(name) for name in gpu.PEERS}
    assert set(contestants.GPU_CONTESTANTS) <= run <= set(contestants.contestants_on("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cuda"]) == 2
    assert "accepted here is DEVICE=cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--phases", "step"])
    assert "phases: got step; accepted are tests, steps, peers, compare, sharded, offload." in capsys.readouterr().err


def test_a_module_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "missing", lambda _: ["optree"])
    assert gpu.refused("cpu").startswith("optree: not installed; put a folder that has it into PYTHONPATH")


# -- steps -----------------------------------------------------------------------------------------------------------------------------


def test_a_step_is_measured_against_a_copy_of_as_many_bytes() -> None:
    result = gpu_steps.Result("LEAN_BF16", 4096, False)
    gpu_steps.measure(result, "cpu", 0.0)
    assert result.bytes == 18  # a gradient and four parts of 2 bytes are loaded, the parts are stored
    assert result.share == result.copy / result.step
    assert 0 < result.host <= result.step
    assert len(result.samples) == len(result.copy_samples) == 5
    assert (result.kernels, result.copies) == (None, None)


def test_kernels_and_transfers_are_told_apart() -> None:
    names = ["triton_poi_fused_0", "triton_poi_fused_1", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)"]
    events = [SimpleNamespace(name=name, device_type=SimpleNamespace(name="CUDA")) for name in names]
    host = [SimpleNamespace(name="aten::add", device_type=SimpleNamespace(name="CPU"))]
    assert gpu_steps.launched([*host, *events]) == (2, 2)


def test_every_policy_is_measured_at_every_size() -> None:
    compiled = [one for one in gpu_steps.cases("cuda", list(PRESETS)) if one.compiled]
    by_size = {(one.policy, one.elements) for one in compiled if not one.model}
    assert by_size == {(policy, elements) for policy in PRESETS for elements in gpu_steps.SIZES["cuda"]}
    assert {one.gathered for one in compiled if one.model} == {*gpu_steps.GATHERED}


def test_a_case_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_steps, "measure", fail)
    results = gpu_steps.run("cpu", ["FP32"], 0.0, tmp_path / "steps.json")
    assert {one.failure for one in results} == {"RuntimeError: out of memory"}
    assert "out of memory" in gpu_steps.markdown(json.loads((tmp_path / "steps.json").read_text()))


# -- others ----------------------------------------------------------------------------------------------------------------------------


def test_peers_that_only_a_gpu_runs_are_left_out_without_one() -> None:
    names = {one.name for one in contestants.contestants_on("cpu")}
    on_gpu = {one.name for one in contestants.contestants_on("cuda")}
    assert on_gpu - names == {one.name for one in contestants.GPU_CONTESTANTS}
    for peer in ("torch fused", "optimi, Triton", "torchao 8 bit", "bitsandbytes 8 bit", "HeavyBall", "Apex FusedAdam"):
        assert peer in on_gpu
    assert any(name.startswith("FlashOptim") for name in on_gpu)
    assert contestants.named("Apex FusedAdam") in contestants.GPU_CONTESTANTS


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = speed.Arguments(threads=1, seconds=0.0, limit=120.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    if not gpu.missing(["apex"]):
        pytest.skip("Apex is installed")
    result = speed.in_a_process("gpt-0.6M", contestants.named("Apex FusedAdam"), arguments)
    assert result.failure == "not installed: apex"


# -- the page --------------------------------------------------------------------------------------------------------------------------


def results() -> dict[str, Any]:
    machine = describe() | {"gpu": "a GPU", "cuda": "13.0"}
    step = gpu_steps.Result("LEAN_BF16", 1 << 20, True, "", 0, 18.0, 2e-5, 1e-5, 1e-5, 2, 0, 3.0)
    ran = speed.Result("opt-125m", "torch fused", 10, 1, 1e-7, 0.0, 0.0, "right", 0.1, 1e-3, 1e-3, 28.0)
    absent = speed.Result("opt-125m", "Apex FusedAdam", failure="not installed: apex")
    summary = {
        "policy": "FP32", "validation_loss": 1.25, "validation_spread": 0.01, "difference": 0.0, "difference_spread": None,
        "lost_share": None, "bytes_measured": 16.0, "optimizer_milliseconds": 1.5, "training_milliseconds": None,
    }  # fmt: skip
    turn = sharded.Turn("tiny", "FSDP2, fused", 0, 0.01, 0.001, 1 << 20, [1.0])
    outcome = gpu.Outcome("steps", "passed", 1.0, 270.0, "python benchmarks/gpu_steps.py", machine)
    return {
        "device": "cuda",
        "phases": {"steps": {name: getattr(outcome, name) for name in gpu.Outcome.__slots__}},
        "results": {
            "tests": {"passed": 3, "skipped": 1, "failed": ["a: b"]},
            "steps": {"machine": machine, "results": [vars(step)]},
            "peers": {"machine": machine, "results": [vars(ran), vars(absent)]},
            "compare": {
                "model": {"name": "large", "parameters": 85_000_000}, "options": {"steps": 300}, "seeds": [0, 1, 2],
                "reference": "FP32", "summary": [summary],
            },
            "sharded": {
                "machine": machine, "arguments": vars(sharded.Arguments(device="cuda", ranks=1)) | {"out": "", "page": None},
                "turns": [vars(turn)], "failures": ["DDP, fused on tiny: its process died"],
            },
        },
    }  # fmt: skip


def test_the_page_has_every_phases_results(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin gpu -->\nold\n<!-- end gpu -->\nafter\n")
    gpu_page.write(page, json.loads(json.dumps(results())))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| steps | passed | 1 | 270 |" in text
    assert "a GPU, CUDA 13.0; " in text
    assert "3 passed, 1 failed, 1 were skipped." in text
    assert "- failed: a: b" in text
    assert "| `LEAN_BF16` | 1,048,576 | compiled | 18 | 20.0 | 10.0 | 50 % | 944 | 2 | 0 | 3.0 |" in text
    assert "Not installed: Apex FusedAdam." in text
    assert "| `FP32` | 1.2500 ± 0.0100 | 0.0000 | - | 16.00 | 1.500 | - |" in text
    assert "| FSDP2, fused | 10.0 (1.00) | 1.00 (1.00) | 1.0 (1.00) |" in text
    assert "Failed: DDP, fused on tiny: its process died." in text
    assert "nccl" in text
    assert "rehearsal" not in text


def test_a_page_of_a_rehearsal_says_so_and_one_of_nothing_that_nothing_was_run() -> None:
    assert gpu_page.markdown(results() | {"device": "cpu"}).startswith("A rehearsal with small sizes, on a CPU")
    assert gpu_page.markdown({}) == gpu_page.NOT_RUN


def test_what_is_published_is_what_was_measured() -> None:
    """The page's tables are those of the results in the repository; without any it says that there are none."""
    path = Path(gpu.__file__).parent / "results" / "gpu" / "gpu.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    page = (DOCS / "gpu_measured.md").read_text()
    between = page.split("<!-- begin gpu -->\n")[1].split("<!-- end gpu -->")[0]
    assert between == gpu_page.markdown(held)


def test_a_turn_that_gives_no_result_is_no_end_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(arguments: Any, model: str, contestant: str, number: int, *, memory: bool) -> sharded.Turn:
        if contestant == "DDP, fused":
            raise sharded.TurnFailedError(f"{contestant} on {model}: its process died")
        return sharded.Turn(model, contestant, number, 0.01, 0.001, 1, [1.0], memory)

    monkeypatch.setattr(sharded, "take_turn", turn)
    out = tmp_path / "sharded.json"
    arguments = sharded.Arguments(models=("tiny",), contestants=("DDP, fused", "FSDP2, fused"), rounds=1, out=out)
    with pytest.raises(SystemExit, match="DDP, fused on tiny: its process died"):
        sharded.main(arguments)
    held = json.loads(out.read_text())
    assert {one["contestant"] for one in held["turns"]} == {"FSDP2, fused"}
    assert len(held["failures"]) == 2
    assert not any(math.isnan(one["step_seconds"]) for one in held["turns"])


@pytest.mark.exhaustive
def test_every_phase_runs_on_a_cpu(tmp_path: Path) -> None:
    """With small sizes; some minutes."""
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 0, (tmp_path / "gpu.json").read_text()
