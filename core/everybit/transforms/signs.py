"""Steps by signs: Lion and Rprop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import AtLeastOne, NonNegative, Rate, Share, Slot, clamp, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
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

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.99

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``momentum`` decays with ``b2``."""
        return (SlotDecay("momentum", self.b2),)

    def init(self, params: P) -> LionState[P]:
        """Return a running mean of zero."""
        return LionState(tree.zeros_like(params))

    def update(self, updates: P, state: LionState[Any], params: P, ctx: Context = ALONE) -> tuple[P, LionState[P]]:
        """Take the direction from the old mean, then update the mean."""
        b1, b2 = self.at(ctx.step, "b1", "b2")
        direction = tree.elementwise(lambda g, m: torch.sign(b1 * m + (1 - b1) * g), updates, state.momentum)
        momentum = tree.elementwise(lambda g, m: b2 * m + (1 - b2) * g, updates, state.momentum)
        return direction, LionState(momentum)


scale_by_lion = ScaleByLion


@tree.state
class RpropState(Generic[P]):
    """The gradient of the step before, zero where the step after it turned round; and the size of the step."""

    previous: Slot[P]
    step_size: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByRprop(Elementwise):
    r"""Step against the sign of the gradient, farther the longer it stays the same.

    .. math::
        \eta_0 = \gamma \qquad
        \eta_t = \operatorname{clip}\left(\eta_{t-1} \cdot
            \begin{cases} \eta^+ & g_t g'_{t-1} > 0 \\ \eta^- & g_t g'_{t-1} < 0 \\ 1 & \text{else} \end{cases},\;
            \Gamma_\text{min}, \Gamma_\text{max}\right)
    .. math::
        g'_t = \begin{cases} 0 & g_t g'_{t-1} < 0 \\ g_t & \text{else} \end{cases} \qquad
        u_t = -\eta_t \operatorname{sign}(g'_t)

    The updates are those of the parameters, so that no learning rate comes after it. It is for gradients of the whole data set: the sign of
    a small batch's gradient is mostly noise.

    Args:
        learning_rate: :math:`\gamma`, the size of the first step; it has no effect after that.
        shrink: :math:`\eta^-`, in [0, 1].
        grow: :math:`\eta^+`, at least 1.
        min_step: :math:`\Gamma_\text{min}`, at least zero.
        max_step: :math:`\Gamma_\text{max}`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Riedmiller & Braun 1993, https://doi.org/10.1109/ICNN.1993.298623, as in ``torch.optim.Rprop``, which takes no step back where the
        sign changes.
    """

    reads_weights = False
    learning_rate: NonNegative = 1e-2
    shrink: Share = 0.5
    grow: AtLeastOne = 1.2
    min_step: NonNegative = 1e-6
    max_step: NonNegative = 50.0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``previous`` is replaced at each step; so is ``step_size``, where it changes, by a number far from the old one."""
        return SlotDecay("previous", 0.0), SlotDecay("step_size", 0.0)

    def init(self, params: P) -> RpropState[P]:
        """Return zeros; the first step knows its size by its number."""
        return RpropState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: RpropState[Any], params: P, ctx: Context = ALONE) -> tuple[P, RpropState[P]]:
        """Change the sizes of the steps, and step."""
        step = require_step(ctx.step, "scale_by_rprop")
        first, shrink, grow, low, high = self.at(step, "learning_rate", "shrink", "grow", "min_step", "max_step")

        def resized(g: Tensor, before: Tensor, size: Tensor) -> Tensor:
            turn = g * before
            size = torch.where(step == 1, torch.zeros_like(size) + first, size)
            size = torch.where(turn > 0, size * grow, torch.where(turn < 0, size * shrink, size))
            return clamp(size, low, high)

        size = tree.elementwise(resized, updates, state.previous, state.step_size)
        kept = tree.elementwise(lambda g, before: torch.where(g * before < 0, 0.0, g), updates, state.previous)
        return tree.elementwise(lambda g, s: -torch.sign(g) * s, kept, size), RpropState(kept, size)


scale_by_rprop = ScaleByRprop
