"""Gradients in which what changes slowly is amplified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from everybit.base import Hyperparameter, Slot, at, materialize, require, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class GrokfastState(Generic[P]):
    """Running mean of the gradients."""

    mean: Slot[P]


@dataclass(frozen=True, slots=True)
class AmplifySlowGradients(Elementwise):
    r"""Grokfast-EMA: add to the gradient its running mean, which begins at the first gradient.

    .. math::
        m_1 = g_1 \qquad m_t = \alpha m_{t-1} + (1-\alpha) g_t \qquad u_t = g_t + \lambda m_t

    Args:
        decay: :math:`\alpha`, in [0, 1).
        gain: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Lee et al. 2024, https://arxiv.org/abs/2405.20233, Algorithm 2.
    """

    reads_weights: ClassVar[bool] = False
    decay: Hyperparameter = 0.98
    gain: Hyperparameter = 2.0

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0, open_high=True)
        require("gain", self.gain, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``mean`` decays with ``decay``."""
        return (SlotDecay("mean", self.decay),)

    def init(self, params: P) -> GrokfastState[P]:
        """Return a mean of zero."""
        return GrokfastState(tree.zeros_like(params))

    def update(
        self, updates: P, state: GrokfastState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, GrokfastState[P]]:
        """Update the mean, and add it."""
        step = require_step(ctx.step, "amplify_slow_gradients")
        decay, gain = at(self.decay, step, name="decay"), at(self.gain, step, name="gain")
        share = materialize(torch.where(step == 1, 1.0, (1 - decay) * torch.ones_like(step, dtype=torch.float64)))
        mean = tree.elementwise(lambda g, m: decay * m + share * g, updates, state.mean)
        return tree.elementwise(lambda g, m: g + gain * m, updates, mean), GrokfastState(mean)


amplify_slow_gradients = AmplifySlowGradients
