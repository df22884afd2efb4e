"""PSGD's direction: gradients whitened by a Kronecker product of small matrices that is fitted step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    FixedAboveZero,
    Key,
    NonNegative,
    Rate,
    Scalar,
    Share,
    Slot,
    Updates,
    at,
    bias_correction,
    materialize,
    normal,
    require_step,
    tree,
)
from everybit.linalg import Block, Kronecker, fitted, root_mean_square
from everybit.linalg.kronecker import moved, times
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
class KronState(Generic[P]):
    """The mean of gradients, and the factors of the preconditioner's root: a triangular matrix or a diagonal for each dimension."""

    momentum: Slot[P]
    factors: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByKron(WholeTensors):
    r"""Whiten the mean of gradients: :math:`u_t = P m_t` with :math:`P = Q^\top Q`, :math:`Q = Q_1 \otimes Q_2 \otimes \dots`.

    .. math::
        m_t = \frac{1}{1 - \beta_1^t} (1-\beta_1) \sum_{s \le t} \beta_1^{t-s} g_s \qquad A = Q m_t \qquad B = Q^{-\top} v
    .. math::
        Q_i \leftarrow Q_i - \mu \frac{\operatorname{triu}(A_i A_i^\top - B_i B_i^\top)}{\lVert A_i A_i^\top + B_i B_i^\top \rVert} Q_i

    where :math:`v` is standard normal, and :math:`A_i` has the i-th dimension in its rows. A dimension without a matrix has the diagonal
    of one. v depends on the optimizer's seed, the update and each element's place in the model: it is the same on shards and after a
    resume.

    Args:
        b1: :math:`\beta_1`, in [0, 1); the bias is corrected.
        preconditioner_rate: :math:`\mu`, in [0, 1].
        period: Updates between two steps of the factors, at least 1. Others anneal a probability from 1 to 0.03, which is a period of 33.
        start: Size of :math:`Q` before the first update, above zero.
        of_momentum: Fit the factors to :math:`m_t`; False: to the gradient.
        normalize: Divide each gradient by its norm first.
        max_rms: The root mean square to which a direction is limited; a whitened direction has about 1. None: no limit.
        where: The dimensions with a triangular matrix; vectors have no matrix by default.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a parameter that the view does not fit.

    Reference:
        Li 2015, https://arxiv.org/abs/1512.04202; 2024, https://arxiv.org/abs/2402.11858; limits and defaults as in
        https://github.com/evanatyourservice/kron_torch.
    """

    reads_weights = False
    draws = True
    b1: Rate = 0.9
    preconditioner_rate: Share = 0.1
    period: Updates = 1
    start: FixedAboveZero = 1.0
    of_momentum: bool = True
    normalize: bool = False
    max_rms: NonNegative | None = 1.1
    where: Kronecker = field(default_factory=lambda: Kronecker(max_dimension=2048))  # a default that torch 2.11 traces

    def decays(self) -> tuple[SlotDecay, ...]:
        """``factors`` move by less and less of themselves as they come to fit."""
        return (SlotDecay("momentum", self.b1), SlotDecay("factors", 1.0))

    def periods(self) -> tuple[int, ...]:
        """The period of the factors."""
        return (self.period,)

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step: two products with each factor, and four more where the factors are fitted."""
        return self.where.step_cost(shape, products=2.0 + 4.0 / self.period, cubes=1.0 / self.period)

    def init(self, params: P) -> KronState[P]:
        """Return means of zero, and multiples of the identity."""
        self.where.require(params)

        def identities(p: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            for block in self.where.blocks(_shape(p)):
                for name, shape, has in _factors(block):
                    unit = torch.eye(shape[-1], dtype=p.dtype, device=p.device) if has else p.new_ones(shape[-1:])
                    found[name] = (unit * self.start ** (1 / len(block.names))).expand(shape).clone()
            return found

        return KronState(tree.zeros_like(params), tree.map(identities, params))

    def update(self, updates: P, state: KronState[Any], params: P, ctx: Context = ALONE) -> tuple[P, KronState[P]]:
        """Update the mean, fit the factors to it if that is due, and whiten it."""
        step = require_step(ctx.step, "scale_by_kron")
        b1, rate = self.at(step, "b1", "preconditioner_rate")
        limit = None if self.max_rms is None else at(self.max_rms, step, name="max_rms")
        unbias = materialize(1 / bias_correction(b1, step))

        gradients = tree.map(self._normalized, updates) if self.normalize else updates
        momentum = tree.map(lambda g, m: moved(m, g, 1 - b1), gradients, state.momentum)
        means = tree.map(lambda m: (m.reshape(-1) * unbias).reshape(m.shape), momentum)

        def work() -> Any:
            seen = means if self.of_momentum else gradients
            radii, angles = ctx.keys("radius", updates), ctx.keys("angle", updates)

            def of(x: Tensor, factors: dict[str, Tensor], radius: Key, angle: Key) -> Any:
                return self._fitted(x, normal(x, radius, angle).to(x.dtype), factors, rate)

            return tree.map(of, seen, state.factors, radii, angles)

        factors = ctx.every(self.period, work, lambda: state.factors)
        directions = tree.map(lambda m, q: self._whitened(m, q, limit), means, factors)
        return directions, KronState(momentum, factors)

    def _fitted(self, x: Tensor, probe: Tensor, factors: dict[str, Tensor], rate: Scalar) -> dict[str, Tensor]:
        if not x.numel():
            return {name: one.clone() for name, one in factors.items()}
        found: dict[str, Tensor] = {}
        blocks = self.where.blocks(_shape(x))
        parts, probes = (self.where.split(one.reshape(_shape(one))) for one in (x, probe))
        for part, v, block in zip(parts, probes, blocks, strict=True):
            count = math.prod(block.shape[: block.batch])
            named = [(name, factors[name]) for name in block.names]
            flat = [one.reshape(count, *one.shape[block.batch :]) for _, one in named]
            sizes = (count, *block.shape[block.batch :])
            stepped = fitted(part.reshape(sizes), v.reshape(sizes), flat, rate)
            found |= {name: new.reshape(old.shape) for (name, old), new in zip(named, stepped, strict=True)}
        return found

    def _whitened(self, mean: Tensor, factors: dict[str, Tensor], limit: Scalar | None) -> Tensor:
        if not mean.numel():
            return mean.clone()
        shape = _shape(mean)
        parts = []
        for part, block in zip(self.where.split(mean.reshape(shape)), self.where.blocks(shape), strict=True):
            for dim, (name, has) in enumerate(zip(block.names, block.has, strict=True)):
                q = factors[name]
                if has:
                    part = times(times(part, q, dim, block.batch), q.mT, dim, block.batch)
                else:
                    aligned = (
                        *block.shape[: block.batch],
                        *(-1 if other == dim else 1 for other in range(len(block.has))),
                    )
                    part = part * (q * q).reshape(aligned)
            if limit is not None:
                size = root_mean_square(part, block.batch) + 1e-8
                # Two tensors: a number over a tensor is the number times an inverse, rounded twice.
                part = part * torch.where(size > limit, materialize((torch.zeros_like(size) + limit) / size), 1.0)
            parts.append(part)
        return self.where.joined(parts, shape).reshape(mean.shape)

    def _normalized(self, g: Tensor) -> Tensor:
        if not g.numel():
            return g
        parts = []
        for part, block in zip(self.where.split(g.reshape(_shape(g))), self.where.blocks(_shape(g)), strict=True):
            count = math.prod(block.shape[block.batch :])
            size = root_mean_square(part, block.batch) * math.sqrt(count)
            known = size > 0
            parts.append(torch.where(known, part / torch.where(known, size, 1.0), 0.0))
        return self.where.joined(parts, _shape(g)).reshape(g.shape)


def _shape(p: Tensor) -> tuple[int, ...]:
    """The shape of a parameter; a number is a vector of one element, which has a diagonal."""
    return tuple(p.shape) or (1,)


def _factors(block: Block) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """The name of each dimension's factor, its shape, and whether it is a matrix."""
    batch, sizes = block.shape[: block.batch], block.shape[block.batch :]
    for name, size, has in zip(block.names, sizes, block.has, strict=True):
        yield name, (*batch, size, size) if has else (*batch, size), has


scale_by_kron = ScaleByKron
