"""The preconditioner of RMSprop, centered or not."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, require, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class RmsState(Generic[P]):
    """The running square of the gradient."""

    variance: Slot[P]


@tree.state
@dataclass(frozen=True, slots=True)
class CenteredRmsState(Generic[P]):
    """The running square of the gradient, and its running mean."""

    variance: Slot[P]
    mean: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByRms(Elementwise):
    r"""Divide the gradient by the root of its running square, or of its running variance if centred.

    .. math::
        v_t = \alpha v_{t-1} + (1-\alpha) g_t^2 \qquad
        u_t = \frac{g_t}{\sqrt{v_t - \bar g_t^2} + \epsilon} \qquad
        \bar g_t = \begin{cases} \alpha \bar g_{t-1} + (1-\alpha) g_t & \text{centred} \\ 0 & \text{else} \end{cases}

    Args:
        decay: :math:`\alpha`, in [0, 1).
        eps: Same unit as the gradient if outside the root, else its square.
        centered: Subtract the square of the mean (Graves 2013).
        eps_inside_root: Add ``eps`` inside the root, as optax does; torch adds it outside.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Hinton 2012, lecture 6e; Graves 2013, https://arxiv.org/abs/1308.0850, eq. 38-45; ``torch.optim.RMSprop``.
    """

    reads_weights: ClassVar[bool] = False
    decay: Hyperparameter = 0.99
    eps: Hyperparameter = 1e-8
    _: KW_ONLY
    centered: bool = False
    eps_inside_root: bool = False

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``variance`` decays with ``decay``, and so does ``mean``, if there is one."""
        variance = SlotDecay("variance", self.decay, squares=True)
        return (variance, SlotDecay("mean", self.decay)) if self.centered else (variance,)

    def init(self, params: P) -> RmsState[P] | CenteredRmsState[P]:
        """Return moments of zero for all parameters."""
        if self.centered:
            return CenteredRmsState(tree.zeros_like(params), tree.zeros_like(params))
        return RmsState(tree.zeros_like(params))

    def update(
        self, updates: P, state: RmsState[Any] | CenteredRmsState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, RmsState[P] | CenteredRmsState[P]]:
        """Update the moments, and divide by them."""
        decay, eps = at(self.decay, ctx.step, name="decay"), at(self.eps, ctx.step, name="eps")
        variance = tree.elementwise(lambda g, v: decay * v + (1 - decay) * (g * g), updates, state.variance)

        def over_root(g: Tensor, square: Tensor) -> Tensor:
            return g / sqrt(square + eps) if self.eps_inside_root else g / (sqrt(square) + eps)

        if not isinstance(state, CenteredRmsState):
            return tree.elementwise(over_root, updates, variance), RmsState(variance)
        mean = tree.elementwise(lambda g, a: decay * a + (1 - decay) * g, updates, state.mean)
        # The difference of two nearly equal numbers, each rounded: it may fall below zero, where there is no root.
        centred = tree.elementwise(lambda v, a: (v - a * a).clamp(min=0.0), variance, mean)
        return tree.elementwise(over_root, updates, centred), CenteredRmsState(variance, mean)


scale_by_rms = ScaleByRms
