"""No update from a gradient that is not a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit import tree
from everybit.combinators.chain import zero_step
from everybit.context import ALONE, Context
from everybit.contracts import updated
from everybit.transform import (
    Cut,
    SlotDecay,
    Transform,
    any_draws,
    any_per_tensor,
    decays,
    eval_params,
    periods,
    require_transform,
)

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class ApplyIfFiniteState:
    """Counters, int64 and 0-d: ``step`` updates made, ``skipped`` in all, ``consecutive`` skipped since the last one made."""

    step: Tensor
    skipped: Tensor
    consecutive: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class ApplyIfFinite:
    """Skip a step whose gradients hold an infinity or NaN: the update is zero and the inner state stays as it was.

    All shards agree, through ``ctx.axis``. The decision is made on the device; the host never waits. Look at ``state.skipped``
    when it suits you.

    Args:
        transform: What finite gradients go through.
        max_consecutive: After so many skipped in a row the update is let through, so that a run that has broken is seen to be broken.
            None: skip forever.
    """

    transform: Transform[Any]
    max_consecutive: int | None = None

    def __post_init__(self) -> None:
        require_transform(self.transform, who="apply_if_finite")
        limit = self.max_consecutive
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ValueError(f"max_consecutive: got {limit!r}; accepted is a whole number, at least 0, or None.")

    @property
    def cut(self) -> Cut:
        """How finely parameters may be cut: as those of the inner transform."""
        return self.transform.cut

    @property
    def reduces(self) -> bool:
        """True, since one element that is not finite stops the step of all."""
        return True

    @property
    def per_tensor(self) -> bool:
        """Whether the inner transform reduces over each parameter."""
        return any_per_tensor([self.transform])

    @property
    def draws(self) -> bool:
        """Whether the inner transform does."""
        return any_draws([self.transform])

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the decay rates that the inner transform declares."""
        return decays(self.transform)

    def periods(self) -> tuple[int, ...]:
        """Return the periods that the inner transform declares."""
        return periods(self.transform)

    def eval_params(self, params: P, state: ApplyIfFiniteState) -> P:
        """Return the inner transform's weights for evaluation."""
        return eval_params(self.transform, params, state.inner)

    def init(self, params: P) -> ApplyIfFiniteState:
        """Return the inner transform's state, and counters of zero skipped updates."""
        return ApplyIfFiniteState(zero_step(params), zero_step(params), zero_step(params), self.transform.init(params))

    def update(
        self, updates: P, state: ApplyIfFiniteState, params: P, ctx: Context = ALONE
    ) -> tuple[P, ApplyIfFiniteState]:
        """The inner update, or zero."""
        bad = ctx.axis.max((~tree.all_finite(updates)).long())
        apply = bad == 0
        consecutive = torch.where(apply, 0, state.consecutive + 1)
        if self.max_consecutive is not None:
            apply = apply | (consecutive > self.max_consecutive)
        inner_updates, inner = updated(self.transform, updates, state.inner, params, ctx.counted(state.step + 1))
        chosen = tree.where(apply, inner_updates, tree.zeros_like(updates))
        return chosen, ApplyIfFiniteState(
            state.step + apply, state.skipped + ~apply, consecutive, tree.where(apply, inner, state.inner)
        )


apply_if_finite = ApplyIfFinite
