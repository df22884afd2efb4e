"""No update from a gradient that is not a number, or much too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit.base import CountFromZero, FixedNonNegative, tree
from everybit.combinators.chain import zero_step
from everybit.combinators.wrapping import Wrapping, gated
from everybit.protocol import ALONE, Context, Max, SumOfSquares, Transform

P = TypeVar("P")


@tree.state
class ApplyIfFiniteState:
    """Counters, int64 and 0-d: ``step`` updates made, ``skipped`` in all, ``consecutive`` skipped since the last one made."""

    step: Tensor
    skipped: Tensor
    consecutive: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class ApplyIfFinite(Wrapping):
    """Skip a step with gradients that are infinite or NaN: the update is zero and the inner state stays as it was.

    All shards agree. The decision is made on the device; the host never waits. Look at ``state.skipped``
    when it suits you.

    Args:
        transform: What finite gradients go through.
        max_consecutive: After so many skipped in a row the update is let through, so that a run that has broken is seen to be broken.
            None: skip forever.
    """

    transform: Transform[Any]
    max_consecutive: CountFromZero | None = None

    @property
    def reduces(self) -> bool:
        """True, since one element that is not finite stops the step of all."""
        return True

    def init(self, params: P) -> ApplyIfFiniteState:
        """Return the inner transform's state, and counters of zero skipped updates."""
        return ApplyIfFiniteState(zero_step(params), zero_step(params), zero_step(params), self.transform.init(params))

    def update(
        self, updates: P, state: ApplyIfFiniteState, params: P, ctx: Context = ALONE
    ) -> tuple[P, ApplyIfFiniteState]:
        """The inner update, or zero."""

        def judged(bad: Tensor) -> tuple[P, ApplyIfFiniteState]:
            apply = bad == 0
            consecutive = torch.where(apply, 0, state.consecutive + 1)
            if self.max_consecutive is not None:
                apply = apply | (consecutive > self.max_consecutive)

            def after(moves: P, inner: Any) -> tuple[P, ApplyIfFiniteState]:
                return moves, ApplyIfFiniteState(state.step + apply, state.skipped + ~apply, consecutive, inner)

            return gated(apply, self.transform, updates, state.inner, params, ctx.counted(state.step + 1), after)

        return ctx.request(Max((~tree.all_finite(updates)).long()), judged)


apply_if_finite = ApplyIfFinite


@tree.state
class SkipLargeUpdatesState:
    """Counters, int64 and 0-d: ``step`` updates made, ``skipped`` in all."""

    step: Tensor
    skipped: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class SkipLargeUpdates(Wrapping):
    """Skip a step if the joint norm of its gradients reaches a limit: the update is zero and the inner state stays as it was.

    A norm that is NaN is not below it either. As optax's ``skip_large_updates``, which names the square of the limit. All shards agree, and
    the host never waits; look at ``state.skipped`` when it suits you.

    Args:
        transform: The transform that other gradients go through.
        limit: Norm, above zero; unit of the gradient.

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: ``limit`` out of range.
    """

    transform: Transform[Any]
    limit: FixedNonNegative

    @property
    def reduces(self) -> bool:
        """True: the norm is over all gradients."""
        return True

    def init(self, params: P) -> SkipLargeUpdatesState:
        """Return the inner transform's state, and counters of zero."""
        return SkipLargeUpdatesState(zero_step(params), zero_step(params), self.transform.init(params))

    def update(
        self, updates: P, state: SkipLargeUpdatesState, params: P, ctx: Context = ALONE
    ) -> tuple[P, SkipLargeUpdatesState]:
        """The inner update, or zero."""

        def judged(square: Tensor) -> tuple[P, SkipLargeUpdatesState]:
            apply = square < self.limit * self.limit

            def after(moves: P, inner: Any) -> tuple[P, SkipLargeUpdatesState]:
                return moves, SkipLargeUpdatesState(state.step + apply, state.skipped + ~apply, inner)

            return gated(apply, self.transform, updates, state.inner, params, ctx.counted(state.step + 1), after)

        return ctx.request(SumOfSquares(updates), judged)


skip_large_updates = SkipLargeUpdates
