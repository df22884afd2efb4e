"""The benchmark of optimizers that look at norms and rows: what it runs, and that a case has all its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

import reductions
from reductions import Arguments, Case, cases, cells, measure

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"


@pytest.mark.parametrize("case", [Case("", "adafactor", False), Case("", "lamb", False)])
def test_a_case_has_a_time_and_temporaries_of_all_three(case: Case) -> None:
    result = measure(case, 0.0, [(3, 2), (4,)])
    assert len(result.samples) == len(result.adamw_samples) >= 3
    assert min(result.peak, result.adamw_peak) > 0
    assert result.peer != "torch" or (len(result.peer_samples) == len(result.samples) and result.peer_peak > 0)
    assert len(cells(result)) == len(reductions.COLUMNS)


def test_an_unknown_subject_is_refused() -> None:
    with pytest.raises(SystemExit, match="subjects: got muon; accepted are adamw, lamb"):
        cases(Arguments(subjects=("muon",)))


def test_the_page_has_a_place_for_the_table() -> None:
    assert "<!-- begin reductions-cpu -->\n" in PAGE.read_text(encoding="utf-8")
