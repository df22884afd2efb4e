"""The preconditioner of Adamax: Adam with the maximum norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, bias_correction, materialize, require, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class AdamaxState(Generic[P]):
    """The running mean of the gradient, and the decaying maximum of its magnitude, which torch calls ``exp_inf``."""

    momentum: Slot[P]
    maximum: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdamax(Elementwise):
    r"""Divide the gradient's running mean by the decaying maximum of its magnitude.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        n_t = \max(\beta_2 n_{t-1}, |g_t| + \epsilon) \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{n_t}

    Args:
        b1: :math:`\beta_1`, decay rate of the mean, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the maximum, in [0, 1).
        eps: Added to the magnitudes, as in torch and optax; same unit as the gradient.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, Algorithm 2, as in ``torch.optim.Adamax``.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``maximum`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("maximum", self.b2)

    def init(self, params: P) -> AdamaxState[P]:
        """Return moments of zero for all parameters."""
        return AdamaxState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdamaxState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamaxState[P]]:
        """Update both, and divide one by the other."""
        step = require_step(ctx.step, "scale_by_adamax")
        b1, b2, eps = at(self.b1, step, name="b1"), at(self.b2, step, name="b2"), at(self.eps, step, name="eps")
        unbias = materialize(1 / bias_correction(b1, step))

        def greatest(g: Tensor, n: Tensor) -> Tensor:
            return torch.maximum(b2 * n, g.abs() + eps)

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        maximum = tree.elementwise(greatest, updates, state.maximum)
        return tree.elementwise(lambda m, n: (m * unbias) / n, momentum, maximum), AdamaxState(momentum, maximum)


scale_by_adamax = ScaleByAdamax
