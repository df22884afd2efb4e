"""The benchmark of Muon: what it runs, that a case has all its numbers, and that the plain loop is Muon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import matrices
from matrices import Arguments, Case, PlainMuon, cases, iteration_cells, measure, step_cells

PAGE = Path(__file__).parents[2] / "docs" / "speed.md"


def test_an_iteration_has_times_alone_and_together() -> None:
    result = measure(Case("iteration", "3 x 4 x 5", 1, "float32"), 0.0)
    assert {len(samples) for samples in result.samples.values()} == {3}
    assert len(iteration_cells(result)) == len(matrices.ITERATION_COLUMNS)


@pytest.mark.exhaustive
def test_a_step_has_times_and_temporaries_of_all() -> None:
    result = measure(Case("step", "quick", 1), 0.0)
    assert list(result.samples) == list(result.peaks) == ["everybit", "compiled", "together", "torch", "plain loop"]
    assert min(result.peaks.values()) > 0
    assert len(step_cells(result)) == len(matrices.STEP_COLUMNS)


def test_the_cases_are_steps_and_iterations_with_each_number_of_threads() -> None:
    found = cases(Arguments(threads=(1, 2)))
    assert len(found) == 2 * len(matrices.MODELS) + 2 * 2 * len(matrices.BATCHES)
    assert sum(rows * columns for rows, columns in matrices.MODELS["50M"]) == 49_152_000


def test_the_plain_loop_takes_torchs_steps_but_for_roundings_to_bfloat16() -> None:
    """Its products are not fused, so that each of 15 rounds more often; an entry is below 1, and the learning rate 0.02."""
    start, gradient = torch.randn(16, 24), torch.randn(16, 24)
    found = []
    for make in (
        PlainMuon,
        lambda p: torch.optim.Muon(p, lr=matrices.RATE, momentum=matrices.MOMENTUM, weight_decay=matrices.DECAY),
    ):
        parameter = nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        make([parameter]).step()
        found.append(parameter.detach())
    assert float((found[0] - found[1]).abs().max()) <= 0.02 * 15 * 2.0**-8
    assert float((found[0] - start).abs().max()) > 0.02 * 0.1


def test_the_page_has_a_place_for_the_tables() -> None:
    assert "<!-- begin matrices-cpu -->\n" in PAGE.read_text(encoding="utf-8")
