"""Adam-atan2's direction: the angle of Adam's moments in the place of their quotient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, at, atan, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam import AdamState

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ScaleByAdamAtan2(Elementwise):
    r"""The angle between Adam's moments, which needs no :math:`\epsilon`: the update is the same for gradients of any size.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = a \operatorname{atan2}\left(\frac{m_t}{1-\beta_1^t},\; b \sqrt{\frac{v_t}{1-\beta_2^t}}\right)

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        a: A factor of the angle, non-negative; with 1.27, about :math:`4 / \pi`, a constant gradient gives 1.
        b: A factor of the root, at least zero: an update is at most :math:`a \pi / 2`, and :math:`a / b` times Adam's if that is small.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Everett et al. 2024, https://arxiv.org/abs/2407.05872, section 4.3.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.99
    a: Hyperparameter = 1.27
    b: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("a", self.a, 0.0)
        require("b", self.b, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdamState[P]:
        """Return moments of zero for all parameters."""
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and return their angles."""
        step = require_step(ctx.step, "scale_by_adam_atan2")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        a, b = at(self.a, step, name="a"), at(self.b, step, name="b")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(rate, step)) for rate in (b1, b2))

        def angle(m: Tensor, v: Tensor) -> Tensor:
            root = b * sqrt(v * unbias_square)
            known = root > 0
            slope = (m * unbias_mean) / torch.where(known, root, 1.0)
            return a * torch.where(known, atan(materialize(slope)), torch.sign(m) * (math.pi / 2))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)
        return tree.elementwise(angle, momentum, variance), AdamState(momentum, variance)


scale_by_adam_atan2 = ScaleByAdamAtan2
