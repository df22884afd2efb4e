"""SM3's direction: Adagrad, with sums of squares that are kept for each index of each dimension."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, require, sqrt, tree
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class Sm3State(Generic[P]):
    """For each index of each dimension the greatest sum of squares, ``{"along0": ..., "along1": ...}``; of a vector all sums."""

    maxima: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleBySm3(WholeTensors):
    r"""Divide by the root of the least of the sums of squares that an element is under, one for each of its indices.

    .. math::
        \nu_t(i) = \min_{r \ni i} \mu_{t-1}(r) + g_t(i)^2 \qquad
        u_t(i) = \frac{g_t(i)}{\sqrt{\nu_t(i) + \epsilon}} \qquad
        \mu_t(r) = \max_{i \in r} \nu_t(i)

    where r goes over the slices of a tensor along its dimensions: the rows and the columns of a matrix. A vector has a sum for each
    element, and SM3 is Adagrad. Where :math:`\nu = 0` the update is zero.

    Args:
        b2: Average, :math:`\nu_t = \beta_2 \min \mu_{t-1} + (1-\beta_2) g_t^2`, with a decay rate in [0, 1); None: sum, as the paper.
        eps: :math:`\epsilon`, added inside the root; unit of the gradient squared. optax has 1e-8, pytorch_optimizer 1e-30.
        keep_greatest: Let no :math:`\mu` fall, as pytorch_optimizer where it averages; optax lets it.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Anil et al. 2019, https://arxiv.org/abs/1901.11150, SM3-II.
    """

    reads_weights: ClassVar[bool] = False
    _: KW_ONLY
    b2: Hyperparameter | None = None
    eps: Hyperparameter = 1e-30
    keep_greatest: bool = False

    def __post_init__(self) -> None:
        if self.b2 is not None:
            require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``maxima`` are sums, or decay with ``b2``."""
        return (SlotDecay("maxima", 1.0 if self.b2 is None else self.b2, squares=True),)

    def init(self, params: P) -> Sm3State[P]:
        """Return sums of zero."""

        def zeros(p: Tensor) -> Any:
            if p.ndim < 2 or not p.numel():
                return torch.zeros_like(p)
            return {f"along{dim}": torch.zeros_like(_first_of_others(p, dim)) for dim in range(p.ndim)}

        return Sm3State(tree.map(zeros, params))

    def update(self, updates: P, state: Sm3State[Any], params: P, ctx: Context = ALONE) -> tuple[P, Sm3State[P]]:
        """Add the squares to the least of their sums, divide by the root, and keep the greatest."""
        eps = at(self.eps, ctx.step, name="eps")
        b2 = None if self.b2 is None else at(self.b2, ctx.step, name="b2")

        def sums(g: Tensor, old: Any) -> Tensor:
            least: Tensor = reduce(torch.minimum, old.values()) if isinstance(old, dict) else old
            # Vectors: a tensor without dimensions would take the dtype of the decay rate.
            square, before = (g * g).reshape(-1), least.expand(g.shape).reshape(-1)
            return (before + square if b2 is None else b2 * before + (1 - b2) * square).reshape(g.shape)

        def kept(total: Tensor, old: Any) -> Any:
            if not isinstance(old, dict):
                return torch.maximum(total, old) if self.keep_greatest else total
            new = {f"along{dim}": total.amax(_others(total, dim), keepdim=True) for dim in range(total.ndim)}
            return {name: torch.maximum(x, old[name]) for name, x in new.items()} if self.keep_greatest else new

        def direction(g: Tensor, total: Tensor) -> Tensor:
            known = total > 0
            return torch.where(known, g / sqrt(torch.where(known, total, 1.0) + eps), 0.0)

        totals = tree.map(sums, updates, state.maxima)
        return tree.elementwise(direction, updates, totals), Sm3State(tree.map(kept, totals, state.maxima))


def _others(x: Tensor, dim: int) -> list[int]:
    return [other for other in range(x.ndim) if other != dim]


def _first_of_others(x: Tensor, dim: int) -> Tensor:
    return reduce(lambda left, other: left.narrow(other, 0, 1), _others(x, dim), x)


scale_by_sm3 = ScaleBySm3
