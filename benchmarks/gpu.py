"""``make gpu``: the tests that need a GPU and all measurements on one, in phases, each with a time limit of its own.

Every phase is a program of its own. One that fails, or that is stopped at its limit, does not keep the others from running; the exit status
says whether all of them passed: 0, or 1, or 2 if there is no such device. ``--device cpu`` is a rehearsal, which runs every phase with
small sizes on a CPU; its results go to ``runs/``.

The folder of the results has ``gpu.json`` (what each phase said, with the machine that it ran on), the phases' raw results and their
output. Phases may be run one at a time, by ``--phases``: results of the others are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import gpu_page
from machine import describe

ROOT = Path(__file__).parents[1]
WHOLE = 1800.0
"""Seconds that all phases take at most, on a GPU."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A program to run.

    Attributes:
        name: Of the phase.
        command: Arguments for Python.
        limit: Seconds after which it is stopped.
        result: The file that it writes, in the folder of the results.
        needs: Modules without which it cannot run.
        environment: What is added to it.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    result: str
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a phase.

    Attributes:
        name: Of the phase.
        status: ``"passed"``, or why not.
        seconds: That it took.
        limit: That it might have taken.
        command: As one line.
        machine: Where it ran.
    """

    name: str
    status: str
    seconds: float
    limit: float
    command: str
    machine: dict[str, Any]


SHARDED = (
    "FSDP2, fused", "FSDP2, everybit AdamW", "everybit, optim_grads_params", "everybit, optim_grads_params, LEAN_BF16", "DDP, fused",
)  # fmt: skip
PEERS = (
    "torch fused", "optimi, Triton", "optimi, Triton, Kahan", "bitsandbytes", "bitsandbytes 8 bit", "FlashOptim, 24 bit weights",
    "Apex FusedAdam", "everybit FP32", "everybit EXACT_BF16", "everybit MIXED_BF16", "everybit LEAN_BF16",
    "everybit KAHAN_BF16", "everybit TIGHT_BF16", "everybit FLOOR_BF16", "torchao, stochastic", "torchao 8 bit", "HeavyBall",
    "HeavyBall, bfloat16",
)  # fmt: skip
"""The last ones compile each tensor by itself, for up to a minute."""
REHEARSED_PEERS = ("torch fused", "optimi", "Apex FusedAdam", "everybit FP32, not compiled")


def phases(device: str, out: Path) -> tuple[Phase, ...]:
    """All phases, in the order in which they are run."""
    full = device == "cuda"
    tests = shlex.split(
        "-m pytest -m cuda -q -rfEs -p no:cacheprovider -p no:benchmark --ignore=tests/conformance tests"
    )
    tests += [f"--junitxml={out / 'tests.xml'}"]
    # Without a CUDA toolkit powers in float64 may be off in their last bit, of which torch warns.
    tests += ["-o", "addopts=--strict-markers --import-mode=importlib", "-W", "ignore:CUDA_HOME not set"]
    steps = [*shlex.split("benchmarks/gpu_steps.py --device"), device, "--out", str(out / "steps.json")]
    peers = [*shlex.split("benchmarks/speed.py --device"), device, "--out", str(out / "peers.json")]
    compare = [*shlex.split("-m everybit_torch compare --threads 1 --device"), device, "--out", str(out / "compare")]
    offload = [*shlex.split("benchmarks/gpu_offload.py --device"), device, "--out", str(out / "offload.json")]
    sharded = [*shlex.split("benchmarks/sharded.py --ranks 1 --device"), device, "--out", str(out / "sharded.json")]
    if full:
        tests += ["-n", "4"]  # most of their time is compilation
        peers += shlex.split("--models opt-125m --seconds 0.5 --limit 60 --contestants")
        peers += PEERS
        compare += shlex.split("--model large --seeds 3 --steps 300 --compile")
        sharded += shlex.split("--models 85M --rounds 1 --steps 20 --batch 8 --context 256 --limit 90 --contestants")
        sharded += SHARDED
    else:
        steps += shlex.split("--policies FP32 LEAN_BF16 --seconds 0.05")
        peers += ["--models", "gpt-0.6M", "--threads", "1", "--seconds", "0.05", "--limit", "120", "--contestants"]
        peers += REHEARSED_PEERS
        compare += shlex.split("--model tiny --seeds 3 --steps 10 --batch 1 --context 16 --policies FP32 LEAN_BF16")
        sharded += shlex.split("--models tiny --rounds 1 --steps 2 --limit 240 --contestants")
        sharded += ("FSDP2, fused", "everybit, optim_grads_params")
        offload += shlex.split("--numel 1000000 --rounds 2")
    return (
        Phase(
            "tests", tuple(tests), 420 if full else 900, "tests.xml", ("pytest", "hypothesis", "xdist"), {"EVERYBIT_DEVICE": device}
        ),
        Phase("steps", tuple(steps), 240 if full else 600, "steps.json"),
        Phase("peers", tuple(peers), 330 if full else 600, "peers.json", ("tyro", "rich")),
        Phase("compare", tuple(compare), 420 if full else 600, "compare/compare.json", ("tyro", "rich", "matplotlib", "numpy")),
        Phase("sharded", tuple(sharded), 240 if full else 900, "sharded.json", ("tyro",)),
        Phase("offload", tuple(offload), 150 if full else 300, "offload.json"),
    )  # fmt: skip


def missing(modules: Sequence[str]) -> list[str]:
    """Those of some modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def run(phase: Phase, out: Path, machine: dict[str, Any]) -> Outcome:
    """Run a phase; its output goes to a file."""
    command = [sys.executable, *phase.command]
    shown = shlex.join(["python", *phase.command]).replace(f"{ROOT}{os.sep}", "")

    def outcome(status: str, seconds: float = 0.0) -> Outcome:
        return Outcome(phase.name, status, round(seconds, 1), phase.limit, shown, machine)

    # What an earlier run left is not this one's result.
    (out / phase.result).unlink(missing_ok=True)
    if absent := missing(phase.needs):
        return outcome(f"not run: {', '.join(absent)} not installed")
    paths = [str(ROOT / name) for name in ("core", "adapters", "benchmarks", ".")]
    paths += [given] if (given := os.environ.get("PYTHONPATH")) else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(phase.environment)
    log = out / f"{phase.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as written:
        # A session of its own, so that what it starts can be stopped with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=phase.limit)
        except subprocess.TimeoutExpired:
            return outcome(f"stopped after {phase.limit:g} s", time.perf_counter() - begin)
        finally:
            _stop(process)
    seconds = time.perf_counter() - begin
    if status != 0:
        return outcome(f"failed: exit status {status}, see {log.name}", seconds)
    if not (out / phase.result).exists():
        return outcome(f"failed: it wrote no {phase.result}", seconds)
    if phase.name == "tests" and tests_of(out / phase.result)["passed"] == 0:
        return outcome("failed: no test ran", seconds)
    return outcome("passed", seconds)


def _stop(process: subprocess.Popen[Any]) -> None:
    """End a process, and all that it started and that is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tests_of(path: Path) -> dict[str, Any]:
    """How many tests passed and were skipped, and which failed."""
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": []}
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"].append(f"{case.get('classname')}: {case.get('name')}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def collected(out: Path) -> dict[str, Any]:
    """The phases' results that there are, by name; of the comparison without the losses of each step."""
    found: dict[str, Any] = {}
    if (out / "tests.xml").exists():
        found["tests"] = tests_of(out / "tests.xml")
    for name in ("steps", "peers", "sharded"):
        if (out / f"{name}.json").exists():
            found[name] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    if (path := out / "compare" / "compare.json").exists():
        found["compare"] = {key: value for key, value in json.loads(path.read_text()).items() if key != "records"}
    return found


def refused(device: str) -> str:
    """Why nothing can be run; empty if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "device: got cuda, and torch finds no CUDA device here; accepted here is DEVICE=cpu, a rehearsal with small sizes."
    if absent := missing(("optree",)):
        return f"{absent[0]}: not installed; put a folder that has it into PYTHONPATH, as docs/gpu_measured.md says."
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if all phases passed, 1 if one did not, 2 if there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--phases", nargs="*", help="their names; default: all")
    parser.add_argument(
        "--out", type=Path, help="folder for results; default: benchmarks/results/gpu, of a rehearsal runs/gpu"
    )
    parser.add_argument(
        "--page", type=Path, help="page for the tables; default: docs/gpu_measured.md, of a rehearsal none"
    )
    given = parser.parse_args(arguments)
    full = given.device == "cuda"
    out: Path = (given.out or ROOT / ("benchmarks/results/gpu" if full else "runs/gpu")).resolve()
    page: Path | None = given.page or (ROOT / "docs/gpu_measured.md" if full else None)
    known = {phase.name: phase for phase in phases(given.device, out)}
    if unknown := [name for name in given.phases or () if name not in known]:
        parser.error(f"phases: got {', '.join(unknown)}; accepted are {', '.join(known)}.")
    if said := refused(given.device):
        print(said, file=sys.stderr)
        return 2
    return perform([known[name] for name in given.phases or known], given.device, out, page)


def perform(chosen: Sequence[Phase], device: str, out: Path, page: Path | None) -> int:
    """Run phases, and write what became of them; results of other phases that are there are kept."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "gpu.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    outcomes: dict[str, dict[str, Any]] = held.get("phases", {}) if held.get("device") == device else {}
    machine = describe()
    for phase in chosen:
        print(f"{phase.name}: at most {phase.limit:g} s; its output is in {out / phase.name}.log", flush=True)
        outcome = run(phase, out, machine)
        outcomes[phase.name] = asdict(outcome)
        print(f"{phase.name}: {outcome.status} ({outcome.seconds:g} s)", flush=True)
        results = {"device": device, "phases": outcomes, "results": collected(out)}
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if page is not None:
            gpu_page.write(page, results)
    if page is None:
        print(gpu_page.markdown(json.loads(path.read_text(encoding="utf-8"))))
    return 0 if all(outcomes[phase.name]["status"] == "passed" for phase in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
