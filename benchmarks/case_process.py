"""Runs one case of a benchmark in a process of its own, so that neither memory nor compiled code is another's."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def run_case(program: str, arguments: list[str], limit: float) -> tuple[Any, str]:
    """Run ``program --case`` with further arguments.

    Args:
        program: Path of the benchmark, which prints its result as JSON in its last line.
        arguments: That say which case it is.
        limit: Seconds after which it is given up.

    Returns:
        The result, and why there is none; one of the two is empty.
    """
    command = [sys.executable, program, "--case", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None, f"took more than {limit:g} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""
