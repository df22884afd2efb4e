"""The site: every public name has an entry in the reference, and every page a place in the navigation."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import everybit
import everybit_torch
from tests.support.modules import module_at

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
ENTRIES = [
    (page.name, name) for page in sorted((DOCS / "reference").glob("*.md")) for name in ENTRY.findall(page.read_text())
]


def resolved(name: str) -> Any:
    """The object of a dotted name, whose modules are imported as needed."""
    package, *rest = name.split(".")
    found: Any = importlib.import_module(package)
    for index, part in enumerate(rest, 1):
        found = getattr(found, part, None) or importlib.import_module(".".join((package, *rest[:index])))
    return found


@pytest.mark.parametrize("package", [everybit, everybit_torch])
def test_every_public_name_has_one_entry_in_the_reference(package: Any) -> None:
    entries = [name for _, name in ENTRIES]
    public = [f"{package.__name__}.{name}" for name in package.__all__]
    assert [name for name in public if entries.count(name) != 1] == []


def test_an_entry_of_the_reference_names_something_that_is_there() -> None:
    assert [name for _, name in ENTRIES if resolved(name) is None] == []


def test_the_members_that_an_entry_lists_are_there() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = re.findall(
        r"^::: ([\w.]+)\n    options:\n(?:      (?!members).*\n)*      members: \[(.*)\]$", pages, re.MULTILINE
    )
    assert len(listed) >= 10
    for name, members in listed:
        missing = [member for member in members.split(", ") if not hasattr(resolved(name), member)]
        assert missing == [], name


def test_no_docstring_has_a_section_that_the_site_shows_as_quotes() -> None:
    """``Example:`` is an admonition to the site's parser, which flattens its lines into nested quotes; ``Examples:`` is code."""
    sources = [*ROOT.glob("core/**/*.py"), *ROOT.glob("adapters/**/*.py")]
    assert len(sources) > 100
    assert [str(path) for path in sources if re.search(r"^ *Example:$", path.read_text(), re.MULTILINE)] == []


def test_every_page_has_one_place_in_the_navigation() -> None:
    navigation = re.findall(r"[\w/.-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(navigation) == sorted(pages)


@pytest.mark.parametrize(
    ("typed", "page"),
    [
        ("8bit", "how-to/train_with_8_bit_state.md"),
        ("ema", "how-to/average_weights.md"),
        ("bytes per parameter", "policies.md"),
        ("muon fsdp2", "how-to/train_with_muon.md"),
        ("gradscaler", "torch.md"),
    ],
)
def test_what_people_type_into_the_search_is_in_at_most_two_headings(typed: str, page: str) -> None:
    """The site's search counts a word in a heading most, so that a page with all words in one is among the first."""
    found = [
        str(path.relative_to(DOCS))
        for path in sorted(DOCS.rglob("*.md"))
        if "decisions" not in path.parts
        for heading in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if set(typed.split()) <= set(re.findall(r"\w+", heading.lower()))
    ]
    assert page in found
    assert len(found) <= 2, found


def test_decisions_come_last_in_the_search() -> None:
    """Last where two entries count alike, and without a title that counts most."""
    built = module_at(DOCS / "reference/built.py")
    items = [
        {"location": "decisions/0002-holes/", "title": "0002: Holes", "text": "a"},
        {"location": "decisions/0002-holes/#checkpoints", "title": "Checkpoints", "text": "b"},
        {"location": "checkpoints/", "title": "Checkpoints", "text": "c"},
    ]
    found = built.decisions_last(items)
    assert found == [
        items[2],
        items[0] | {"title": "Decision 0002", "text": "<p>0002: Holes</p> a"},
        items[1] | {"title": "Decision 0002", "text": "<p>Checkpoints</p> b"},
    ]
    assert built.decisions_last(found) == found
