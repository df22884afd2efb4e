"""GaLore: its formula in float64, what is projected, and gradients of which others would make NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.steps import drawn, steps

UNTYPED: Any = eb.galore
MATRICES: Any = eb.Matrices

SHAPES = {"tall": (6, 4), "wide": (3, 5), "kernel": (4, 5, 1, 1), "thin": (2, 7), "vector": (5,), "number": ()}

# A step rounds some 100 times; singular vectors are off by that times the squared quotient of the singular values, which is below 1000.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


def followed(
    rank: int, period: int, scale: float
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        is_projected = p.ndim > 1 and min(len(p), p.numel() // len(p)) > rank
        mean = square = torch.zeros(())
        basis = torch.eye(min(len(p), p.numel() // len(p)) if is_projected else 0, rank, dtype=p.dtype)
        for done, g in enumerate(grads):
            seen, wide = g, True
            if is_projected:
                seen = g.reshape(len(g), -1)
                wide = seen.shape[0] < seen.shape[1]
                if done % period == 0:
                    u, _, v = torch.linalg.svd(seen, full_matrices=False)
                    new = u[:, :rank] if wide else v[:rank].T
                    basis = torch.stack(
                        [one if one @ old >= 0 else -one for one, old in zip(new.T, basis.T, strict=True)], 1
                    )
                seen = basis.T @ seen if wide else seen @ basis
            mean, square = 0.9 * mean + 0.1 * seen, 0.999 * square + 0.001 * seen**2
            u = mean / (square.sqrt() + 1e-6) * (math.sqrt(1 - 0.999 ** (done + 1)) / (1 - 0.9 ** (done + 1)))
            if is_projected:
                u = scale * (basis @ u if wide else u @ basis.T).reshape(p.shape)
            p = (p - rate(done) * u) * (1 - rate(done) * 0.1)
            yield p

    return follow


def test_the_formula_is_followed() -> None:
    found = ours(UNTYPED(schedule, rank=2, period=7, scale=0.5, weight_decay=0.1), shapes=SHAPES)
    assert deviation(found, formula(followed(2, 7, 0.5), SHAPES)) <= ROUNDING


@pytest.mark.parametrize("shape", [(4, 4), (1, 5), (5, 1), (0, 3), (3,), ()])
def test_without_gradients_weights_only_decay(shape: tuple[int, ...]) -> None:
    before = torch.ones(shape)
    after, state = steps(eb.galore(0.5, rank=2, weight_decay=0.5), before, [torch.zeros(shape)] * 3)
    assert torch.equal(after, before * 0.75**3)
    assert all(bool(leaf.isfinite().all()) for leaf in eb.tree.leaves(state))


def test_state_is_of_low_rank() -> None:
    _, state = steps(eb.galore(0.1, rank=2), drawn(6, 9), [drawn(6, 9, seed=1)])
    assert [tuple(eb.tree.get(state, name)["projected"].shape) for name in ("momentum", "variance", "basis")] == [
        (2, 9), (2, 9), (6, 2),
    ]  # fmt: skip


def test_of_gradients_of_low_rank_steps_stay_in_their_rows() -> None:
    """They go where the gradients at the first update went: nothing of others is left in the projection."""
    left = drawn(6, 1)
    after, _ = steps(eb.galore(0.1, rank=1), torch.zeros(6, 9), [left @ drawn(1, 9, seed=step) for step in range(1, 5)])
    apart = after - left @ (left.T @ after) / left.square().sum()
    assert float(apart.abs().max()) <= 1e2 * 2.0**-24 * float(after.abs().max())


def test_a_view_is_a_parameter_for_each_matrix() -> None:
    params, grads = drawn(6, 4), [drawn(6, 4, seed=step) for step in range(1, 6)]
    together, _ = steps(eb.galore(0.1, rank=1, period=2, matrices=eb.Matrices(view=eb.row_blocks(2, 4))), params, grads)
    apart = [
        steps(eb.galore(0.1, rank=1, period=2), one, pieces)[0]
        for one, *pieces in zip(*(torch.split(x, [2, 4]) for x in (params, *grads)), strict=True)
    ]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED(rank=0), r"^rank: got 0; accepted is a whole number, at least 1"),
        (lambda: UNTYPED(scale=-1.0), r"^scale: got -1\.0"),
        (lambda: UNTYPED(matrices=eb.Matrices(view=eb.heads(4))).init([drawn(6, 2)]), r"^0: heads\(4\): got \(6, 2\)"),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_view_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^view: got 8; accepted are None and values such as everybit.heads\(8\)"):
        UNTYPED(matrices=MATRICES(view=8))
