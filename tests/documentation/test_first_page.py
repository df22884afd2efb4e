"""README is short, its figures are those of the results, and each of its blocks runs alone and prints what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import first_page
import small_updates

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("page", "name"), first_page.BLOCKS)
def test_figures_are_those_of_the_results(page: Path, name: str) -> None:
    text = page.read_text(encoding="utf-8")
    (held,) = re.findall(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", text, re.DOTALL)
    assert held == first_page.BLOCKS[page, name]()


def test_the_first_page_is_short_and_all_of_its_programs_show_what_they_print() -> None:
    assert README.count("\n") <= 110
    assert len(SHOWN) == README.count("```python")


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_a_block_runs_alone_and_prints_what_it_shows(number: int, tmp_path: Path) -> None:
    source, printed = SHOWN[number]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_the_rate_of_the_demo_is_that_of_the_picture() -> None:
    (command,) = re.findall(
        r"^\t\$\(BIN\)/everybit compare (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert f"--lr {small_updates.DRAWN} " in command
