"""What all commands have in common: version, help, JSON, silence, exit codes, and errors of memory that ran out."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import everybit as eb
import everybit_cli as cli
from everybit_cli.command_line import COMMANDS
from everybit_cli.errors import BAD_OPTION, FAILED, INTERRUPTED
from everybit_cli.plan import options as plan_options

PLAN = ["plan", "--model", "tiny", "--policies", "LEAN_BF16", "--strategies", "optim"]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"everybit {eb.__version__} (torch ")


def test_without_arguments_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert name in printed
        assert summary in " ".join(printed.split())


@pytest.mark.slow
def test_the_list_of_commands_fits_a_terminal_and_loads_none_of_them() -> None:
    code = (
        "import sys\nimport everybit_cli as cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print({'tyro', 'rich', 'matplotlib', 'everybit_cli.plan.command'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    *help, loaded = done.stdout.splitlines()
    assert loaded == "set()"
    assert len(help) <= 24
    assert max(map(len, help)) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_broken_at_the_terminals_width_and_nowhere_else(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    text = [line.strip("│ ") for line in lines]
    for one, following in itertools.pairwise(text):
        word = following.split()[0] if following.split() else ""
        # A line ends where the next word does not fit: next to a column of options that is up to 41 characters wide.
        assert not word[:1].islower() or one[-1:] in ".)]" or one.startswith("-") or len(one) + 1 + len(word) > 33, (
            one,
            following,
        )


@pytest.mark.parametrize(("name", "option", "meant"), [("plan", "--polices", "--policies"), ("audit", "--ou", "--out")])
def test_an_option_that_there_is_not_is_one_line_about_its_own_command(
    name: str, option: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, option, "x"]) == BAD_OPTION
    assert capsys.readouterr().err == (
        f"everybit {name}: {option}: there is no such option (did you mean {meant}?); everybit {name} --help lists them\n"
    )
    assert cli.main(["--hlep"]) == BAD_OPTION
    assert "got --hlep (did you mean --help?)" in capsys.readouterr().err


def test_options_are_taken_as_they_may_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--no-json", "--main_grads=fp32", "--microbatches=2"]) == 0
    assert "2 microbatches a step" in capsys.readouterr().out


def test_shells_are_completed_for_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--tyro-print-completion", "bash"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_one_is_no_plural_and_a_heading_of_two_lines_is_one_word_in_a_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main([*PLAN, "--ranks", "1"]) == 0
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main([*PLAN, "--ranks", "1", "--memory", "1GB"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 rank, 1 microbatch a step" in printed
    assert "1 ranks" not in printed
    assert re.search(r" transient \d", printed)
    assert "tran-" not in printed


def test_a_command_that_there_is_not_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compared"]) == BAD_OPTION
    assert "got compared (did you mean compare?)" in capsys.readouterr().err
    assert cli.main(["aduit", "x"]) == BAD_OPTION
    assert capsys.readouterr().err == (
        "everybit: command: got aduit (did you mean audit?); accepted: compare, plan, audit\n"
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

    monkeypatch.setattr(plan_options, "build", fail)
    assert cli.main(PLAN) == code
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("everybit plan: ")
    assert printed.err.count("\n") == 1


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(plan_options, "build", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        cli.main(PLAN)
