"""Muon against optax's, over 200 random steps in float64.

optax has JAX's layout: its scale has rows and columns exchanged. It corrects the bias of its momentum, which the norm divides out again
where momentum is not Nesterov's; where it is, the gradient's share of the mix is another one, which everybit does not offer.
"""

from __future__ import annotations

import math
from typing import Any

import optax
import pytest

import everybit as eb
from tests.support.following import PEAK, STEPS, deviation, ours, schedule
from tests.support.oracles import Noted, optax_rate, theirs_of_optax

SHAPES = {"tall": (6, 4), "wide": (3, 5), "row": (1, 4)}

# As in tests/core/test_muon.py: a step rounds some 100 times, and the iteration makes that up to 1000 times larger.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


def exchanged(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, columns / rows))


def optaxs(**options: Any) -> Any:
    return optax.contrib.muon(optax_rate, eps=1e-30, weight_decay=0.1, **options)


def test_optax_muon_is_followed(noted: Noted) -> None:
    oracle = theirs_of_optax(optaxs(nesterov=False), SHAPES)
    tx = eb.muon(schedule, arithmetic="float64", nesterov=False, eps=1e-30, scale=exchanged)
    apart = deviation(ours(tx, shapes=SHAPES), oracle)
    noted("optax", "muon", apart)
    assert apart <= ROUNDING


@pytest.mark.parametrize("average", [True, False])
def test_its_nesterov_momentum_is_another(average: bool) -> None:
    oracle = theirs_of_optax(optaxs(nesterov=True), SHAPES)
    tx = eb.muon(schedule, arithmetic="float64", average=average, eps=1e-30, scale=exchanged)
    assert deviation(ours(tx, shapes=SHAPES), oracle) > 1e-4
