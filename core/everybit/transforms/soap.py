"""SOAP's direction: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    NonNegative,
    Rate,
    Scalar,
    Slot,
    Updates,
    at,
    bias_correction,
    exp,
    log,
    materialize,
    mean,
    require_step,
    sqrt,
    sum_of_squares,
    tree,
)
from everybit.linalg import Block, Kronecker, eigenvectors, orthonormal, product, root_mean_square
from everybit.linalg.kronecker import moved, times
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors
from everybit.protocol.context import ONCE

P = TypeVar("P")


Correction = Literal["none", "kl"]
"""What the products of gradients are corrected by: nothing, or the other sides' matrices, as KL-Shampoo does."""


@tree.state
class SoapState(Generic[P]):
    """The mean of gradients, that of their squares in the eigenbasis, that of their products, and the eigenbasis.

    ``factors`` and ``basis`` hold a square matrix for each dimension of a parameter; see :mod:`everybit.linalg.kronecker`.
    """

    momentum: Slot[P]
    variance: Slot[P]
    factors: Slot[P]
    basis: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleBySoap(WholeTensors):
    r"""Precondition by Adam in the eigenbases :math:`Q_L, Q_R` of the mean products of gradients.

    Of each matrix :math:`G`:

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) G_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) (Q_L^\top G_t Q_R)^2 \qquad
        u_t = \frac{\sqrt{1-\beta_2^s}}{1-\beta_1^s} Q_L \frac{Q_L^\top m_t Q_R}{\sqrt{v_t} + \epsilon} Q_R^\top
    .. math::
        L_t = \beta_3 L_{t-1} + (1-\beta_3) G_t G_t^\top \qquad R_t = \beta_3 R_{t-1} + (1-\beta_3) G_t^\top G_t

    with :math:`s = t - 1`: the first update is zero, and serves to find the bases, so that no gradient is seen in a basis made of itself.
    Every ``period`` updates the columns of a basis are sorted by their eigenvalues, the squares with them, and the basis moves by a step of
    power iteration, :math:`Q \leftarrow \operatorname{qr}(L Q)`. A tensor of more dimensions has a basis for each. A parameter without,
    such as a vector, is Adam.

    Args:
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        factor_decay: :math:`\beta_3`, in [0, 1); None: ``b2``.
        eps: :math:`\epsilon`, added before the bias is corrected; same unit as the gradient.
        period: Updates between two steps of power iteration, at least 1.
        debias: Correct the bias.
        normalize: Scale each parameter's direction to a root mean square of 1; the authors advise it for periods around 100.
        correction: ``"kl"``: products of gradients are taken with the inverse of the other side's matrix between them,
            :math:`G R^{-1} G^\top / n` and :math:`G^\top L^{-1} G / m`, in the present bases. At the first update, without bases,
            it is the root mean square of the gradient's elements times the identity.
        least_eigenvalue: The least eigenvalue of inverted matrices; above zero.
        where: Which dimensions have a basis.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a parameter that the view does not fit.

    Reference:
        Vyas et al. 2024, https://arxiv.org/abs/2409.11321; corrected: Lin et al. 2025, https://arxiv.org/abs/2509.03378.
    """

    reads_weights = False
    b1: Rate = 0.95
    b2: Rate = 0.95
    factor_decay: Rate | None = None
    eps: NonNegative = 1e-8
    period: Updates = 10
    debias: bool = True
    normalize: bool = False
    correction: Correction = "none"
    least_eigenvalue: NonNegative = 1e-8
    where: Kronecker = field(default_factory=Kronecker)  # a default that torch 2.11 traces

    def decays(self) -> tuple[SlotDecay, ...]:
        """``basis`` moves slowly where neighbouring eigenvalues are nearly equal, the others by their rates."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("factors", self.b2 if self.factor_decay is None else self.factor_decay),
            SlotDecay("basis", 1.0),
        )

    def periods(self) -> tuple[int, ...]:
        """The period of the bases, and one for the decomposition at the first update."""
        return (self.period, ONCE)

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step: to and from the basis, the products of gradients, and a product and QR a refresh."""
        return self.where.step_cost(shape, products=4.0, cubes=3.0 / self.period)

    def init(self, params: P) -> SoapState[P]:
        """Return means of zero, and the identity for all bases."""
        self.where.require(params)
        return SoapState(
            tree.zeros_like(params),
            tree.zeros_like(params),
            tree.map(self.where.zeros, params),
            tree.map(self.where.identities, params),
        )

    def update(self, updates: P, state: SoapState[Any], params: P, ctx: Context = ALONE) -> tuple[P, SoapState[P]]:
        """Update the means, precondition in the bases of the update before, and refresh these if that is due."""
        step = require_step(ctx.step, "scale_by_soap")
        first, done = step == 1, torch.where(step == 1, 1, step - 1)
        b1, b2, eps = (at(getattr(self, name), step, name=name) for name in ("b1", "b2", "eps"))
        b3 = b2 if self.factor_decay is None else at(self.factor_decay, step, name="factor_decay")
        unbias = materialize(sqrt(bias_correction(b2, done)) / bias_correction(b1, done)) if self.debias else 1.0

        def rotated(x: Tensor, basis: dict[str, Tensor]) -> Tensor:
            return self.where.multiplied(x, basis, transposed=True)

        def averaged(g: Tensor, m: Tensor) -> Tensor:
            return torch.where(first, m, b1 * m + (1 - b1) * g)

        def squared(g: Tensor, v: Tensor) -> Tensor:
            return torch.where(first, v, b2 * v + (1 - b2) * (g * g))

        def direction(m: Tensor, v: Tensor) -> Tensor:
            return m / (sqrt(v) + eps)

        def back(u: Tensor, basis: dict[str, Tensor]) -> Tensor:
            return self._scaled(self.where.multiplied(u, basis), unbias, first)

        momentum = tree.elementwise(averaged, updates, state.momentum)
        variance = tree.elementwise(squared, tree.map(rotated, updates, state.basis), state.variance)
        factors = self._factors(updates, state, b3, ctx)
        found = tree.elementwise(direction, tree.map(rotated, momentum, state.basis), variance)
        basis, variance = self._refreshed(factors, state.basis, variance, ctx)
        return tree.map(back, found, state.basis), SoapState(momentum, variance, factors, basis)

    def _scaled(self, u: Tensor, factor: Scalar, first: Tensor) -> Tensor:
        flat = u.reshape(-1)
        if self.normalize:
            size = sqrt(sum_of_squares(flat) / max(flat.numel(), 1))
            factor = materialize(factor / (size + 1e-30))
        # The first direction has no squares to divide by.
        return torch.where(first, torch.zeros_like(flat), flat * factor).reshape(u.shape)

    def _factors(self, updates: P, state: SoapState[Any], decay: Scalar, ctx: Context) -> Any:
        """The mean products of gradients after this update."""

        def plain(g: Tensor, old: dict[str, Tensor]) -> Any:
            products = self.where.products(g)
            return self.where.mapped(lambda a, b: moved(a, b, 1 - decay), old, products)

        if self.correction == "none":
            return tree.map(plain, updates, state.factors)
        least = at(self.least_eigenvalue, ctx.step, name="least_eigenvalue")

        def corrected(g: Tensor, old: dict[str, Tensor], basis: dict[str, Tensor]) -> Any:
            roots = self.where.mapped(lambda a, q: _inverse_root(a, q, least), old, basis)

            def seen(part: Tensor, block: Block, dim: int) -> Tensor:
                for other, name in block.dimensions:
                    part = part if other == dim else times(part, roots[name], other, block.batch)
                return part * _per_column(block, dim)

            products = self.where.products(g, seen)
            return self.where.mapped(lambda a, b: moved(a, b, 1 - decay), old, products)

        def begun(g: Tensor) -> Any:
            def seen(part: Tensor, block: Block, dim: int) -> Tensor:
                count = sum(block.has)
                size = root_mean_square(part, block.batch)
                size = torch.where(size > 0, size, 1.0)
                # A power of the size by which the matrices together have the unit of squared gradients.
                return part * exp(log(size) * ((1 - count) / count)) * _per_column(block, dim)

            return self.where.products(g, seen)

        return ctx.every(
            ONCE,
            lambda: tree.map(begun, updates),
            lambda: tree.map(corrected, updates, state.factors, state.basis),
        )

    def _refreshed(self, factors: Any, bases: Any, variance: P, ctx: Context) -> tuple[Any, P]:
        """The bases for the next update, and the squares in them."""

        def decomposed() -> tuple[Any, P]:
            found = tree.map(lambda _, one: self.where.mapped(lambda a: eigenvectors(a)[1], one), variance, factors)
            return found, variance

        def iterated() -> tuple[Any, P]:
            grown = tree.map(lambda _, one, q: self.where.mapped(product, one, q), variance, factors, bases)
            order = tree.map(lambda _, q, a: self.where.mapped(_descending, q, a), variance, bases, grown)
            found = tree.map(
                lambda _, a, n: self.where.mapped(lambda x, one: orthonormal(_columns(x, one)), a, n),
                variance,
                grown,
                order,
            )
            return found, tree.map(self._sorted, variance, order)

        return ctx.every(self.period, lambda: ctx.every(ONCE, decomposed, iterated), lambda: (bases, variance))

    def _sorted(self, v: Tensor, order: dict[str, Tensor]) -> Tensor:
        """Squares in the order in which the columns of their bases are."""
        parts = []
        for part, block in zip(self.where.split(v), self.where.blocks(v.shape), strict=True):
            for dim, name in block.dimensions:
                index = order[name].reshape(
                    *block.shape[: block.batch], *(-1 if other == dim else 1 for other in range(len(block.has)))
                )
                part = part.gather(block.batch + dim, index.expand(part.shape))
            parts.append(part)
        return self.where.joined(parts, v.shape)


def _descending(basis: Tensor, grown: Tensor) -> Tensor:
    """The order of a basis's columns by their Rayleigh quotients, the greatest first; ``grown`` is the matrix times the basis."""
    return mean(basis * grown, -2).argsort(dim=-1, descending=True, stable=True)


def _columns(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(-1, order.unsqueeze(-2).expand(x.shape))


def _inverse_root(factor: Tensor, basis: Tensor, least: Scalar) -> Tensor:
    """A root of a matrix's inverse, from its basis and the Rayleigh quotients of that: its product with its transpose is the inverse."""
    values = mean(basis * product(factor, basis), -2) * factor.shape[-1]
    low = torch.zeros_like(values) + least
    return (basis / sqrt(torch.where(values < low, low, values)).unsqueeze(-2)).mT


def _per_column(block: Block, dim: int) -> float:
    """The root of one over the number of elements in a slice along one dimension."""
    sizes = block.shape[block.batch :]
    return math.sqrt(sizes[dim] / math.prod(sizes))


scale_by_soap = ScaleBySoap
