"""Prose stays within the limits of ``docs/words.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.modules import module_at

words = module_at(Path(__file__).parents[2] / "docs/words.py")


def test_every_part_has_few_phrases_that_are_read_twice() -> None:
    too_many = {part: number for part, number in words.numbers().items() if number > words.LIMITS[part]}
    assert not too_many, "python docs/words.py --show PART lists them"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("The rank who owns it.", "who, whose"),
        ("state: Of an optimizer.", "a fragment"),
        ("Return what is left.", "what for a noun"),
        ("A state with one that is cut.", "one for a noun"),
        ("The host asks the device.", "ask, answer"),
        ("Nothing is cast.", "nothing, none"),
    ],
)
def test_each_pattern_finds_its_phrase_and_plain_lines_have_none(line: str, name: str) -> None:
    found = words.found_in(
        [(Path("x"), 1, line), (Path("x"), 2, "Return the state of an optimizer: ``torch.ones(3)``.")]
    )
    assert [part for part, lines in found.items() if lines] == [name]
    assert [number for lines in found.values() for _, number, _ in lines] == [1]
