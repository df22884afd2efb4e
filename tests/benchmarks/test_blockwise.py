"""The benchmark of blockwise state: its numbers for formats of ours, and that the page shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import everybit as eb
from blockwise import Arguments, moments, ours, shown, trips, update

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["signed", "non-negative"])
def test_every_map_is_among_the_round_trips_and_rounds_little(kind: eb.SlotKind) -> None:
    x = torch.linspace(0.5, 1.0, 512)
    found = {key: trip(x) for key, trip in trips(kind).items() if key[0] == "everybit"}
    assert len(found) == 12
    # Half the greatest distance of two levels there: 32 / 448 of e4m3, and at most 0.5 in 4 bits.
    largest = {8: 16 / 448, 4: 0.25}
    assert all(float((got - x).abs().max()) <= largest[bits] for (_, _, bits), got in found.items())


def test_the_update_is_adams_and_moments_are_those_of_one_parameter() -> None:
    gradient = torch.linspace(1.0, 2.0, 5, dtype=torch.float64)
    torch.testing.assert_close(
        update(0.1 * gradient, 1e-3 * gradient.square(), 1), torch.ones(5).double(), rtol=1e-7, atol=0
    )
    optimizer = ours(eb.policies.FP32, [nn.Parameter(torch.zeros(5))], 1.0, compiled=False)
    optimizer.param_groups[0]["params"][0].grad = gradient.float()
    optimizer.step()
    for got, rate, power in zip(moments(optimizer), (0.1, 0.001), (1, 2), strict=True):
        torch.testing.assert_close(got, rate * gradient**power, rtol=1e-6, atol=0)


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    begin, end = "<!-- begin blockwise-cpu -->\n", "<!-- end blockwise-cpu -->"
    results = ROOT / Arguments().out
    held = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    assert page.split(begin)[1].split(end)[0] == shown(held)
