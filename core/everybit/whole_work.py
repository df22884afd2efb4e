"""Transforms of whole tensors for who holds parts of them: their work is done elsewhere, and the rest of a step where the parts are.

A chain of element-wise transforms around such that must see whole tensors, as Muon is, becomes one that may be cut anywhere: it asks
``ctx.joint`` for what these make of the updates that come to them. Who steps parts brings updates together, does the work, and gives each
part its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from everybit import tree
from everybit.context import ALONE, Context
from everybit.contracts import enter
from everybit.joint_work import AtOnce
from everybit.requests import Pending
from everybit.stored_rows import StoredRows, WorkState
from everybit.transform import Elementwise, SlotDecay, Transform, any_draws, decays, eval_params, periods
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@runtime_checkable
class Rounds(Protocol):
    """A transform that rounds updates to a dtype before it does anything else, and whose own are numbers of it, but for a factor."""

    @property
    def rounds_to(self) -> torch.dtype:
        """The dtype."""
        ...

    def without_factor(self) -> tuple[Transform[Any], Transform[Any]]:
        """Return the transform whose updates are numbers of that dtype, and the one that multiplies them: both in turn are this one."""
        ...


@runtime_checkable
class OfRows(Protocol):
    """A transform of whole tensors that can be applied to some rows of an update, from the shape of the whole alone."""

    def of_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Return what becomes of the rows ``first`` and on of an update of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class WholeWork:
    """Transforms one after the other that must see whole tensors; itself no transform.

    Attributes:
        parts: Those that are run on whole tensors, in order.
        of_rows: Those that come after them, and that are run where the rows are.
        places: For each of the parts its place among the transforms that were given, by which its random bits are drawn and its state is
            found. Parts of one transform have the same, and no state.
        count: The number of transforms that were given.
    """

    parts: tuple[Transform[Any], ...]
    of_rows: tuple[OfRows, ...]
    places: tuple[int, ...]
    count: int

    @classmethod
    def of(cls, transforms: Sequence[Transform[Any]]) -> WholeWork:
        """The work of these transforms; what can be done to rows alone is left to who has them."""
        parts: list[Any] = []
        places: list[int] = []
        for place, one in enumerate(transforms):
            several = one.without_factor() if isinstance(one, Rounds) else (one,)
            parts += several
            places += [place] * len(several)
        end = len(parts)
        while end and isinstance(parts[end - 1], OfRows):
            end -= 1
        return cls(tuple(parts[:end]), tuple(parts[end:]), tuple(places[:end]), len(transforms))

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an update of this one may be brought to the work, so that no bit of the result changes."""
        return _narrower(self.parts[:1], dtype)

    def returned_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a result of this one may be brought back, so that no bit of it changes."""
        return _narrower(self.parts[-1:], dtype)

    @property
    def reads_weights(self) -> bool:
        """Whether one of the parts looks at weights."""
        return any(getattr(part, "reads_weights", True) for part in self.parts)

    def init(self, params: P) -> WorkState:
        """Return the states of the parts for whole tensors."""
        states: list[Any] = [Empty()] * self.count
        for part, place in zip(self.parts, self.places, strict=True):
            if self._is_all(place):
                states[place] = part.init(params)
        return WorkState(tuple(states))

    def run(
        self, update: Tensor, state: WorkState, ctx: Context, weights: Tensor | None = None
    ) -> tuple[Tensor, WorkState]:
        """Return what the parts make of a whole update, without those that are run on rows, and their new states.

        Args:
            update: In the compute dtype.
            state: Of the parts.
            ctx: Of the step, where the first of the parts is.
            weights: In the same shape and dtype; None: all parts promise to look at the shape alone.
        """
        weights = torch.empty_like(update, device="meta") if weights is None else weights
        # Of a whole parameter nothing is asked of others, whatever its transforms promise.
        ctx = replace(ctx, pending=False, joint=AtOnce, members=None, undeclared=())
        (*before, last) = ctx.path or (None,)
        updates, states = [update], list(state.states)
        for part, place in zip(self.parts, self.places, strict=True):
            inside = ctx if last is None else replace(ctx, path=(*before, last + place))
            is_all = self._is_all(place)
            before_part = states[place] if is_all else part.init(updates)
            updates, held = enter(part, updates, before_part, [weights], inside, lambda *pair: pair)
            if is_all:
                states[place] = held
        return updates[0], WorkState(tuple(states))

    def _is_all(self, place: int) -> bool:
        """Whether one part is all that is done at a place, so that it may keep state."""
        return self.places.count(place) == 1

    def on_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Return what the rest makes of the rows ``first`` and on of a result of this shape."""
        for part in self.of_rows:
            rows = part.of_rows(rows, shape, first)
        return rows


def _narrower(part: Sequence[Transform[Any]], dtype: torch.dtype) -> torch.dtype:
    for one in part:
        if isinstance(one, Rounds) and torch.promote_types(one.rounds_to, dtype) is dtype:
            return one.rounds_to
    return dtype


@dataclass(frozen=True, slots=True)
class Errand:
    """Work that parts of tensors ask for.

    Attributes:
        work: The work.
        ctx: Of the step.
    """

    work: WholeWork
    ctx: Context

    def __call__(self, batch: Tensor) -> Tensor:
        """Refuse to work on a part, as who knows of no parts would.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{', '.join(type(part).__name__ for part in self.work.parts)}: got {tuple(batch.shape)}, a part of a tensor; accepted are"
            " whole ones, brought together by who asks for the work."
        )


@dataclass(frozen=True, slots=True)
class OnWholes(Elementwise):
    """Asks for the work of transforms that must see whole tensors, of parts of which it gets updates.

    It shows the parts of the updates, and after them those of the weights, if the work looks at them. The answer is the parts of the
    results, and after them the rows of the new state, in order. Where nobody answers, updates pass as they are: in a run for reductions, on
    which the work has no influence.

    Attributes:
        work: Of these transforms.
    """

    work: WholeWork

    @property
    def draws(self) -> bool:
        """Whether one of the transforms does."""
        return any_draws(self.work.parts)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the decay rates that the transforms declare."""
        return decays(*self.work.parts)

    def periods(self) -> tuple[int, ...]:
        """Return the periods that the transforms declare."""
        return periods(*self.work.parts)

    def init(self, params: P) -> WorkState:
        """Return the states of the transforms, with no rows in their slots yet."""

        def no_rows(_name: str, _slot: Any) -> Any:
            return tree.map(lambda _: StoredRows(), params)

        return tree.map_slots(no_rows, self.work.init(tree.map(_without_elements, params)))

    def update(self, updates: P, state: WorkState, params: P, ctx: Context = ALONE) -> tuple[P, WorkState]:
        """Return the parts of the results, and the rows of the new state."""
        if ctx.joint is AtOnce:
            return updates, state
        given = tree.leaves(updates)
        weights = tree.leaves(params) if self.work.reads_weights else []
        found = ctx.joint.results([*given, *weights], Errand(self.work, ctx))
        rows = iter(found[len(given) :])
        counted = self._counted(state, params, ctx)
        state = tree.map_nodes(lambda held: tree.map(lambda _: next(rows), held), StoredRows, counted)
        return tree.replace(updates, found[: len(given)]), state

    def _counted(self, state: WorkState, params: Any, ctx: Context) -> WorkState:
        """The state with the next counts, which every process keeps: no count depends on what is computed of elements."""
        if not tree.leaves(_without_slots(state)):
            return state
        none = tree.leaves(tree.map(_without_elements, params))[:1]
        begun = self.work.init(none)
        _, after = self.work.run(none[0], with_counts(begun, state), ctx, none[0])
        return with_counts(state, after)


def with_counts(state: WorkState, other: WorkState) -> WorkState:
    """A state with the counts of another one of the same transforms; slots stay."""
    kept = iter(slots_in(state))
    counted = tree.replace(_without_slots(state), tree.leaves(_without_slots(other)))
    return tree.map_slots(lambda *_: next(kept), counted)


def _without_slots(state: WorkState) -> WorkState:
    return tree.map_slots(lambda *_: None, state)


def _without_elements(x: Tensor) -> Tensor:
    # A matrix: what refuses other shapes takes it.
    return x.new_empty((0, 0))


def why_not_elsewhere(transform: Transform[Any], shape: Sequence[int]) -> str | None:
    """Why the work of a transform cannot be done elsewhere, for parameters of this shape; None: it can."""
    like = [torch.empty(tuple(shape), device="meta")]
    if eval_params(transform, like, transform.init(like))[0] is not like[0]:
        return "it has other weights for evaluation"
    return "it reduces over parameters" if transform.reduces and _asks_the_axis(transform, like) else None


def _asks_the_axis(transform: Transform[Any], like: list[Tensor]) -> bool:
    """Whether a transform that reduces does so over several parameters, and not only over each, which is here as a whole."""
    step = torch.ones((), dtype=torch.int64, device="meta")
    due = tuple((period, True) for period in periods(transform))
    ctx = Context(pending=True, step=step, updates=step, due=due)
    return isinstance(transform.update(like, transform.init(like), like, ctx), Pending)


def slots_in(state: Any) -> list[Any]:
    """What the slots of a state hold, in order."""
    found: list[Any] = []
    tree.map_slots(lambda _name, slot: found.append(slot), state)
    return found
