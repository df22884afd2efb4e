"""The preconditioner of Adam, and of its variants."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Slot,
    at,
    bias_correction,
    is_zero,
    materialize,
    require,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")

Amsgrad = bool | Literal["corrected"]
"""Whether Adam divides by the greatest running square so far, and whether that is taken after the bias is corrected."""


@tree.state
@dataclass(frozen=True, slots=True)
class AdamState(Generic[P]):
    """Running means of the gradient and of its square, with the shapes of the parameters."""

    momentum: Slot[P]
    variance: Slot[P]


@tree.state
@dataclass(frozen=True, slots=True)
class AmsgradState(Generic[P]):
    """Adam's moments, and the greatest running square so far."""

    momentum: Slot[P]
    variance: Slot[P]
    max_variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdam(Elementwise):
    r"""Divide the gradient's running mean by the root of its running square.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t) + \epsilon_\text{root}} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root, as in the paper and torch; same unit as the gradient.
        eps_root: Added inside the root, as a derivative through the step needs at zero gradients; unit of the gradient squared.
        amsgrad: Divide by the root of the greatest running square so far (Reddi et al. 2018, https://openreview.net/forum?id=ryQu7f-RZ).
            True: by that of :math:`\max_{s \le t} v_s` in the place of :math:`v_t`, with its bias corrected afterwards, as in torch.
            ``"corrected"``: of :math:`\max_{s \le t} v_s / (1-\beta_2^s)`, as in optax.
        eps_before_correction: Add ``eps`` to :math:`\sqrt{v_t}` and correct the bias afterwards: the paper's :math:`\hat\epsilon`, as
            in Keras and in GaLore.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; ``eps_before_correction`` with ``amsgrad="corrected"``.

    Reference:
        Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, Algorithm 1.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8
    eps_root: Hyperparameter = 0.0
    _: KW_ONLY
    amsgrad: Amsgrad = False
    eps_before_correction: bool = False

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("eps_root", self.eps_root, 0.0)
        if not isinstance(self.amsgrad, bool) and self.amsgrad != "corrected":
            raise ValueError(f"amsgrad: got {self.amsgrad!r}; accepted are True, False and 'corrected'.")
        if self.eps_before_correction and self.amsgrad == "corrected":
            raise ValueError("eps_before_correction: got True with amsgrad='corrected'; accepted with it is False.")

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``; ``max_variance``, if there is one, is replaced by greater numbers."""
        moments = SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)
        return (*moments, SlotDecay("max_variance", 0.0, squares=True)) if self.amsgrad else moments

    def init(self, params: P) -> AdamState[P] | AmsgradState[P]:
        """Return moments of zero for all parameters."""
        if self.amsgrad:
            return AmsgradState(tree.zeros_like(params), tree.zeros_like(params), tree.zeros_like(params))
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def update(
        self, updates: P, state: AdamState[Any] | AmsgradState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdamState[P] | AmsgradState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_adam")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, eps_root = at(self.eps, step, name="eps"), at(self.eps_root, step, name="eps_root")
        unbias_mean, unbias_square = (
            materialize(1 / bias_correction(b1, step)),
            materialize(1 / bias_correction(b2, step)),
        )
        unbias_both = (
            materialize(sqrt(bias_correction(b2, step)) / bias_correction(b1, step))
            if self.eps_before_correction
            else unbias_mean
        )

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)

        def direction(m: Tensor, square: Tensor) -> Tensor:
            return (m * unbias_mean) / (sqrt(square if is_zero(eps_root) else square + eps_root) + eps)

        def corrected(m: Tensor, v: Tensor) -> Tensor:
            if self.eps_before_correction:
                return m / (sqrt(v if is_zero(eps_root) else v + eps_root) + eps) * unbias_both
            return direction(m, v * unbias_square)

        if not isinstance(state, AmsgradState):
            return tree.elementwise(corrected, momentum, variance), AdamState(momentum, variance)
        if self.amsgrad == "corrected":
            greatest = tree.elementwise(lambda v, w: torch.maximum(v * unbias_square, w), variance, state.max_variance)
            return tree.elementwise(direction, momentum, greatest), AmsgradState(momentum, variance, greatest)
        greatest = tree.elementwise(torch.maximum, variance, state.max_variance)
        return tree.elementwise(corrected, momentum, greatest), AmsgradState(momentum, variance, greatest)


scale_by_adam = ScaleByAdam
