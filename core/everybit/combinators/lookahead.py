"""Weights that follow slowly: k steps forward, one step back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from everybit.base import Share, Slot, Updates, at, materialize, require_step, tree
from everybit.combinators.wrapping import Wrapping
from everybit.protocol import ALONE, Context, SlotDecay, Transform, decays, enter

P = TypeVar("P")


@tree.state
class LookaheadState(Generic[P]):
    """The slow weights, and the inner transform's state."""

    slow: Slot[P]
    inner: Any


@dataclass(frozen=True, slots=True)
class Lookahead(Wrapping):
    r"""Keep slow weights. After every ``period`` updates, move them towards the trained weights and continue from there.

    .. math::
        \phi \leftarrow \phi + \alpha (\theta - \phi) \qquad \theta \leftarrow \phi \qquad \text{at the updates } k, 2k, \dots

    The inner transform is a whole optimizer, with its learning rate, and is last in a chain. Its momentum is kept when weights are set back
    (the authors' ``pullback_momentum="none"``; optax's ``reset_state=False``). The slow weights are evaluated:
    ``optimizer.eval_params(params, state)``.

    Args:
        transform: The fast optimizer.
        period: :math:`k`, updates between two synchronizations, at least 1.
        share: :math:`\alpha`, in [0, 1].

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: ``period`` or ``share`` out of range.

    Reference:
        Zhang et al. 2019, https://arxiv.org/abs/1907.08610, Algorithm 1.

    Examples:
        >>> import everybit as eb
        >>> optimizer = eb.with_policy(eb.lookahead(eb.adamw(1e-3), period=5, share=0.5), eb.policies.FP32)
    """

    transform: Transform[Any]
    period: Updates = 5
    share: Share = 0.5

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the inner transform's decay rates, and that of ``slow``, which moves by ``share`` when it moves."""
        number = isinstance(self.share, (int, float))
        return SlotDecay("slow", 1.0 - float(self.share) if number else 1.0), *decays(self.transform)  # type: ignore[arg-type]

    def eval_params(self, params: P, state: LookaheadState[P]) -> P:  # noqa: ARG002  # the slow weights stand for them
        """Return the slow weights."""
        return state.slow

    def init(self, params: P) -> LookaheadState[P]:
        """Return the weights as slow weights, and the inner transform's state."""
        return LookaheadState(tree.map(torch.clone, params), self.transform.init(params))

    def update(
        self, updates: P, state: LookaheadState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, LookaheadState[P]]:
        """The inner update, or at a synchronization what leads to the new slow weights."""
        step = require_step(ctx.step, "lookahead")

        def synchronized(moves: P, inner: Any) -> tuple[P, LookaheadState[P]]:
            due = step % self.period == 0
            # A product with a float64 one: torch.where makes float32 of two numbers.
            share = at(self.share, step, name="share") * torch.ones_like(step, dtype=torch.float64)
            share = materialize(torch.where(due, share, 0.0))
            slow = tree.elementwise(lambda s, p, u: s + share * ((p + u) - s), state.slow, params, moves)
            back = tree.elementwise(lambda u, p, s: torch.where(due, s - p, u), moves, params, slow)
            return back, LookaheadState(slow, inner)

        return enter(self.transform, updates, state.inner, params, ctx, synchronized)


lookahead = Lookahead
