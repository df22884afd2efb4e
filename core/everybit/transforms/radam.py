"""The preconditioner of RAdam: Adam that uses its second moment once it holds enough gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Scalar, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam import AdamState

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ScaleByRadam(Elementwise):
    r"""Adam's direction times the rectification :math:`r_t`; before it is known, the unbiased mean alone.

    .. math::
        \rho_\infty = \frac{2}{1-\beta_2} - 1 \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t} \qquad
        r_t = \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}
    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = \frac{m_t}{1-\beta_1^t} \begin{cases}
            r_t \sqrt{1-\beta_2^t} \,/\, (\sqrt{v_t} + \epsilon) & \rho_t > \theta \\ 1 & \text{else} \end{cases}

    Args:
        b1: :math:`\beta_1`, decay rate of the mean, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the square, in [0, 1).
        eps: Added to the root before its bias is corrected, as in torch; same unit as the gradient.
        threshold: :math:`\theta`, at least 4, which is the paper's; torch's is 5.
        eps_after_correction: Add ``eps`` to :math:`\sqrt{v_t / (1-\beta_2^t)}` instead, as optax does.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Liu et al. 2020, https://arxiv.org/abs/1908.03265, Algorithm 2, as in ``torch.optim.RAdam``.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8
    _: KW_ONLY
    threshold: Hyperparameter = 5.0
    eps_after_correction: bool = False

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("threshold", self.threshold, 4.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdamState[P]:
        """Return moments of zero for all parameters."""
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and precondition by them where the second one can be trusted."""
        step = require_step(ctx.step, "scale_by_radam")
        b1, b2, eps = at(self.b1, step, name="b1"), at(self.b2, step, name="b2"), at(self.eps, step, name="eps")
        correction = bias_correction(b2, step)
        is_trusted, factor = rectification(b2, step, at(self.threshold, step, name="threshold"))
        unbias_mean, root = materialize(1 / bias_correction(b1, step)), materialize(sqrt(correction))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)

        def direction(m: Tensor, v: Tensor) -> Tensor:
            mean = m * unbias_mean
            norm = sqrt(v) / root + eps if self.eps_after_correction else (sqrt(v) + eps) / root
            return torch.where(is_trusted, factor * mean / norm, mean)

        return tree.elementwise(direction, momentum, variance), AdamState(momentum, variance)


def rectification(b2: Scalar, step: Tensor, threshold: Scalar) -> tuple[Tensor, Tensor]:
    r"""Whether :math:`\rho_t` is above the threshold, at least 4, and :math:`r_t` if it is; else 1. 0-d, float64."""
    number = step.double()
    rate = torch.zeros_like(number) + b2  # float64, of a float32 tensor too
    longest = 2 / (1 - rate) - 1
    length = longest - 2 * number * rate**number / bias_correction(b2, step)
    is_trusted = length > threshold
    # Otherwise a root of a negative number would have a derivative of NaN although it is not used.
    length = torch.where(is_trusted, length, longest + 5.0)
    ratio = ((length - 4) * (length - 2) * longest) / ((longest - 4) * (longest - 2) * length)
    return is_trusted, materialize(sqrt(torch.where(is_trusted, ratio, 1.0)))


scale_by_radam = ScaleByRadam
