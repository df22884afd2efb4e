"""Claims of pages that can be read: numbers of optimizers, names of presets, install lines, numbers of decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import everybit as eb
from tests.support.pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAST = ("changelog.md", "decisions", "releasing.md")
"""Pages about what was so once, or will be."""


def present() -> list[Path]:
    return [page for page in PAGES if not any(part in PAST for part in page.relative_to(ROOT).parts)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_numbers_of_named_optimizers_are_right() -> None:
    found = {
        (named(page), int(number))
        for page in present()
        for number in re.findall(r"\b(\d+) (?:optimizers )?by name", page.read_text())
    }
    assert found
    assert {number for _, number in found} == {len(eb.optimizers())}, found


@pytest.mark.parametrize("page", present(), ids=named)
def test_presets_that_are_named_are_there(page: Path) -> None:
    quoted = re.findall(r"`(?:eb\.policies\.)?\"?([A-Z]+_(?:BF16|8BIT|4BIT))\"?`", page.read_text())
    assert [name for name in quoted if not hasattr(eb.policies, name)] == []


@pytest.mark.parametrize("page", present(), ids=named)
def test_no_page_installs_from_pypi_while_there_is_no_release(page: Path) -> None:
    assert re.findall(r"pip install ['\"]?everybit", page.read_text()) == []


@pytest.mark.parametrize(
    "name", ["docs/faq.md", "docs/coming-from/eight_bit.md", "docs/how-to/train_with_8_bit_state.md"]
)
def test_pages_about_few_bits_name_every_preset_of_few_bits(name: str) -> None:
    text = (ROOT / name).read_text()
    presets = [preset for preset in dir(eb.policies) if preset.endswith(("_8BIT", "_4BIT"))]
    assert presets
    assert [preset for preset in presets if preset not in text] == []


def test_every_decision_begins_with_its_number() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    assert len(pages) > 60
    heads = {page.name: page.read_text().split("\n", 1)[0] for page in pages}
    assert [name for name, head in heads.items() if not head.startswith(f"# {name[:4]}: ")] == []
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
