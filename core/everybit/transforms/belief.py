"""The preconditioner of AdaBelief: Adam with the square of the gradient's difference from its mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class BeliefState(Generic[P]):
    """Running means of the gradient, and of the square of its distance from that mean."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByBelief(Elementwise):
    r"""Divide the gradient's running mean by the root of the running square of its distance from the mean.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        s_t = \beta_2 s_{t-1} + (1-\beta_2) (g_t - m_t)^2 + \epsilon_\text{root} \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{s_t / (1-\beta_2^t)} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        eps_root: Added to the square at every update; unit of the gradient squared.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Zhuang et al. 2020, https://arxiv.org/abs/2010.07468, Algorithm 2.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-16
    eps_root: Hyperparameter = 1e-16

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("eps_root", self.eps_root, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> BeliefState[P]:
        """Return moments of zero for all parameters."""
        return BeliefState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: BeliefState[Any], params: P, ctx: Context = ALONE) -> tuple[P, BeliefState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_belief")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, eps_root = at(self.eps, step, name="eps"), at(self.eps_root, step, name="eps_root")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)

        def surprise(g: Tensor, m: Tensor, s: Tensor) -> Tensor:
            error = g - m
            return (b2 * s + (1 - b2) * (error * error)) + eps_root

        variance = tree.elementwise(surprise, updates, momentum, state.variance)
        moved = tree.elementwise(lambda m, s: (m * unbias_mean) / (sqrt(s * unbias_square) + eps), momentum, variance)
        return moved, BeliefState(momentum, variance)


scale_by_belief = ScaleByBelief
