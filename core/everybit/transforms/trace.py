"""Momentum: a decaying sum of updates."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from everybit.base import Hyperparameter, Slot, at, is_zero, materialize, require, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class TraceState(Generic[P]):
    """The decaying sum, which torch calls ``momentum_buffer``."""

    momentum: Slot[P]


@dataclass(frozen=True, slots=True)
class Trace(Elementwise):
    r"""Heavy-ball or Nesterov momentum, with torch's meaning of its terms.

    .. math::
        m_1 = g_1 \qquad m_t = \mu m_{t-1} + (1-\tau) g_t \qquad
        u_t = \begin{cases} g_t + \mu m_t & \text{Nesterov} \\ m_t & \text{else} \end{cases}

    Args:
        decay: :math:`\mu`, in [0, 1].
        dampening: :math:`\tau`, in [0, 1]; as in torch, not applied to the first gradient.
        nesterov: Look ahead; needs zero dampening.

    Raises:
        ValueError: A hyperparameter out of range, or Nesterov with dampening.

    Reference:
        Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html, as in ``torch.optim.SGD``.
    """

    reads_weights: ClassVar[bool] = False
    decay: Hyperparameter = 0.9
    _: KW_ONLY
    dampening: Hyperparameter = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0)
        require("dampening", self.dampening, 0.0, 1.0)
        # A tensor's value is not looked at: it may live on a device.
        if self.nesterov and isinstance(self.dampening, (int, float)) and self.dampening != 0:
            raise ValueError(
                f"dampening: got {self.dampening!r} with nesterov=True; Nesterov momentum needs dampening=0."
            )

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``momentum`` decays with ``decay``."""
        return (SlotDecay("momentum", self.decay),)

    def init(self, params: P) -> TraceState[P]:
        """Return a momentum of zero."""
        return TraceState(tree.zeros_like(params))

    def update(self, updates: P, state: TraceState[Any], params: P, ctx: Context = ALONE) -> tuple[P, TraceState[P]]:
        """Add the gradient to the decayed sum."""
        decay = at(self.decay, ctx.step, name="decay")
        dampening = at(self.dampening, ctx.step, name="dampening")
        if is_zero(dampening):
            momentum = tree.elementwise(lambda g, m: decay * m + g, updates, state.momentum)
        else:
            step = require_step(ctx.step, "trace with dampening")
            gain = materialize(
                torch.where(step == 1, 1.0, (1 - dampening) * torch.ones_like(step, dtype=torch.float64))
            )
            momentum = tree.elementwise(lambda g, m: decay * m + gain * g, updates, state.momentum)
        if self.nesterov:
            return tree.elementwise(lambda g, m: g + decay * m, updates, momentum), TraceState(momentum)
        return momentum, TraceState(momentum)


trace = Trace
