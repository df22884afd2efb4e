"""Optimizers whose second moments are smaller than their parameters, against their papers' formulas, written out again in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import KERNELS, STEPS, deviation, formula, ours, schedule, start

Rate = Callable[[int], float]
Follow = Callable[[Tensor, list[Tensor], Rate], Iterator[Tensor]]

# As in tests/core/test_more_optimizers.py: some 16 rounded numbers a step, none larger than the largest weight.
ROUNDING = STEPS * 16 * 2.0**-53


def rms(x: Tensor) -> float:
    return math.sqrt(float((x * x).sum()) / x.numel())


def estimate(squares: Tensor, pair: tuple[int, int] | None) -> Tensor:
    """The matrix of rank one that has the row and column sums of ``squares``; the squares themselves without a pair of dimensions."""
    if pair is None or squares.ndim < 2:
        return squares
    rows, columns = squares.sum(pair[1], keepdim=True), squares.sum(pair[0], keepdim=True)
    return rows * columns / squares.sum(pair, keepdim=True)


def adafactor(
    *,
    relative: bool = False,
    slope: float | None = None,
    scaled: bool = True,
    b1: float = 0.0,
    of_steps: bool = True,
    cap: float = 1.0,
    most: float = 1.0,
    eps1: float = 1e-30,
    decay_by: str = "step",
    offset: int = 0,
    pair: Callable[[Tensor], tuple[int, int] | None] = lambda p: (-2, -1),
) -> Follow:
    """Algorithms 4 to 6, with running sums of whole squares: means along dimensions are linear."""

    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        squares, average = torch.zeros_like(p), torch.zeros_like(p)
        for t, g in enumerate(grads, 1):
            share = max(max(t - offset, 1) ** -0.8, 1 - cap)
            squares = (1 - share) * squares + share * (g * g + eps1)
            u = g / estimate(squares, pair(p)).sqrt()
            u = u / max(1.0, rms(u) / most)
            rate = min(slope * t if slope else 1e-2, t**-0.5) if relative else lr(t - 1)
            size = rate * max(1e-3, rms(p)) if scaled else rate
            average = b1 * average + (1 - b1) * (size * u if of_steps else u)
            shrink = 0.1 * {"step": size, "learning_rate": rate, "alone": 1.0}[decay_by]
            p = p - (average if of_steps else size * average) - shrink * p
            yield p

    return follow


def came(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    squares, apart, mean = (torch.zeros_like(p) for _ in range(3))
    for done, g in enumerate(grads):
        squares = 0.99 * squares + 0.01 * (g * g + 1e-30)
        u = g / estimate(squares, (-2, -1)).sqrt()
        u = u / max(1.0, rms(u))
        mean = 0.9 * mean + 0.1 * u
        apart = 0.999 * apart + 0.001 * ((u - mean) ** 2 + 1e-16)
        p = p - lr(done) * ((mean / estimate(apart, (-2, -1)).sqrt() if p.ndim > 1 else mean) + 0.1 * p)
        yield p


def largest(p: Tensor) -> tuple[int, int] | None:
    return {3: (0, 2), 2: (0, 1)}.get(p.ndim)


DECAY: dict[str, Any] = {"weight_decay": 0.1}
FORMULAS: dict[str, tuple[eb.Transform[Any], Follow]] = {
    "adafactor": (eb.adafactor(**DECAY), adafactor(relative=True)),
    "adafactor, warmed up": (
        eb.adafactor(eb.relative_step_schedule(slope=1e-3), **DECAY),
        adafactor(relative=True, slope=1e-3),
    ),
    "adafactor, momentum": (eb.adafactor(schedule, b1=0.9, **DECAY), adafactor(b1=0.9)),
    "adafactor, momentum, unscaled": (
        eb.adafactor(schedule, b1=0.9, scale_parameter=False, **DECAY),
        adafactor(b1=0.9, scaled=False),
    ),
    "adafactor, as optax": (
        eb.adafactor(schedule, b1=0.9, decay_by="alone", dimensions="largest", min_size_to_factor=4, **DECAY),
        adafactor(b1=0.9, decay_by="alone", pair=lambda p: largest(p) if p.ndim == 2 else None),
    ),
    "adafactor, as timm": (
        eb.adafactor(
            schedule, b1=0.9, b2_cap=0.9, clip_threshold=None, scale_parameter=False, momentum_of="directions",
            dimensions="largest", step_offset=20, **DECAY,
        ),
        adafactor(b1=0.9, cap=0.9, most=math.inf, scaled=False, of_steps=False, offset=20, pair=largest),
    ),
    "adafactor, a greater eps1": (
        eb.adafactor(schedule, eps1=0.1, clip_threshold=0.5, **DECAY),
        adafactor(eps1=0.1, most=0.5),
    ),
    "adafactor, decay by the learning rate": (
        eb.adafactor(schedule, decay_by="learning_rate", **DECAY),
        adafactor(decay_by="learning_rate"),
    ),
    "came": (eb.came(schedule, b2=0.99, b3=0.999, **DECAY), came),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_the_papers_formula(name: str) -> None:
    transform, follow = FORMULAS[name]
    assert deviation(ours(transform, shapes=KERNELS), formula(follow, KERNELS)) <= ROUNDING


def test_a_factored_second_moment_takes_a_row_and_a_column() -> None:
    state = eb.scale_by_factored_rms().init(start(shapes=KERNELS))
    variance: Any = state.variance
    assert {name: tuple(x.shape) for name, x in variance["kernel"].items()} == {"rows": (4, 2, 1), "columns": (4, 1, 3)}
    assert {name: tuple(x.shape) for name, x in variance["matrix"].items()} == {"rows": (5, 1), "columns": (1, 4)}
    assert variance["vector"].shape == (5,)


def test_an_optional_label_has_a_transform() -> None:
    with pytest.raises(ValueError, match=r"^optional: got 'b'; accepted are labels with a transform, 'a'"):
        eb.partition({"a": eb.identity()}, "a", optional=["b"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.adafactor(b2_cap=2.0), r"^b2_cap: got 2\.0"),
        (lambda: eb.adafactor(beta2_decay=0.5), r"^beta2_decay: got 0\.5"),
        (lambda: eb.adafactor(dimensions="first"), r"^dimensions: got 'first'; accepted are 'last', 'largest'"),  # type: ignore[arg-type]
        (lambda: eb.adafactor(momentum_of="rates"), r"^momentum_of: got 'rates'; accepted are 'steps', 'directions'"),  # type: ignore[arg-type]
        (lambda: eb.adafactor(decay_by="nothing"), r"^decay_by: got 'nothing'; accepted are 'step', 'learning_rate'"),  # type: ignore[arg-type]
        (lambda: eb.adafactor(min_size_to_factor=0), r"^min_size_to_factor: got 0; accepted is a whole number, at least 1"),
        (lambda: eb.relative_step_schedule(0.0), r"^limit: got 0\.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_gradients_of_zero_move_nothing_but_the_decay() -> None:
    tx = eb.adafactor(1e-2, scale_parameter=False)
    optimizer = eb.with_policy(tx, eb.policies.FP32)
    params = {name: value.float() for name, value in start(shapes=KERNELS).items()}
    moved, _ = optimizer.step(params, eb.tree.zeros_like(params), optimizer.init(params))
    assert all(torch.equal(moved[name], params[name]) for name in params)
