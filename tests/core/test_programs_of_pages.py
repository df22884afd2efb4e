"""The programs of the pages about other libraries and about numerics: each page runs from its first block to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(?P<skip><!-- not run: .* -->\n)?```(?P<kind>python|diff)\n(?P<text>.*?)```", re.DOTALL)
COMING_FROM = sorted(
    path.name for path in (DOCS / "coming-from").glob("*.md") if path.name not in ("index.md", "one_program.md")
)


def programs(page: Path) -> list[str]:
    """The blocks of a page that can be run; of a difference what it leads to."""
    found = [match for match in BLOCK.finditer(page.read_text(encoding="utf-8")) if match["skip"] is None]
    return [after(match["text"]) if match["kind"] == "diff" else match["text"] for match in found]


def after(difference: str) -> str:
    """The program without the lines that are taken away."""
    return "".join(f"{line[1:]}\n" for line in difference.splitlines() if not line.startswith("-"))


def run(page: str, names: dict[str, Any]) -> int:
    """Run the programs of a page one after the other; how many there are."""
    blocks = programs(DOCS / page)
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec", dont_inherit=True), names)
    return len(blocks)


@pytest.mark.parametrize("page", COMING_FROM)
def test_a_page_about_another_library_leads_to_a_program_that_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert run("coming-from/index.md", names) == 1
    assert run(f"coming-from/{page}", names) >= 1


@pytest.mark.parametrize(
    "page", sorted(path.name for path in (DOCS / "concepts").glob("*.md") if path.name != "index.md")
)
def test_the_examples_of_a_page_about_numerics_run(page: str) -> None:
    run(f"concepts/{page}", {})


def test_of_a_difference_the_lines_that_are_added_and_kept_are_run() -> None:
    assert after("-one\n+two\n three\n\n") == "two\nthree\n\n"
