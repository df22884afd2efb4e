"""The program that runs the tests on every torch: what it would run, where it cannot, and what it keeps of what it found."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_codegen.report import END, write_into
from matrix.__main__ import main
from matrix.environments import Environment, requirements
from matrix.results import BEGIN, Result, load, merged, save, tables
from matrix.rows import AREAS, CONSTRAINTS, PYTHONS, ROOT, Row, UnavailableError, interpreter
from matrix.running import Outcome, read, run
from matrix.without_cuda import stand_in

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PASSED = Result(
    "newest", "3.11.7", "2.15.0", "0.20.0", "core", outcome=Outcome(passed=3), commit="abc", date="2026-11-22"
)
ABSENT = Result("newest", "3.11", "2.15.0", "0.20.0", "core", not_run="there is no python3.11")


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_oldest_row_is_what_the_project_declares_as_its_lower_bounds() -> None:
    declared = dict(re.findall(r"(\w+)>=([\d.]+)", " ".join(PROJECT["dependencies"])))
    oldest = Row("oldest", "3.11")
    assert numbers(oldest.version("torch"))[:2] == numbers(declared["torch"])
    assert oldest.version("optree") == declared["optree"]


def test_rows_go_from_the_oldest_to_the_newest_and_take_in_every_python_that_is_declared() -> None:
    torches = [numbers(Row(name, "3.11").version("torch")) for name in CONSTRAINTS]
    assert torches == sorted(torches)
    declared = {said.rpartition(" ")[2] for said in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", said)}
    assert set(PYTHONS) == declared
    assert set(AREAS) >= {"core", "torch", "sharded"}
    assert not any(re.match("torch|triton|everybit", one) for one in requirements())


def test_an_interpreter_is_the_version_that_was_asked_for_or_is_missed_by_name(tmp_path: Path) -> None:
    mine = "{}.{}".format(*sys.version_info)
    for number, says in (("7", mine), ("12", "2.7")):  # the second is broken, and newer
        program = tmp_path / f"{mine}.{number}/bin/python"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho {says}\n")
        program.chmod(0o755)
    found = interpreter(mine, [tmp_path])
    said = subprocess.run(
        [str(found), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
    )
    assert said.stdout.strip() == mine
    with pytest.raises(UnavailableError, match=r"Python 3\.99: there is no python3\.99 on the path or in "):
        interpreter("3.99", [tmp_path])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--rows", "rows: got nothing-like-it; accepted are oldest, 2.12, pinned, newest."),
        ("--areas", "areas: got nothing-like-it; accepted are architecture, "),
    ],
)
def test_names_that_there_are_not_are_refused(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([option, "nothing-like-it"])
    assert said.split()[:6] == re.findall(r"\S+", capsys.readouterr().err.partition("Options: ")[2])[:6]


def test_a_row_that_cannot_be_had_is_told_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, out = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    given = ["--rows", "newest", "--python", "3.99", "--areas", "core", "--out", str(out), "--page", str(page)]
    assert main([*given, "--cache", str(tmp_path)]) == 0
    assert "NOT RUN: Python 3.99: there is no python3.99" in capsys.readouterr().out
    (result,) = load(out)
    assert result.outcome is None
    assert "`newest`, Python 3.99: Python 3.99: there is no python3.99" in page.read_text()


def test_what_was_not_run_now_keeps_its_result_and_what_was_run_replaces_it() -> None:
    assert merged([PASSED], [ABSENT]) == [PASSED]
    assert merged([ABSENT], [PASSED]) == [PASSED]
    failed = replace(PASSED, outcome=Outcome(failed=1, failures=("tests.core::a",)))
    assert merged([PASSED], [failed]) == [failed]
    other = replace(PASSED, area="torch")
    assert merged([PASSED], [other]) == [PASSED, other]


def test_results_are_read_as_they_were_written_and_shown_by_area(tmp_path: Path) -> None:
    failed = replace(PASSED, area="torch", outcome=Outcome(2, 1, 4, ("tests.torch::a",), 7, "pytest ended with code 2"))
    results = [PASSED, failed, replace(ABSENT, python="3.12")]
    save(tmp_path / "results.json", results)
    assert load(tmp_path / "results.json") == results
    assert load(tmp_path / "none.json") == []
    shown = tables(results, ["core", "sharded", "torch"]).splitlines()
    assert shown[0] == "| constraints | torch | optree | Python | core | torch |"
    assert shown[2] == (
        "| `newest` | 2.15.0 | 0.20.0 | 3.11.7 | 3 passed | 2 passed, **1 failed**, 4 skipped, **pytest ended with code 2** |"
    )
    assert shown[3] == "| `newest` | 2.15.0 | 0.20.0 | 3.12 | not run | not run |"
    assert "- `newest`, Python 3.12: there is no python3.11" in shown
    with pytest.raises(ValueError, match="between which tables are written"):
        write_into(tmp_path / "results.json", "new", BEGIN)


@pytest.mark.slow
def test_a_report_of_pytest_is_counted_and_a_run_without_one_is_broken(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert False\n@pytest.mark.skip('no')\ndef test_c(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\ndef test_d(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_some.py"]
    code = subprocess.run(command, cwd=tmp_path, capture_output=True).returncode
    outcome = read(report, code)
    assert (outcome.passed, outcome.failed, outcome.skipped, outcome.broken) == (1, 2, 1, None)
    assert outcome.failures == ("test_some::test_b", "test_some::test_d")
    assert read(report, 5).broken is None  # of an area of which every file is skipped
    assert read(report, 3).broken == "pytest ended with code 3"
    assert read(tmp_path / "none.xml", -9).broken == "pytest ended with code -9 and without a report"


def test_a_run_that_takes_too_long_is_ended_with_all_of_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/worker\nwait\n")
    program.chmod(0o755)
    outcome = run(Environment(tmp_path, {}), "core", "-q", 0.02)
    assert outcome.broken == "did not end within 0.02 minutes"
    worker = int((tmp_path / "worker").read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().split()[2]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the worker still runs")


@pytest.mark.skipif(sys.platform != "linux", reason="only for Linux torch is linked with CUDA")
def test_a_library_that_needs_cuda_is_loaded_with_a_stand_in_that_finds_no_device(tmp_path: Path) -> None:
    cuda, folder = tmp_path / "cuda", tmp_path / "torch"
    cuda.mkdir()
    folder.mkdir()

    def compiled(library: Path, source: str, *flags: str) -> None:
        made = ["-shared", "-fPIC", "-w", "-xc", "-", "-xnone", "-o", str(library), f"-Wl,-soname,{library.name}"]
        subprocess.run(["cc", *made, *flags], input=source, text=True, check=True)

    (cuda / "versions").write_text("V1 { *; };")
    compiled(
        cuda / "libcudart.so.99",
        "int cudaGetDeviceCount(int *n) { return 0; }",
        f"-Wl,--version-script,{cuda}/versions",
    )
    compiled(cuda / "libnccl.so.9", "int ncclGetVersion(int *n) { return 0; }")
    compiled(
        folder / "libtorch_like.so",
        "int cudaGetDeviceCount(int *); int ncclGetVersion(int *);"
        " int (*table[])(int *) = {ncclGetVersion}; int devices(void) { return cudaGetDeviceCount(0); }",
        str(cuda / "libcudart.so.99"), str(cuda / "libnccl.so.9"), "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip
    with pytest.raises(OSError, match=r"libcudart\.so\.99"):
        ctypes.CDLL(str(folder / "libtorch_like.so"))
    assert stand_in(folder) == ["libcudart.so.99", "libnccl.so.9"]
    assert ctypes.CDLL(str(folder / "libtorch_like.so")).devices() == 100
    assert stand_in(folder) == ["libcudart.so.99", "libnccl.so.9"], "made again"
