"""The table of where implementations disagree is what its program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagreements import DISAGREEMENTS, HEAD, row

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_each_question_has_its_line_on_the_page() -> None:
    _, _, after = PAGE.read_text().partition(HEAD + "\n")
    lines = after.split("\n\n")[0].splitlines()
    assert len(lines) == len(DISAGREEMENTS)
    for line, one in zip(lines, DISAGREEMENTS, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert [cells[0], cells[1], cells[-1]] == [one.optimizer, one.question, one.argument]
        assert cells[2] == "; ".join(f"{answer.text}: {answer.who}" for answer in one.answers)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=() if one.optimizer in ("Adan", "LARS") else pytest.mark.exhaustive, id=one.question)
        for number, one in enumerate(DISAGREEMENTS)
    ],
)
def test_its_distance_is_measured_anew(number: int) -> None:
    assert row(DISAGREEMENTS[number]) in PAGE.read_text().splitlines()
