"""StableAdamW's direction: Adam's and its decay, made smaller for tensors with gradients that outrun their second moments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam import AdamState

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ScaleByStableAdam(Elementwise):
    r"""Adam's direction and decoupled decay, over the root mean square of each tensor's normalised gradients where that is above 1.

    .. math::
        R_t = \sqrt{\operatorname{mean} \frac{g_t^2}{\max(\hat v_t, \epsilon^2)}} \qquad
        u_t = \left(\frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} + \lambda p_t\right) / \max(1, R_t)

    with Adam's :math:`\hat m_t` and :math:`\hat v_t`, which hold :math:`g_t` already. The mean is over a whole tensor, wherever its pieces
    are.

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        weight_decay: :math:`\lambda`, at least zero; made smaller with the rest of the step, as in the authors' code and torch-optimi.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, Algorithm 2.
    """

    per_tensor: ClassVar[bool] = True
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.99
    eps: Hyperparameter = 1e-6
    weight_decay: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("weight_decay", self.weight_decay, 0.0)

    @property
    def reduces(self) -> bool:
        """Pieces of a parameter are added up for its mean square."""
        return True

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdamState[P]:
        """Return moments of zero for all parameters."""
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, precondition by them, and limit each tensor's step."""
        step = require_step(ctx.step, "scale_by_stable_adam")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, decay = at(self.eps, step, name="eps"), at(self.weight_decay, step, name="weight_decay")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))
        least = materialize(eps * torch.ones_like(step, dtype=torch.float64))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)
        # The root of a maximum is the maximum of roots, and does not underflow as the square of eps does.
        shares = tree.elementwise(
            lambda g, v: g / torch.maximum(sqrt(v * unbias_square), least.to(v.dtype)), updates, variance
        )

        def factor(square: Tensor) -> Tensor:
            above = square > 1
            return torch.where(above, 1 / sqrt(torch.where(above, square, 1.0)), 1.0)

        def direction(m: Tensor, v: Tensor, p: Tensor, f: Tensor) -> Tensor:
            u = (m * unbias_mean) / (sqrt(v * unbias_square) + eps)
            if isinstance(decay, Tensor):
                u = torch.where(decay == 0, u, u + decay * p)
            elif decay != 0:
                u = u + decay * p
            return u * f

        def limited(squares: P) -> tuple[P, AdamState[P]]:
            expanded = ctx.per_tensor.expand(tree.map(factor, squares), updates)
            return tree.elementwise(direction, momentum, variance, params, expanded), AdamState(momentum, variance)

        return ctx.request(ctx.per_tensor.mean_of_squares(shares), limited)


scale_by_stable_adam = ScaleByStableAdam
