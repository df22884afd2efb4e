"""What all commands have in common: version, help, JSON, silence, exit codes, and errors of memory that ran out."""

from __future__ import annotations

import json
from typing import Any

import pytest

import everybit as eb
from everybit_torch import cli
from everybit_torch.cli import setup
from everybit_torch.cli.errors import BAD_OPTION, FAILED, INTERRUPTED

PLAN = ["plan", "--model", "tiny", "--policies", "LEAN_BF16", "--strategies", "optim"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"everybit {eb.__version__} (torch ")


def test_without_arguments_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name in ("compare", "plan", "advise", "bench"):
        assert name in printed


def test_a_command_that_there_is_not_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compared"]) == BAD_OPTION
    assert "got compared (did you mean compare?)" in capsys.readouterr().err
    assert cli.main(["aduit", "x"]) == BAD_OPTION
    assert capsys.readouterr().err == (
        "everybit: command: got aduit (did you mean audit?); accepted: compare, sweep, plan, advise, bench, audit\n"
    )


def test_json_has_standard_output_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--json"]) == 0
    printed = capsys.readouterr()
    (one,) = json.loads(printed.out)["plans"]
    assert (one["policy"], one["strategy"]) == ("LEAN_BF16", "optim")
    assert "LEAN_BF16" in printed.err


def test_quiet_prints_nothing_but_what_json_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cli.main([*PLAN, "--quiet", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["plans"]
    assert printed.err == ""
    assert cli.main([*PLAN, "--quiet", "--ranks", "0"]) == BAD_OPTION
    assert "--ranks: got 0" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_terminal_of_any_width_shows_every_name_and_number(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main([*PLAN, "--json"]) == 0
    printed = capsys.readouterr()
    (one,) = json.loads(printed.out)["plans"]
    assert "…" not in printed.err
    assert max(map(len, printed.err.splitlines())) <= columns
    words = printed.err.split()
    assert {"LEAN_BF16", "optim", f"{one['bytes_per_param']:.2f}"} <= set(words)
    assert f"{one['persistent_bytes'] / 2**10:.1f}" in words


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError(), FAILED, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory:\n you tried 8 bytes"), FAILED, "you tried 8 bytes"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
    ],
)  # fmt: skip
def test_memory_that_runs_out_and_ctrl_c_are_one_line(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(setup, "build", fail)
    assert cli.main(PLAN) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("everybit plan: ")
    assert printed.err.count("\n") == 1


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(setup, "build", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(PLAN)
