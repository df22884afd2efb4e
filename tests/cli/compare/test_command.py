"""The command, from its line to its files and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everybit_cli import main
from everybit_cli.compare import command
from everybit_cli.compare.corpus import Corpus
from everybit_cli.compare.progress import Bars

TINY = ["compare", "--model", "tiny", "--steps", "12", "--batch", "2", "--context", "16", "--threads", "1"]


@pytest.fixture(autouse=True)
def _small_text(monkeypatch: pytest.MonkeyPatch, corpus: Corpus) -> None:
    monkeypatch.setattr(command, "load_corpus", lambda: corpus)


def test_a_run_prints_its_table_and_keeps_every_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [*TINY, "--out", str(out), "--policies", "FP32", "PURE_BF16", "LEAN_BF16", "--seeds", "2"]
    assert main(arguments) == 0
    assert sorted(path.name for path in out.iterdir()) == ["compare.json", "compare.png"]
    data: dict[str, Any] = json.loads((out / "compare.json").read_text())
    assert data["command"].startswith("everybit compare --model tiny --steps 12")
    assert not data["interrupted"]
    assert data["seeds"] == [0, 1]
    assert data["options"]["lr"] == 1e-3
    assert data["policies"]["LEAN_BF16"]["params"] == {"format": "Split", "bits": 16, "rounding": "nearest"}
    assert {"python", "torch", "everybit"} <= set(data["versions"])
    assert data["machine"]["threads"] == 1
    assert [(r["policy"], r["seed"]) for r in data["records"]] == [
        (p, s) for s in (0, 1) for p in ("FP32", "PURE_BF16", "LEAN_BF16")
    ]
    for record in data["records"]:
        assert len(record["losses"]) == 12
        assert record["validation"][-1]["step"] == 12
        assert record["probes"][-1]["step"] == 12
    printed = capsys.readouterr().out
    for row in data["summary"]:
        line = next(line for line in printed.splitlines() if line.startswith(row["policy"]) and "━" not in line)
        assert f"{row['validation_loss']:.4f}" in line
        assert f"{row['edq']:.3f}" in line
    bytes_per_parameter = {row["policy"]: row["bytes_predicted"] for row in data["summary"]}
    assert bytes_per_parameter == {"FP32": 16.0, "PURE_BF16": 8.0, "LEAN_BF16": 10.0}


def test_another_optimizer_is_named_in_title_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--optimizer",
        "lion,betas=0.9:0.98",
        "--lr",
        "3e-4",
        "--policies",
        "FP32",
        "LEAN_BF16",
        "--out",
        str(tmp_path),
    ]
    assert main([*TINY, *arguments]) == 0
    data: dict[str, Any] = json.loads((tmp_path / "compare.json").read_text())
    assert data["optimizer"]["name"] == "lion"
    assert data["optimizer"]["link"] == "https://arxiv.org/abs/2302.06675"
    assert data["optimizer"]["hyperparameters"]["betas"] == [0.9, 0.98]
    assert data["options"]["lr"] == 3e-4
    assert {row["policy"]: row["bytes_predicted"] for row in data["summary"]} == {"FP32": 12.0, "LEAN_BF16": 8.0}
    assert capsys.readouterr().out.startswith("Lion (betas (0.9, 0.98)), ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "everybit compare: --steps: got 0; accepted: a whole number, at least 1"),
        (["--policies", "FP31"], "everybit compare: --policies: got FP31 (did you mean FP32?); accepted: "),
        (["--optimizer", "lien"], "everybit compare: --optimizer: got lien (did you mean lion?); accepted: sgd, "),
        (
            ["--optimizer", "lion", "--policies", "PURE_BF16"],
            "everybit compare: --policies: lion refuses PURE_BF16: ",
        ),
        (["--context", "1000000"], "everybit compare: --context: got 1000000; accepted: at most "),
    ],
)
def test_a_bad_option_is_one_line_and_code_2_before_anything_is_made(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "--out", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(message)
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["compare", "--steps", "many"], ["compare", "--model", "huge"], ["compare", "3"]]
)
def test_what_cannot_be_parsed_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_ctrl_c_leaves_the_last_results_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.json").write_text("last")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert main([*TINY, "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["compare.json"]
    assert (tmp_path / "compare.json").read_text() == "last"


def test_ctrl_c_after_a_validation_writes_what_there_was_beside_the_last_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "compare.json").write_text("last")
    validated = Bars.validated

    def interrupting(self: Bars, policy: str, loss: float) -> None:
        validated(self, policy, loss)
        if policy == "LEAN_BF16":
            raise KeyboardInterrupt

    monkeypatch.setattr(Bars, "validated", interrupting)
    assert main([*TINY, "--policies", "FP32", "LEAN_BF16", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "compare.json").read_text() == "last"
    data = json.loads((tmp_path / "compare-interrupted.json").read_text())
    assert data["interrupted"]
    assert {len(record["losses"]) for record in data["records"]} == {2}
    assert (tmp_path / "compare-interrupted.png").stat().st_size > 10_000
    printed = " ".join(capsys.readouterr().out.split())
    assert "Interrupted: this is what there was at step 2 of 12, seeds 0." in printed
    assert "After 2 steps differences between policies are noise" in printed


@pytest.mark.slow
def test_it_runs_as_a_module_and_its_help_names_every_option() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everybit_cli", "compare", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--steps", "--model", "--policies", "--seeds", "--device", "--out", "--lr", "--compile"):
        assert option in done.stdout


@pytest.mark.slow
def test_the_library_does_not_load_what_only_the_command_needs() -> None:
    code = "import sys, everybit_torch; print({'tyro', 'rich', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_without_the_extra_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("everybit_cli.command_line.find_spec", lambda name: None if name == "tyro" else object())
    assert main(TINY) == 2
    assert capsys.readouterr().err == "everybit: the command line needs tyro: pip install tyro\n"
