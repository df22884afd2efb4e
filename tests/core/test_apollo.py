"""APOLLO: its formula in float64, what its random vectors depend on, and gradients of zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.draws import Drawn
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.steps import drawn, steps

UNTYPED: Any = eb.apollo

SHAPES = {"tall": (6, 4), "wide": (3, 5), "kernel": (4, 5, 1, 1), "thin": (2, 7), "vector": (5,), "number": ()}

# A step rounds some 100 times. Norms of projections divide by numbers that may cancel, to a hundredth here.
ROUNDING = STEPS * PEAK * 100 * 100 * 2.0**-53

OPTIONS: dict[str, dict[str, Any]] = {
    "by channels": {},
    "by matrices": {"rank": 1, "scale_type": "tensor", "scale": 128.0},
    "unlimited": {"limit": None, "period": 1},
    "on the larger side": {"side": "larger", "limit": 1.5},
}


def followed(
    drawn: dict[tuple[int, ...], list[Tensor]],
    *,
    rank: int = 2,
    scale: float = 1.0,
    scale_type: str = "channel",
    limit: float | None = 1.01,
    side: str = "smaller",
    period: int = 7,
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        is_projected = p.ndim > 1 and min(len(p), p.numel() // len(p)) > rank
        mean = square = before = torch.zeros(())
        for done, g in enumerate(grads):
            seen, flat = g, g.reshape(len(g), -1) if p.ndim > 1 else g
            rows_are_replaced = is_projected and (len(flat) < flat.shape[1]) == (side == "smaller")
            if is_projected:
                basis = drawn[tuple(p.shape)][done - done % period] / math.sqrt(rank)
                # Whatever is replaced goes to the rows.
                seen = basis.T @ (flat if rows_are_replaced else flat.T)
            mean, square = 0.9 * mean + 0.1 * seen, 0.999 * square + 0.001 * seen**2
            u = mean / (square.sqrt() + 1e-6)
            if is_projected:
                over = u.norm(dim=0) / (seen.norm(dim=0) + 1e-8)
                if scale_type == "tensor":
                    over = u.norm() / (seen.norm() + 1e-8)
                elif not rows_are_replaced:
                    over = over[:, None]
                u = flat * over
                if limit is not None and done and u.norm() / (before + 1e-8) > limit:
                    u = u / u.norm() * limit * (before + 1e-8)
                before = u.norm()
                u = u.reshape(p.shape) * math.sqrt(scale)
            u = u * (math.sqrt(1 - 0.999 ** (done + 1)) / (1 - 0.9 ** (done + 1)))
            p = (p - rate(done) * u) * (1 - rate(done) * 0.1)
            yield p

    return follow


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in ("by channels", "by matrices") else pytest.mark.exhaustive)
        for name in OPTIONS
    ],
)
@pytest.mark.sampled(2)
def test_the_formula_is_followed(case: str) -> None:
    options = {"rank": 2, "period": 7, **OPTIONS[case]}
    drawn = Drawn()
    with patch("everybit.linalg.projections.normal", drawn):
        found = ours(UNTYPED(schedule, weight_decay=0.1, **options), shapes=SHAPES)
    names = [name for name, shape in SHAPES.items() if len(shape) > 1 and min(shape[:2]) > options["rank"]]
    by_shape = {SHAPES[name]: drawn.numbers[index :: len(names)] for index, name in enumerate(names)}
    assert deviation(found, formula(followed(by_shape, **options), SHAPES)) <= ROUNDING


def test_nothing_is_kept_of_random_vectors() -> None:
    _, state = steps(eb.apollo(0.1, rank=2), drawn(6, 9), [drawn(6, 9, seed=1)])
    kept = {name: eb.tree.get(state, name) for name in ("momentum", "variance", "norm", "basis")}
    assert [tuple(leaf.shape) for leaf in eb.tree.leaves(kept)] == [(2, 9), (2, 9), (1, 1), (0,)]


def test_random_vectors_are_drawn_anew_every_period() -> None:
    noted = Drawn()
    with patch("everybit.linalg.projections.normal", noted):
        steps(eb.apollo(0.1, rank=2, period=3), drawn(4, 5), [drawn(4, 5)] * 7)
    first, second, third = noted.numbers[0], noted.numbers[3], noted.numbers[6]
    assert all(torch.equal(one, first) for one in noted.numbers[:3])
    assert all(torch.equal(one, second) for one in noted.numbers[3:6])
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_blocks_and_seeds_have_vectors_of_their_own() -> None:
    noted = Drawn()
    with patch("everybit.linalg.projections.normal", noted):
        for seed in (0, 1):
            steps(
                eb.apollo(0.1, rank=1, matrices=eb.Matrices(view=eb.row_blocks(3, 3))),
                drawn(6, 4),
                [drawn(6, 4)],
                seed=seed,
            )
    values = [number for one in noted.numbers for number in one.flatten().tolist()]
    assert len({*values}) == len(values) == 12


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
@pytest.mark.parametrize("shape", [(4, 4), (1, 5), (5, 1), (0, 3), (3,), ()])
def test_without_gradients_weights_only_decay(shape: tuple[int, ...], scale_type: str) -> None:
    before = torch.ones(shape)
    tx = UNTYPED(0.5, rank=2, scale_type=scale_type, weight_decay=0.5)
    after, state = steps(tx, before, [torch.zeros(shape)] * 3)
    assert torch.equal(after, before * 0.75**3)
    assert all(bool(leaf.isfinite().all()) for leaf in eb.tree.leaves(state))


def test_after_a_gradient_of_zero_the_step_is_not_limited() -> None:
    """By the authors' code the second step would have a norm of about 1e-8."""
    after, _ = steps(eb.apollo(0.1, rank=2), torch.zeros(4, 5), [torch.zeros(4, 5), drawn(4, 5)])
    assert float(after.norm()) > 0.1


def test_the_norm_of_a_step_grows_by_no_more_than_the_limit() -> None:
    """A gradient, its negative, and a hundred times it: Adam's second step is small, and its third would be as large as its first."""
    gradients = [drawn(4, 5) * factor for factor in (1.0, -1.0, 100.0)]
    norms = []
    for count in range(1, 4):
        _, state = steps(eb.apollo(0.1, rank=2, limit=1.5), torch.zeros(4, 5), gradients[:count])
        norms.append(float(eb.tree.get(state, "norm")["projected"]))
    assert norms[1] < norms[0] / 2
    assert norms[2] == pytest.approx(1.5 * norms[1], rel=1e-6)


def test_a_view_is_a_parameter_for_each_matrix() -> None:
    """With vectors that do not depend on the place."""
    params, grads = drawn(6, 4), [drawn(6, 4, seed=step) for step in range(1, 6)]
    with patch("everybit.linalg.projections.normal", lambda like, *_: drawn(*like.shape).double()):
        together, _ = steps(eb.apollo(0.1, rank=1, matrices=eb.Matrices(view=eb.row_blocks(2, 4))), params, grads)
        apart = [
            steps(eb.apollo(0.1, rank=1), one, pieces)[0]
            for one, *pieces in zip(*(torch.split(x, [2, 4]) for x in (params, *grads)), strict=True)
        ]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED(rank=0), r"^rank: got 0; accepted is a whole number, at least 1"),
        (lambda: UNTYPED(scale=-1.0), r"^scale: got -1\.0"),
        (lambda: UNTYPED(limit=0.5), r"^limit: got 0\.5; accepted is a finite number in \[1"),
        (lambda: UNTYPED(scale_type="row"), r"^scale_type: got 'row'; accepted are 'channel', 'tensor'"),
        (lambda: UNTYPED(basis="svd"), r"^basis: got 'svd'; accepted are 'singular', 'random'"),
        (lambda: UNTYPED(side="left"), r"^side: got 'left'; accepted are 'smaller', 'larger', 'rows', 'columns'"),
        (lambda: UNTYPED(matrices=eb.Matrices(view=eb.heads(4))).init([drawn(6, 2)]), r"^0: heads\(4\): got \(6, 2\)"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
