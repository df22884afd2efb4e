"""Dion: its formula in float64, what its approximation comes to, and momentum of which others would make NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.base import random_bits
from everybit.transforms import dion as module
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.steps import drawn as normal
from tests.support.steps import steps

MATRICES: Any = eb.Matrices
UNTYPED: Any = partial(eb.dion, others=None)
"""Of matrices alone, whatever their names."""

SHAPES = {"tall": (6, 4), "wide": (3, 5), "row": (1, 4), "column": (4, 1), "kernel": (3, 2, 2, 1)}

# A step rounds some 100 times. The factors of an approximation are off by that times the quotient of the momentum's singular values, and
# of the distances between them, which is below 1000 here.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


class Drawn:
    """Notes the numbers that the first update draws, in the order of the parameters."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []

    def __call__(self, like: Tensor, radius: eb.Key, angle: eb.Key) -> Tensor:
        self.first.append(random_bits.normal(like, radius, angle))
        return self.first[-1]


def followed(
    begun: dict[tuple[int, ...], Tensor],
    *,
    decay: float = 0.95,
    fraction: float = 0.25,
    scale: Callable[[int, int], float] = lambda rows, columns: math.sqrt(rows / columns),
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        rows, columns = len(p), p.numel() // len(p)
        rank = math.ceil(fraction * min(rows, columns))
        right = begun[tuple(p.shape)][: columns * rank].reshape(columns, rank)
        momentum = torch.zeros(rows, columns, dtype=p.dtype)
        for done, g in enumerate(grads):
            momentum = momentum + g.reshape(rows, columns)
            left = torch.linalg.qr(momentum @ right)[0]
            r = momentum.T @ left
            momentum = momentum - (1 - decay) * left @ r.T
            right = torch.stack([one / (one.norm() + 1e-8) for one in r.T], 1)
            u = scale(rows, columns) * (left @ right.T).reshape(p.shape)
            p = p - rate(done) * 0.1 * p - rate(done) * u
            yield p

    return follow


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "half rank": ({"rank_divisor": 2, "decay": 0.8}, {"fraction": 0.5, "decay": 0.8}),
    "full rank": ({"rank_divisor": 1}, {"fraction": 1.0}),
    "adamw's scale": (
        {"scale": "match_rms_adamw"},
        {"scale": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns))},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "half rank" else pytest.mark.exhaustive) for case in CASES]
)
def test_the_formula_is_followed(case: str) -> None:
    mine, its = CASES[case]
    drawn = Drawn()
    with patch.object(module, "normal", drawn):
        found = ours(UNTYPED(schedule, weight_decay=0.1, **mine), shapes=SHAPES)
    begun = dict(zip(SHAPES.values(), drawn.first, strict=False))
    assert deviation(found, formula(followed(begun, **its), SHAPES)) <= ROUNDING


drawn = partial(normal, dtype=torch.float64)


def test_of_one_gradient_it_comes_to_the_nearest_orthogonal_matrix() -> None:
    """With full rank, and nothing that stays: power iteration on the gradient itself."""
    u, _ = torch.linalg.qr(drawn(5, 3))
    v, _ = torch.linalg.qr(drawn(3, 3, seed=1))
    g = u @ torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)) @ v.T
    tx: Any = eb.scale_by_dion(decay=0.0, rank_divisor=1, eps=0.0, scale=1.0)
    found, state = g, tx.init(g)
    for step in range(40):
        found, state = tx.update(g, state, g, eb.Context(step=torch.tensor(step + 1)))
    # Off by (1/4)^40 of the start, and some hundred roundings.
    assert float((found - u @ v.T).abs().max()) <= 100 * 2.0**-53 + 1e3 * 0.25**40


def test_what_the_rank_leaves_out_stays_in_the_momentum() -> None:
    gradients = [drawn(6, 4, seed=step).float() for step in range(5)]
    tx: Any = eb.scale_by_dion(decay=1.0, rank_divisor=4)
    state = tx.init(gradients[0])
    for step, g in enumerate(gradients):
        _, state = tx.update(g, state, g, eb.Context(step=torch.tensor(step + 1)))
    assert torch.equal(eb.tree.get(state, "momentum"), sum(gradients[1:], gradients[0]))


# -- momentum that makes trouble ----------------------------------------------------------------------------------------------


def test_after_gradients_of_zero_it_goes_on() -> None:
    gradients = [torch.zeros(4, 3), torch.zeros(4, 3), drawn(4, 3).float()]
    with patch.object(module, "normal", lambda like, _radius, _angle: drawn(*like.shape, seed=7)):
        late = steps(UNTYPED(0.1, weight_decay=0.0), torch.zeros(4, 3), gradients)[0]
        at_once = steps(UNTYPED(0.1, weight_decay=0.0), torch.zeros(4, 3), gradients[2:])[0]
    assert late.any()
    assert torch.equal(late, at_once)


@pytest.mark.parametrize("rank", [1, 2])
def test_momentum_of_low_rank_gives_finite_steps(rank: int) -> None:
    gradients = [drawn(6, rank, seed=1).float() @ drawn(rank, 5, seed=2).float()] * 6
    after, _ = steps(UNTYPED(0.1, rank_divisor=1, weight_decay=0.0), torch.zeros(6, 5), gradients)
    # Six steps, each of at most five orthonormal columns times sqrt(6/5).
    assert float(after.norm()) <= 6 * 0.1 * math.sqrt(5 * 6 / 5) * 1.01
