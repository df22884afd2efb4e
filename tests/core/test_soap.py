"""SOAP: its formula in float64, its options, and matrices of which others would make NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit_torch import TorchOptimizer
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.steps import drawn, steps

UNTYPED: Any = eb.soap
KRONECKER: Any = eb.Kronecker
MATRICES: Any = eb.Matrices

SHAPES = {"square": (4, 4), "kernel": (4, 2, 3), "vector": (5,), "number": ()}
"""Each matrix of products has full rank at the first update: of others the null space's basis would be made of rounding."""

# A step rounds some 100 times numbers of the size of an update. What a basis is off by turns the direction, by at most the quotient of the
# greatest and the least distance of two eigenvalues more, which here is below 1000.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


class Authors:
    """SOAP of one tensor as the authors have it: the mean gradient is kept in the eigenbasis, and carried from one to the next."""

    def __init__(self, shape: tuple[int, ...], sides: Callable[[tuple[int, ...]], list[bool]], **options: Any) -> None:
        self.options = {
            "b1": 0.95,
            "b2": 0.95,
            "b3": 0.95,
            "eps": 1e-8,
            "period": 10,
            "debias": True,
            "normalize": False,
        } | options
        self.shape = shape
        self.has = sides(shape)
        self.products = [torch.zeros(n, n, dtype=torch.float64) for n in shape]
        self.bases: list[Tensor] = []
        self.mean = self.square = torch.zeros(shape, dtype=torch.float64)
        self.step = 0

    def into(self, x: Tensor) -> Tensor:
        for dim, (basis, has) in enumerate(zip(self.bases, self.has, strict=True)):
            x = torch.tensordot(x, basis, ([dim], [0])).movedim(-1, dim) if has else x
        return x

    def out(self, x: Tensor) -> Tensor:
        for dim, (basis, has) in enumerate(zip(self.bases, self.has, strict=True)):
            x = torch.tensordot(x, basis, ([dim], [1])).movedim(-1, dim) if has else x
        return x

    def accumulate(self, g: Tensor) -> None:
        for dim, old in enumerate(self.products):
            rows = g.transpose(0, dim).reshape(g.shape[dim], -1)
            old.lerp_(rows @ rows.T, 1 - self.options["b3"])

    def direction(self, g: Tensor) -> Tensor:
        o = self.options
        if not self.step:
            self.step = 1
            self.accumulate(g)
            self.bases = [torch.linalg.eigh(one)[1].flip(1) for one in self.products]
            return torch.zeros_like(g)
        count = self.step
        self.step += 1
        seen = self.into(g)
        self.mean = o["b1"] * self.mean + (1 - o["b1"]) * seen
        self.square = o["b2"] * self.square + (1 - o["b2"]) * seen**2
        found = self.out(self.mean / (self.square.sqrt() + o["eps"]))
        if o["normalize"]:
            found = found / found.square().mean().sqrt()
        if o["debias"]:
            found = found * (math.sqrt(1 - o["b2"] ** count) / (1 - o["b1"] ** count))
        mean = self.out(self.mean)
        self.accumulate(g)
        if count % o["period"] == 0:
            self.refresh()
        self.mean = self.into(mean)
        return found

    def refresh(self) -> None:
        for dim, has in enumerate(self.has):
            if has:
                grown = self.products[dim] @ self.bases[dim]
                order = (self.bases[dim] * grown).sum(0).argsort(descending=True)
                self.square = self.square.index_select(dim, order)
                self.bases[dim] = torch.linalg.qr(grown[:, order])[0]


class Corrected(Authors):
    """With KL-Shampoo's correction, for matrices: products with the inverse of the other side's between them."""

    def accumulate(self, g: Tensor) -> None:
        if g.ndim < 2:
            return super().accumulate(g)
        if self.step == 1:
            size = g.square().mean().sqrt()
            self.products = [g @ g.T / g.shape[1] / size, g.T @ g / g.shape[0] / size]
            return None
        inverses = []
        for one, basis in zip(self.products, self.bases, strict=True):
            values = torch.diagonal(basis.T @ one @ basis).clamp(min=1e-8)
            inverses.append(basis @ torch.diag(1 / values) @ basis.T)
        left, right = inverses
        for old, new in zip(self.products, [g @ right @ g.T / g.shape[1], g.T @ left @ g / g.shape[0]], strict=True):
            old.lerp_(new, 1 - self.options["b3"])
        return None


def two_or_more(shape: tuple[int, ...]) -> list[bool]:
    return [len(shape) > 1] * len(shape)


def followed(
    sides: Callable[[tuple[int, ...]], list[bool]] = two_or_more,
    *,
    decay: float = 0.1,
    moved: bool = True,
    seen_as: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape,
    rule: type[Authors] = Authors,
    **options: Any,
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterable[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], rate: Callable[[int], float]) -> Iterator[Tensor]:
        state = rule(seen_as(tuple(p.shape)), sides, **options)
        for done, g in enumerate(grads):
            u = state.direction(g.reshape(state.shape)).reshape(p.shape)
            if moved:
                p = p - rate(done) * u
                p = p - rate(done) * decay * p if done else p
            else:
                p = p - rate(done) * decay * p - rate(done) * u
            yield p

    return follow


def only_up_to(limit: int) -> Callable[[tuple[int, ...]], list[bool]]:
    return lambda shape: [len(shape) > 1 and n <= limit for n in shape]


def the_smaller(shape: tuple[int, ...]) -> list[bool]:
    return [len(shape) > 1 and dim == shape.index(min(shape)) for dim in range(len(shape))]


ONE_SIDED = {"tall": (6, 3), "wide": (3, 7), "vector": (5,)}
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, tuple[int, ...]]]] = {
    "as the authors have it": ({}, followed(), SHAPES),
    "every step": ({"period": 1}, followed(period=1), SHAPES),
    "not debiased": ({"debias": False}, followed(debias=False), SHAPES),
    "normalized": ({"normalize": True}, followed(normalize=True), SHAPES),
    "other rates": ({"b1": 0.9, "b2": 0.99, "factor_decay": 0.8}, followed(b1=0.9, b2=0.99, b3=0.8), SHAPES),
    "decay before": ({"decay_moved": False}, followed(moved=False), SHAPES),
    "large dimensions": ({"where": eb.Kronecker(max_dimension=5)}, followed(only_up_to(5)), ONE_SIDED),
    "smaller sides": ({"where": eb.Kronecker(sides="smaller")}, followed(the_smaller), ONE_SIDED),
    "merged": (
        {"where": eb.Kronecker(merge=True, max_dimension=6)},
        followed(seen_as=lambda shape: (6, 6) if len(shape) > 1 else shape),
        {"kernel": (2, 3, 3, 2), "vector": (5,)},
    ),
    "corrected": ({"correction": "kl"}, followed(rule=Corrected), {"square": (4, 4), "vector": (5,)}),
    "corrected every step": (
        {"correction": "kl", "period": 1, "factor_decay": 0.8},
        followed(rule=Corrected, period=1, b3=0.8),
        {"square": (4, 4)},
    ),
}  # fmt: skip


SAMPLED = ("as the authors have it", "corrected")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLED else pytest.mark.exhaustive) for case in CASES]
)
def test_the_formula_is_followed(case: str) -> None:
    options, follow, shapes = CASES[case]
    found = ours(UNTYPED(schedule, weight_decay=0.1, **options), shapes=shapes)
    assert deviation(found, formula(follow, shapes)) <= ROUNDING


# -- matrices that make trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["none", "kl"])
def test_of_gradients_without_full_rank_bases_stay_orthonormal(correction: Any) -> None:
    for shape, rank in (((6, 8), 1), ((1, 7), 1), ((7, 1), 1), ((8, 6), 2)):
        gradients = [drawn(shape[0], rank, seed=step) @ drawn(rank, shape[1], seed=99 + step) for step in range(1, 8)]
        after, state = steps(eb.soap(0.1, period=2, correction=correction), torch.zeros(shape), gradients)
        assert after.isfinite().all()
        assert float(after.abs().max()) < 1.0  # seven steps of 0.1
        for name, basis in eb.tree.get(state, "basis").items():
            # QR in float32 of at most 8 columns.
            apart = basis.mT @ basis - torch.eye(shape[int(name[-1])])
            assert float(apart.abs().max()) <= 64 * 2.0**-24


def test_large_and_small_gradients_give_steps_of_one_size() -> None:
    """Adam's promise, in any basis, as long as eps does not count."""
    gradients = [drawn(4, 6, seed=step) for step in range(5)]
    sizes = []
    for exponent in (-40, 0, 40):
        after, _ = steps(
            eb.soap(0.1, weight_decay=0.0, eps=1e-30), torch.zeros(4, 6), [g * 2.0**exponent for g in gradients]
        )
        sizes.append(after)
    assert torch.equal(sizes[0], sizes[1])
    assert torch.equal(sizes[1], sizes[2])


def test_a_gradient_that_is_not_finite_can_be_skipped() -> None:
    tx = eb.apply_if_finite(eb.soap(0.1, period=1), max_consecutive=3)
    good, bad = drawn(3, 4), torch.full((3, 4), torch.nan)
    expected = steps(tx, torch.ones(3, 4), [good, good, good])[0]
    assert torch.equal(steps(tx, torch.ones(3, 4), [bad, good, bad, good, good])[0], expected)


# -- what a basis is of -------------------------------------------------------------------------------------------------------


def test_others_go_to_another_optimizer() -> None:
    params = {"embed.weight": drawn(5, 3), "layer.weight": drawn(4, 3, seed=1), "layer.bias": drawn(4, seed=2)}
    grads = [{name: drawn(*p.shape, seed=step) for name, p in params.items()} for step in range(3, 7)]
    together, _ = steps(eb.soap(0.1, others=eb.adamw), params, grads)
    for name in params:
        tx = eb.soap(0.1) if name == "layer.weight" else eb.adamw(0.1)
        assert torch.equal(together[name], steps(tx, params[name], [g[name] for g in grads])[0])


def test_vectors_are_adams_one_update_later() -> None:
    params, grads = drawn(5), [drawn(5, seed=step) for step in range(1, 9)]
    # Adam adds eps after the bias is corrected; it does not count here.
    soap, adam = eb.soap(0.1, weight_decay=0.0, eps=1e-30), eb.adam(0.1, b1=0.95, b2=0.95, eps=1e-30)
    found = steps(soap, params.double(), [g.double() for g in grads], eb.policies.FP64)[0]
    expected = steps(adam, params.double(), [g.double() for g in grads[1:]], eb.policies.FP64)[0]
    # Seven steps, of at most 16 roundings each.
    assert float((found - expected).abs().max()) <= 7 * 16 * 2.0**-53 * float(expected.abs().max())


# -- how it is stored ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_torch_optimizer_refreshes_bases_every_few_steps(compiled: bool) -> None:
    params, grads = drawn(4, 3), [drawn(4, 3, seed=step) for step in range(1, 8)]
    weight = torch.nn.Parameter(params.clone())
    optimizer = TorchOptimizer([weight], lambda lr: eb.soap(lr, period=3), lr=0.1, compile=compiled)
    for g in grads:
        weight.grad = g.clone()
        optimizer.step()
    assert torch.equal(weight, steps(eb.soap(0.1, period=3), params, grads)[0])


def test_a_step_costs_what_products_with_the_factors_cost() -> None:
    """By hand: 4 products of an 8 x 3 matrix with 8 x 8 and 3 x 3, and 3/10 of the cubes; a batch of two has two of each."""
    one = 4 * 24 * (8 + 3) + 0.3 * (512 + 27)
    assert eb.scale_by_soap(period=10).step_cost((8, 3)) == pytest.approx(one, rel=1e-15)
    seen = eb.scale_by_soap(period=10, where=eb.Kronecker(eb.batched()))
    assert seen.step_cost((2, 8, 3)) == pytest.approx(2 * one, rel=1e-15)
    assert eb.scale_by_soap(period=10, where=eb.Kronecker(max_dimension=5)).step_cost((8, 3)) == pytest.approx(
        4 * 24 * 3 + 0.3 * 27, rel=1e-15
    )
    assert eb.scale_by_soap().step_cost((8,)) == 0.0
