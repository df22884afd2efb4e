"""MARS's correction of gradients by the gradient before, which goes in front of another optimizer's transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class VarianceReductionState(Generic[P]):
    """The last gradient."""

    last_gradient: Slot[P]


@dataclass(frozen=True, slots=True)
class ReduceVariance(Elementwise):
    r"""Correct gradients by their change since the last update, and limit each tensor's norm.

    .. math::
        c_t = g_t + \gamma \frac{\beta}{1-\beta} (g_t - g_{t-1}) \qquad
        u_t = c_t / \max(1, \lVert c_t \rVert / \rho)

    The gradient before is that of the batch before (MARS-approx). The first update has :math:`c_1 = g_1`.

    Args:
        gamma: :math:`\gamma`, at least zero.
        b1: :math:`\beta`, in [0, 1): the decay rate of the mean that follows.
        max_norm: :math:`\rho`, at least zero, the largest norm of a tensor's corrected gradient; None: no limit.
        zero_before: Take zero for the gradient before the first, as the authors' code: :math:`c_1 = (1 + \gamma\beta/(1-\beta)) g_1`.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Yuan et al. 2024, https://arxiv.org/abs/2411.10438, Algorithm 2 and eq. 2.6.
    """

    reads_weights: ClassVar[bool] = False
    per_tensor: ClassVar[bool] = True
    gamma: Hyperparameter = 0.025
    b1: Hyperparameter = 0.95
    max_norm: Hyperparameter | None = 1.0
    zero_before: bool = False

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 0.0)
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        if self.max_norm is not None:
            require("max_norm", self.max_norm, 0.0)

    @property
    def reduces(self) -> bool:
        """Pieces of a parameter are added up for its norm."""
        return True

    def decays(self) -> tuple[SlotDecay, ...]:
        """``last_gradient`` is replaced at every update."""
        return (SlotDecay("last_gradient", 0.0),)

    def init(self, params: P) -> VarianceReductionState[P]:
        """Return gradients of zero."""
        return VarianceReductionState(tree.zeros_like(params))

    def update(
        self, updates: P, state: VarianceReductionState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, VarianceReductionState[P]]:
        """Correct the gradient, and remember it."""
        step = require_step(ctx.step, "reduce_variance")
        b1 = at(self.b1, step, name="b1")
        gain = at(self.gamma, step, name="gamma") * (b1 / (1 - b1)) * torch.ones_like(step, dtype=torch.float64)
        gain = materialize(gain if self.zero_before else torch.where(step == 1, 0.0, gain))
        corrected = tree.elementwise(lambda g, last: g + gain * (g - last), updates, state.last_gradient)
        after = VarianceReductionState(tree.map(torch.clone, updates))
        if self.max_norm is None:
            return corrected, after
        most = at(self.max_norm, step, name="max_norm")

        def factor(square: Tensor) -> Tensor:
            above = square > most * most
            return torch.where(above, most / sqrt(torch.where(above, square, 1.0)), 1.0)

        def limited(squares: P) -> tuple[P, VarianceReductionState[P]]:
            factors = ctx.per_tensor.expand(tree.map(factor, squares), updates)
            return tree.elementwise(lambda c, f: c * f, corrected, factors), after

        return ctx.request(ctx.per_tensor.sum_of_squares(corrected), limited)


reduce_variance = ReduceVariance
