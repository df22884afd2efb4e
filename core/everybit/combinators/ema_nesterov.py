"""Gradients ahead of the weights, along the average of where they went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, Rate, Slot, at, materialize, require_step, tree
from everybit.combinators.chain import zero_step
from everybit.combinators.wrapping import Wrapping
from everybit.protocol import ALONE, Context, SlotDecay, Transform, decays, enter

P = TypeVar("P")


@tree.state
class EmaNesterovState(Generic[P]):
    """The running mean of the weights' moves, how far ahead of them the parameters are, and the inner transform's state."""

    direction: Slot[P]
    ahead: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class EmaNesterov(Wrapping):
    r"""Take gradients ahead of the weights x, along the running mean m of their moves: Nesterov's step around any optimizer.

    .. math::
        x_{t+1} = A_t(x_t + \beta_t m_t) \qquad m_{t+1} = \gamma m_t + (1-\gamma)(x_{t+1} - x_t)

    The parameters are :math:`x_t + \beta_t m_t`, where gradients are taken. The inner transform is a whole optimizer :math:`A_t`, with its
    learning rate and weight decay, and is the last transform of a chain. The weights x are evaluated:
    ``optimizer.eval_params(params, state)``. There is no mode to switch, and one slot.

    Args:
        transform: The optimizer.
        lookahead: :math:`\beta_t`. The authors take 0.3 to 0.6 times the learning rate over its greatest value, and zero in the first 300
            to 1000 steps and in the last quarter or so: give a schedule. With zero it is the inner optimizer.
        decay: :math:`\gamma`, in [0, 1).

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: A hyperparameter out of range.

    Reference:
        https://arxiv.org/abs/2605.25395, as its authors' module says it (https://github.com/OptimAI-Lab/ema-nesterov-module).

    Examples:
        >>> import everybit as eb
        >>> ahead = eb.join_schedules([eb.constant_schedule(0.0), eb.constant_schedule(0.5)], [1000])
        >>> tx = eb.ema_nesterov(eb.adamw(1e-3), ahead)
    """

    transform: Transform[Any]
    lookahead: NonNegative = 0.5
    decay: Rate = 0.99

    def decays(self) -> tuple[SlotDecay, ...]:
        """``direction`` decays with ``decay``; and the inner transform's."""
        return SlotDecay("direction", self.decay), *decays(self.transform)

    def eval_params(self, params: P, state: EmaNesterovState[P]) -> P:
        """Return the parameters without the extrapolation, :math:`x_t`."""
        return tree.elementwise(lambda p, m: p - state.ahead * m, params, state.direction)

    def init(self, params: P) -> EmaNesterovState[P]:
        """Return a direction of zero, and the inner transform's state."""
        nowhere = zero_step(params).double()
        return EmaNesterovState(tree.zeros_like(params), nowhere, self.transform.init(params))

    def update(
        self, updates: P, state: EmaNesterovState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, EmaNesterovState[P]]:
        """Return the inner update, from the point of these gradients to the point of the next gradients."""
        step = require_step(ctx.step, "ema_nesterov")
        decay = at(self.decay, step, name="decay")
        ahead = at(self.lookahead, step + 1, name="lookahead")
        ahead = materialize(ahead * torch.ones_like(step, dtype=torch.float64))

        def moved(moves: P, inner: Any) -> tuple[P, EmaNesterovState[P]]:
            direction = tree.elementwise(
                lambda u, m: decay * m + (1 - decay) * (u + state.ahead * m), moves, state.direction
            )
            there = tree.elementwise(lambda u, m: u + ahead * m, moves, direction)
            return there, EmaNesterovState(direction, ahead, inner)

        return enter(self.transform, updates, state.inner, params, ctx, moved)


ema_nesterov = EmaNesterov
