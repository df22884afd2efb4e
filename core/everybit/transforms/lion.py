"""Lion's direction: the sign of an interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from everybit.base import Hyperparameter, Slot, at, require, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class LionState(Generic[P]):
    """The running mean of the gradient."""

    momentum: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByLion(Elementwise):
    r"""The sign of the gradient mixed with its running mean.

    .. math::
        u_t = \operatorname{sign}(\beta_1 m_{t-1} + (1-\beta_1) g_t) \qquad
        m_t = \beta_2 m_{t-1} + (1-\beta_2) g_t

    Args:
        b1: Weight of the mean in the direction, in [0, 1).
        b2: Decay rate of the mean, in [0, 1).

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Chen et al. 2023, https://arxiv.org/abs/2302.06675, Algorithm 2.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.99

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``momentum`` decays with ``b2``."""
        return (SlotDecay("momentum", self.b2),)

    def init(self, params: P) -> LionState[P]:
        """Return a running mean of zero."""
        return LionState(tree.zeros_like(params))

    def update(self, updates: P, state: LionState[Any], params: P, ctx: Context = ALONE) -> tuple[P, LionState[P]]:
        """Take the direction from the old mean, then update the mean."""
        b1, b2 = at(self.b1, ctx.step, name="b1"), at(self.b2, ctx.step, name="b2")
        direction = tree.elementwise(lambda g, m: torch.sign(b1 * m + (1 - b1) * g), updates, state.momentum)
        momentum = tree.elementwise(lambda g, m: b2 * m + (1 - b2) * g, updates, state.momentum)
        return direction, LionState(momentum)


scale_by_lion = ScaleByLion
