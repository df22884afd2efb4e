"""pyright, which editors run, accepts the package and what users write, and refuses what mypy refuses, line for line (``make types``)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def reported(*paths: str) -> list[tuple[str, int, str]]:
    """The file, line and message of each of pyright's errors; without paths those of what pyproject.toml includes.

    ``PYRIGHT`` may name another program than the one that the package ``pyright`` installs.
    """
    program = os.environ.get("PYRIGHT") or shutil.which("pyright", path=os.path.dirname(sys.executable)) or "pyright"
    done = subprocess.run(
        [program, "--outputjson", "--pythonpath", sys.executable, *paths],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 0
    errors = [one for one in found["generalDiagnostics"] if one["severity"] == "error"]
    return [(Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"]) for one in errors]


def test_the_package_and_what_users_write_are_clean() -> None:
    assert reported() == []


@pytest.mark.parametrize("program", sorted((ROOT / "typings/fails").glob("*.py")), ids=lambda path: path.stem)
def test_what_mypy_refuses_is_refused(program: Path) -> None:
    lines = program.read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if "# E: " in line}
    got = {line for name, line, _ in reported("typings/fails") if name == program.name}
    assert len(expected) >= 5
    assert got == expected
