"""The preconditioner of Yogi: Adam with a second moment that moves by a bounded amount."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class YogiState(Generic[P]):
    """The gradient's running mean, and an additive estimate of its square."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByYogi(Elementwise):
    r"""Divide the gradient's running mean by the root of a square that follows the gradient's sign by sign.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = v_{t-1} - (1-\beta_2) \operatorname{sign}(v_{t-1} - g_t^2)\, g_t^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: One minus the share of the squared gradient by which the square moves, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        initial_mean: Value of :math:`m_0`; 0 in the paper, 1e-6 in optax.
        initial_square: Value of :math:`v_0`, at least zero.

    Raises:
        TypeError: A schedule for an initial value.
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Zaheer et al. 2018, https://papers.nips.cc/paper/8186, Algorithm 2, with Adam's bias correction as in optax.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-3
    _: KW_ONLY
    initial_mean: Hyperparameter = 0.0
    initial_square: Hyperparameter = 1e-6

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("initial_mean", self.initial_mean, schedule=False)
        require("initial_square", self.initial_square, 0.0, schedule=False)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``; ``variance`` is a sum, with terms that are small beside it."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", 1.0, squares=True)

    def init(self, params: P) -> YogiState[P]:
        """Return moments of the initial values for all parameters."""
        mean, square = (at(x, None, name="initial") for x in (self.initial_mean, self.initial_square))
        return YogiState(
            tree.elementwise(lambda p: torch.zeros_like(p) + mean, params),
            tree.elementwise(lambda p: torch.zeros_like(p) + square, params),
        )

    def update(self, updates: P, state: YogiState[Any], params: P, ctx: Context = ALONE) -> tuple[P, YogiState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_yogi")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps = at(self.eps, step, name="eps")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))

        def followed(g: Tensor, v: Tensor) -> Tensor:
            square = g * g
            # Rounded, the difference of nearly equal numbers may fall below zero, where there is no root.
            return (v - (1 - b2) * torch.sign(v - square) * square).clamp(min=0.0)

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(followed, updates, state.variance)
        moved = tree.elementwise(lambda m, v: (m * unbias_mean) / (sqrt(v * unbias_square) + eps), momentum, variance)
        return moved, YogiState(momentum, variance)


scale_by_yogi = ScaleByYogi
