"""Shampoo: its formula in float64, its options, and matrices of which others would make NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.linalg import inverse_roots
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.steps import drawn, steps

UNTYPED: Any = eb.shampoo
GRAFTING: Any = eb.Grafting

SHAPES = {"square": (4, 4), "kernel": (4, 2, 3), "tall": (6, 3), "vector": (5,), "number": ()}

RIDGE = 0.05
# A step rounds some 100 times numbers of the size of an update. An eigenvalue near zero is off by a rounding of the largest, which is below
# 50 at the first refresh; its root, below exponents of a half, by half of that over the ridge.
ROUNDING = STEPS * PEAK * 100 * (50 / RIDGE / 2) * 2.0**-53

Sides = Callable[[tuple[int, ...]], list[bool]]


def two_or_more(shape: tuple[int, ...]) -> list[bool]:
    return [len(shape) > 1] * len(shape)


def of_all(shape: tuple[int, ...]) -> list[bool]:
    return [True] * len(shape)


def the_smaller(shape: tuple[int, ...]) -> list[bool]:
    return [len(shape) > 1 and dim == shape.index(min(shape)) for dim in range(len(shape))]


def powered(x: Tensor, exponent: float) -> Tensor:
    """By singular values, which are the eigenvalues of a matrix that has none below zero."""
    u, values, v = torch.linalg.svd(x)
    return torch.as_tensor(u @ torch.diag(values**-exponent) @ v)


def followed(
    sides: Sides = two_or_more,
    *,
    b1: float | None = 0.9,
    b2: float | None = 0.999,
    at_start: bool = False,
    exponent: float | None = None,
    period: int = 10,
    graft: str = "adam",
    start: int = 11,
    debias: bool = True,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterable[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        has = sides(tuple(p.shape))
        products = [torch.eye(n, dtype=p.dtype) * (RIDGE if at_start else 0.0) for n in p.shape]
        roots: list[Tensor] = []
        mean = squares = ahead = torch.zeros_like(p)
        for done, g in enumerate(grads):
            t = done + 1
            mean = g if b1 is None else b1 * mean + (1 - b1) * g
            m = mean / (1 - b1**t) if b1 is not None and debias else mean
            for dim, n in enumerate(p.shape):
                rows = g.transpose(0, dim).reshape(n, -1)
                new = rows @ rows.T
                products[dim] = products[dim] + new if b2 is None else b2 * products[dim] + (1 - b2) * new
            corrected = 1 - b2**t if b2 is not None and debias and not at_start else 1.0
            if done % period == 0:
                e = (0.5 / max(sum(has), 1)) if exponent is None else exponent
                ridge = 0.0 if at_start else RIDGE
                roots = [powered(one / corrected + ridge * torch.eye(len(one), dtype=p.dtype), e) for one in products]
            # The diagonal of a matrix for what has none decays as matrices do, a graft's squares by a rate of their own.
            if graft == "adagrad" or (graft == "none" and b2 is None):
                squares = squares + g * g
            else:
                decay = b2 if graft == "none" and b2 is not None else 0.99
                squares = decay * squares + (1 - decay) * g * g
            size = {
                "adam": m / ((squares / (1 - 0.99**t)).sqrt() + 1e-8),
                "rmsprop": m / (squares.sqrt() + 1e-8),
                "adagrad": m / (squares.sqrt() + 1e-8),
                "sgd": m,
                "none": m / (squares / corrected + RIDGE).sqrt(),
            }[graft]
            u = size
            if any(has) and t >= start:
                u = m
                for dim, one in enumerate(roots):
                    u = torch.tensordot(u, one, ([dim], [1])).movedim(-1, dim) if has[dim] else u
                u = u if graft == "none" else u * (size.norm() / u.norm())
            ahead = momentum * ahead + u
            moved = u + momentum * ahead if nesterov else ahead
            p = p - rate(done) * (moved + 0.1 * p)
            yield p

    return follow


SUMS: dict[str, Any] = {"b1": None, "b2": None, "damping": "start", "period": 1, "graft": eb.Grafting("none")}
OF_SUMS: dict[str, Any] = {"b1": None, "b2": None, "at_start": True, "period": 1, "graft": "none", "start": 1}
GRAFTS = {
    "rmsprop": eb.Grafting("rmsprop", decay=0.99), "adagrad": eb.Grafting("adagrad", start=1), "sgd": eb.Grafting("sgd", start=1),
    "none": eb.Grafting("none"),
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "adam's size": ({}, followed()),
    "rmsprop's size": ({"graft": GRAFTS["rmsprop"], "period": 3}, followed(graft="rmsprop", period=3, start=4)),
    "adagrad's size": ({"graft": GRAFTS["adagrad"]}, followed(graft="adagrad", start=1)),
    "sgd's size": ({"graft": GRAFTS["sgd"], "period": 1}, followed(graft="sgd", start=1, period=1)),
    "its own size": ({"graft": GRAFTS["none"], "b2": 0.9}, followed(graft="none", b2=0.9, start=1)),
    "not debiased": ({"debias": False, "b2": 0.9}, followed(debias=False, b2=0.9)),
    "the paper's": ({**SUMS, "where": eb.Kronecker(vectors=True)}, followed(of_all, **OF_SUMS)),
    "sums, vectors without a matrix": (SUMS, followed(**OF_SUMS)),
    "means that begin at eps": ({"damping": "start"}, followed(at_start=True)),
    "one side": ({"where": eb.Kronecker(sides="smaller"), "b2": 0.95}, followed(the_smaller, b2=0.95)),
    "another exponent": ({"exponent": 0.5, "b2": 0.95}, followed(exponent=0.5, b2=0.95)),
    "momentum": ({"momentum": 0.9, "b1": None}, followed(momentum=0.9, b1=None)),
    "nesterov": ({"momentum": eb.trace(0.9, nesterov=True)}, followed(momentum=0.9, nesterov=True)),
}
SAMPLED = ("adam's size",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLED else pytest.mark.exhaustive) for case in CASES]
)
def test_the_formula_is_followed(case: str) -> None:
    options, follow = CASES[case]
    found = ours(
        UNTYPED(schedule, **{"eps": RIDGE, "graft": eb.Grafting(decay=0.99), "weight_decay": 0.1} | options),
        shapes=SHAPES,
    )
    assert deviation(found, formula(follow, SHAPES)) <= ROUNDING


# -- inverse roots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0])
def test_a_power_of_the_inverse_root_is_the_inverse(exponent: float) -> None:
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x @ x.T
    root = inverse_roots(x, exponent, 0.1)
    inverse = torch.linalg.matrix_power(root, round(1 / exponent))
    apart = inverse @ (x + 0.1 * torch.eye(5, dtype=torch.float64)) - torch.eye(5, dtype=torch.float64)
    # Five products of 5 x 5 matrices, and the condition number.
    assert float(apart.abs().max()) <= 5 * 25 * 2.0**-53 * float(torch.linalg.cond(x + 0.1 * torch.eye(5)))


def test_directions_without_gradients_have_no_root() -> None:
    found = inverse_roots(torch.diag(torch.tensor([4.0, 0.0])), 0.5, 0.0)
    assert torch.equal(found, torch.diag(torch.tensor([0.5, 0.0])))
    assert torch.equal(inverse_roots(torch.zeros(2, 3, 3), 0.25, 0.0), torch.zeros(2, 3, 3))


def test_what_is_not_finite_has_a_root_that_is_not() -> None:
    found = inverse_roots(torch.stack([torch.eye(2), torch.full((2, 2), torch.nan)]), 0.25, 0.0)
    assert torch.equal(found[0], torch.eye(2))
    assert found[1].isnan().all()


# -- matrices that make trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 8), (1, 7), (7, 1)])
def test_of_gradients_of_rank_one_steps_have_adams_size(shape: tuple[int, int]) -> None:
    gradients = [drawn(shape[0], 1, seed=step) @ drawn(1, shape[1], seed=99 + step) for step in range(1, 8)]
    for start in (1, 8):
        after, _ = steps(eb.shampoo(0.1, period=1, graft=eb.Grafting(start=start)), torch.zeros(shape), gradients)
        assert after.isfinite().all()
        assert float(after.abs().max()) < 7 * 0.1 * (shape[0] * shape[1]) ** 0.5


def test_before_its_start_it_is_adamw() -> None:
    params = {"matrix": drawn(5, 3), "vector": drawn(4, seed=1)}
    grads = [{name: drawn(*p.shape, seed=step) for name, p in params.items()} for step in range(2, 12)]
    found = steps(eb.shampoo(0.1, period=10), params, grads)[0]
    expected = steps(eb.adamw(0.1, weight_decay=0.01), params, grads)[0]
    for name, one in found.items():
        # Ten steps of at most 16 roundings each.
        assert float((one - expected[name]).abs().max()) <= 160 * 2.0**-24 * float(expected[name].abs().max())
