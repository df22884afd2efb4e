"""One run of pytest in a row's environment, and what it counted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from matrix.environments import Environment
from matrix.rows import ROOT


@dataclass(frozen=True)
class Outcome:
    """Numbers of tests, the names of those that failed, and why the run is not whole, if it is not."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    seconds: float = 0
    broken: str | None = None


def run(environment: Environment, area: str, arguments: str, minutes: float) -> Outcome:
    """Run the tests of one folder of ``tests/``; pytest writes its progress where this program writes."""
    report = environment.folder / f"junit-{area}.xml"
    report.unlink(missing_ok=True)
    command = [
        str(environment.python), "-m", "pytest", "-p", "no:cacheprovider", *shlex.split(arguments), f"--junitxml={report}", f"tests/{area}"
    ]  # fmt: skip
    # Compiled code of one torch is no other's, and sources of this checkout are tested, wherever the environment was made.
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "core"), str(ROOT / "adapters")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(environment.folder / "inductor"),
        # Some start `python` or `everybit` by name.
        "PATH": os.pathsep.join([str(environment.folder / "bin"), os.environ.get("PATH", "")]),
    }
    # In a session of its own, because pytest's workers outlive it when it is killed.
    with subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True) as process:
        try:
            code = process.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            return Outcome(broken=f"did not end within {minutes:g} minutes")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return read(report, code)


def live_objects(environment: Environment) -> None:
    """Count the objects that steps over FSDP2's parameters leave behind, of everybit and of torch's own optimizers."""
    paths = os.pathsep.join([str(ROOT / "core"), str(ROOT / "adapters")])
    command = [str(environment.python), "-W", "ignore", "benchmarks/live_objects.py"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, timeout=600, check=False)


def read(report: Path, code: int) -> Outcome:
    """What a report in JUnit's format says; pytest's exit code says whether there is one to trust."""
    if not report.exists():
        return Outcome(broken=f"pytest ended with code {code} and without a report")
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    numbers = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = numbers["failures"] + numbers["errors"]
    return Outcome(
        passed=numbers["tests"] - failed - numbers["skipped"],
        failed=failed,
        skipped=numbers["skipped"],
        failures=tuple(
            f"{case.get('classname')}::{case.get('name')}"
            for case in ElementTree.parse(report).getroot().iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ),
        seconds=round(sum(float(suite.get("time", 0)) for suite in suites)),
        # 5: every file of the area was skipped.
        broken=None if code in (0, 1) or (code == 5 and numbers["skipped"]) else f"pytest ended with code {code}",
    )


def commit(folders: Sequence[str] = ("core", "adapters", "tests")) -> str:
    """The commit of what is tested, with a plus sign if files differ from it."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if said.returncode:
        return "no repository"
    changed = subprocess.run(
        ["git", "status", "--porcelain", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() + ("+" if changed.stdout else "")
