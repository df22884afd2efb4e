"""PSGD's Kron: its formula in float64, that it whitens, and gradients of which others would make NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.linalg import fitted
from everybit.transforms import kron as module
from tests.support.draws import Drawn
from tests.support.following import PEAK, STEPS, Tensors, deviation, formula, ours, schedule
from tests.support.steps import drawn as normal
from tests.support.steps import steps

UNTYPED: Any = eb.kron

SHAPES = {"tall": (5, 3), "kernel": (3, 2, 2), "row": (1, 4), "vector": (4,), "number": ()}

# A step rounds some 100 times, and a triangular solution as often as a factor's condition, below 1000 here, is large.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


def noted(options: dict[str, Any]) -> tuple[list[Tensors], dict[str, list[Tensor]]]:
    drawn = Drawn()
    with patch.object(module, "normal", drawn):
        found = ours(UNTYPED(schedule, weight_decay=0.1, **options), shapes=SHAPES)
    names = list(SHAPES)
    return found, {name: drawn.numbers[index :: len(names)] for index, name in enumerate(names)}


def bound(x: Tensor) -> Tensor:
    """The published lower bound of the spectral norm, from rows or columns, whichever has the longest."""
    size = x.abs().max()
    x = x / size
    rows, columns = x.square().sum(1).max(0), x.square().sum(0).max(0)
    if columns.values > rows.values:
        one = x[:, columns.indices] @ x
        return torch.as_tensor(size * (one / one.norm() @ x.T).norm())
    one = x @ x[rows.indices]
    return torch.as_tensor(size * (x.T @ (one / one.norm())).norm())


def followed(
    probes: dict[str, list[Tensor]],
    *,
    has: Callable[[tuple[int, ...]], list[bool]] = lambda shape: [len(shape) > 1] * len(shape),
    of_momentum: bool = True,
    normalize: bool = False,
    limit: float | None = 1.1,
    period: int = 1,
    start: float = 1.0,
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]:
    left = {SHAPES[name]: iter(values) for name, values in probes.items()}

    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        shape = tuple(p.shape) or (1,)
        begun = start ** (1 / len(shape))
        factors = [torch.eye(n, dtype=p.dtype) * begun for n in shape]
        matrices = has(shape) if p.ndim else [False]
        mean = torch.zeros(shape, dtype=p.dtype)
        for done, given in enumerate(grads):
            g = given.reshape(shape)
            g = g / g.norm() if normalize else g
            mean = 0.9 * mean + 0.1 * g
            m = mean / (1 - 0.9 ** (done + 1))
            v = next(left[tuple(p.shape)]).reshape(-1)
            if done % period == 0:
                whole = reduce(torch.kron, factors)
                a = (whole @ (m if of_momentum else g).reshape(-1)).reshape(shape)
                b = torch.linalg.solve(whole.T, v).reshape(shape)
                for dim, matrix in enumerate(matrices):
                    rows = [x.transpose(0, dim).reshape(shape[dim], -1) for x in (a, b)]
                    first, second = (x @ x.T for x in rows)
                    if matrix:
                        move = torch.triu(first - second) / bound(first + second)
                    else:
                        move = torch.diag(torch.diag(first - second)) / torch.diag(first + second).max()
                    factors[dim] = factors[dim] - 0.1 * move @ factors[dim]
            whole = reduce(torch.kron, factors)
            u = (whole.T @ whole @ m.reshape(-1)).reshape(p.shape)
            if limit is not None:
                u = u * min(1.0, limit / (float(u.square().mean().sqrt()) + 1e-8))
            p = p - rate(done) * (u + 0.1 * p)
            yield p

    return follow


def short(limit: int) -> Callable[[tuple[int, ...]], list[bool]]:
    return lambda shape: [len(shape) > 1 and n <= limit for n in shape]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "of gradients": ({"of_momentum": False}, {"of_momentum": False}),
    "normalized": ({"normalize": True, "start": 3.0}, {"normalize": True, "start": 3.0}),
    "every third step": ({"period": 3}, {"period": 3}),
    "not limited": ({"max_rms": None}, {"limit": None}),
    "long dimensions": ({"where": eb.Kronecker(max_dimension=2)}, {"has": short(2)}),
    "vectors": ({"where": eb.Kronecker(vectors=True)}, {"has": lambda shape: [True] * len(shape)}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "long dimensions" else pytest.mark.exhaustive) for case in CASES]
)
def test_the_formula_is_followed(case: str) -> None:
    mine, its = CASES[case]
    found, probes = noted(mine)
    assert deviation(found, formula(followed(probes, **its), SHAPES)) <= ROUNDING


drawn = partial(normal, dtype=torch.float64)


def test_it_whitens() -> None:
    """Fitted to gradients of a covariance that is a Kronecker product, P has its inverse root."""
    shape = (3, 4)
    left, right = (
        torch.linalg.qr(drawn(n, n, seed=n))[0] * torch.logspace(-0.5, 0.5, n, dtype=torch.float64) for n in shape
    )
    factors = [torch.eye(n, dtype=torch.float64)[None] for n in shape]
    for step in range(400):
        g = left @ drawn(*shape, seed=10 + step) @ right.T
        factors = fitted(g[None], drawn(1, *shape, seed=5000 + step), factors, 0.3 / (1 + step / 50))
    root = torch.kron(*(one[0] for one in factors))
    whitened = root.T @ root @ torch.kron(left @ left.T, right @ right.T) @ root.T @ root
    values = torch.linalg.eigvals(whitened).real
    # From 1e-2 to 1e2 at the start. What is left is the noise of the last steps, which are shares of 1/30 each.
    assert 0.4 < float(values.min()) <= float(values.max()) < 2.5
    for one in factors:
        assert torch.equal(one, one.triu())


# -- gradients that make trouble ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-9, pytest.param(1e9, marks=pytest.mark.exhaustive)])
def test_gradients_of_any_size_are_whitened_in_time(size: float) -> None:
    optimizer = eb.with_policy(UNTYPED(1.0, b1=0.0, max_rms=None), eb.policies.FP32)
    start = torch.zeros(4, 3)
    state, moved = optimizer.init(start), start
    # A factor goes to the fourth root of the size, 178, by at most a tenth of itself at each step, and only where it is farthest off.
    for step in range(200):
        moved, state = optimizer.step(start, (size * drawn(4, 3, seed=step)).float(), state)
    assert 0.2 < float(moved.square().mean().sqrt()) < 5.0


def test_rows_without_a_gradient_stay_finite() -> None:
    gradients = [torch.cat([drawn(2, 3, seed=step).float(), torch.zeros(2, 3)]) for step in range(100)]
    after, state = steps(eb.kron(0.1), torch.zeros(4, 3), gradients)
    # A hundred steps of at most 0.1 times 1.1, the root mean square of twelve elements.
    assert float(after.norm()) <= 100 * 0.1 * 1.1 * 12**0.5
    for one in eb.tree.get(state, "factors").values():
        assert one.isfinite().all()
        assert float(one.abs().max()) < 1e3


def test_the_probe_follows_the_seed_and_the_update() -> None:
    params, gradient = drawn(4, 3).float(), drawn(4, 3, seed=1).float()
    ends = []
    for seed in (1, 1, 2):
        optimizer = eb.with_policy(UNTYPED(0.1, max_rms=None), eb.policies.FP32, seed=seed)
        ends.append(optimizer.step(params, gradient, optimizer.init(params))[0])
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])
