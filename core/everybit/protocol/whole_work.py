"""Transforms that need whole tensors, in processes that hold rows of them.

Muon's iteration needs whole matrices; its momentum, weight decay and learning rate do not. A process that holds rows of a matrix steps it
with the transform in which each part that needs whole tensors is an :class:`AtOwner`. Such a part requests the result of the whole
(:class:`Whole`). A driver gathers the rows of the updates on the parameter's owner, runs :class:`WholeWork` there, and gives each process
its rows of the result. Neighbours in a chain make one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from everybit.base import tree
from everybit.protocol.context import ALONE, Context
from everybit.protocol.contracts import enter
from everybit.protocol.requests import Pending, Request
from everybit.protocol.stored_rows import StoredRows, slots_in, with_slots
from everybit.protocol.transform import Elementwise, SlotDecay, Transform, any_draws, decays, eval_params, periods

P = TypeVar("P")
R = TypeVar("R")


@runtime_checkable
class Rounds(Protocol):
    """A transform that first rounds updates to a dtype, and whose results are numbers of that dtype, but for a factor."""

    @property
    def rounds_to(self) -> torch.dtype:
        """The dtype."""
        ...

    def without_factor(self) -> tuple[Transform[Any], Transform[Any]]:
        """Return the transform without the factor, and the transform that multiplies by it: their composition is this one."""
        ...


@runtime_checkable
class OfRows(Protocol):
    """A transform of whole tensors that can be applied to some rows of an update, from the shape of the whole alone."""

    def of_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Return the results for the rows ``first`` and on of an update of this shape."""
        ...


@dataclass(frozen=True)
class WholeWork:
    """Transforms, one after the other, that need whole tensors; itself no transform.

    Attributes:
        transforms: All of them, in order.
        parts: Those that run on whole tensors; a transform that rounds is two of them.
        of_rows: Those after them, which run where the rows are.
        places: For each part the index of its transform.
    """

    transforms: tuple[Transform[Any], ...]
    parts: tuple[Transform[Any], ...] = field(init=False)
    of_rows: tuple[OfRows, ...] = field(init=False)
    places: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        parts: list[Any] = []
        places: list[int] = []
        for place, one in enumerate(self.transforms):
            several = one.without_factor() if isinstance(one, Rounds) else (one,)
            parts += several
            places += [place] * len(several)
        end = len(parts)
        while end and isinstance(parts[end - 1], OfRows):
            end -= 1
        object.__setattr__(self, "parts", tuple(parts[:end]))
        object.__setattr__(self, "of_rows", tuple(parts[end:]))
        object.__setattr__(self, "places", tuple(places[:end]))

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """The narrowest dtype in which an update of ``dtype`` can be sent to the owner without a change of the result."""
        return _narrower(self.parts[:1], dtype)

    def returned_as(self, dtype: torch.dtype) -> torch.dtype:
        """The narrowest dtype that holds results of ``dtype`` exactly."""
        return _narrower(self.parts[-1:], dtype)

    @property
    def reads_weights(self) -> bool:
        """Whether a part reads weights."""
        return any(getattr(part, "reads_weights", True) for part in self.parts)

    def init(self, params: P) -> tuple[Any, ...]:
        """Return the states of the transforms for whole tensors."""
        return tuple(one.init(params) for one in self.transforms)

    def run(
        self, update: Tensor, states: Sequence[Any], ctx: Context, weights: Tensor | None = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Apply the parts to a whole update; return the result before :meth:`on_rows`, and the new states of the transforms.

        Args:
            update: In the compute dtype.
            states: Of the transforms.
            ctx: Of the step, at the first of the transforms.
            weights: In the same shape and dtype; None: no part reads weights.
        """
        weights = torch.empty_like(update, device="meta") if weights is None else weights
        # A whole parameter needs no reduction over ranks: all of it is here.
        ctx = replace(ctx, pending=False, joint=False, members=None, undeclared=())
        (*before, last) = ctx.path or (None,)
        updates, after = [update], list(states)
        for part, place in zip(self.parts, self.places, strict=True):
            inside = ctx if last is None else replace(ctx, path=(*before, last + place))
            alone = self.places.count(place) == 1  # the halves of a transform that rounds keep no state
            held = states[place] if alone else part.init(updates)
            updates, held = enter(part, updates, held, [weights], inside, lambda *pair: pair)
            if alone:
                after[place] = held
        return updates[0], tuple(after)

    def on_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Apply the rest to the rows ``first`` and on of a result of this shape."""
        for part in self.of_rows:
            rows = part.of_rows(rows, shape, first)
        return rows


def _narrower(part: Sequence[Transform[Any]], dtype: torch.dtype) -> torch.dtype:
    for one in part:
        if isinstance(one, Rounds) and torch.promote_types(one.rounds_to, dtype) is dtype:
            return one.rounds_to
    return dtype


@dataclass(frozen=True)
class Whole(Request[list[Tensor]]):
    """The results of transforms for whole tensors, of which this process holds rows.

    The answer is the rows of the results, and after them the rows of the stored state of the transforms, slot by slot, in order.

    Attributes:
        transforms: In order; each is an :class:`AtOwner`.
        updates: The rows of the updates.
        states: Of the transforms, with :class:`~everybit.protocol.stored_rows.StoredRows` in their slots.
        params: The rows of the weights.
        ctx: Of the step, at the first of the transforms.
    """

    joint: ClassVar[bool] = True
    transforms: tuple[AtOwner, ...]
    updates: Any
    states: tuple[Any, ...]
    params: Any
    ctx: Context

    def here(self) -> NoReturn:
        """Refuse to work on rows.

        Raises:
            RuntimeError: Always.
        """
        shape = tuple(tree.leaves(self.updates)[0].shape)
        names = ", ".join(type(part).__name__ for one in self.transforms for part in one.work.parts)
        raise RuntimeError(
            f"{names}: got {shape}, a part of a tensor; accepted are whole ones, gathered by the driver of the step."
        )


@dataclass(frozen=True, slots=True)
class AtOwner(Elementwise):
    """A transform that runs on whole tensors at their owner, where this process holds rows.

    Without a driver that does joint work updates pass unchanged: in a run for reductions, none of which comes after it.

    Attributes:
        work: The transform, alone.
    """

    work: WholeWork

    @property
    def draws(self) -> bool:
        """Whether the transform does."""
        return any_draws(self.work.parts)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the decay rates that the transform declares."""
        return decays(*self.work.parts)

    def periods(self) -> tuple[int, ...]:
        """Return the periods that the transform declares."""
        return periods(*self.work.parts)

    def init(self, params: P) -> Any:
        """Return the state of the transform, with no rows in its slots yet. It is made from a matrix without elements."""
        (state,) = self.work.init(tree.map(_without_elements, params))
        return with_slots(state, [tree.map(lambda _: StoredRows(), params) for _ in slots_in(state)])

    def update(self, updates: P, state: Any, params: P, ctx: Context = ALONE) -> tuple[P, Any]:
        """Return the rows of the results, and the rows of the new state."""
        return requested((self,), updates, (state,), params, ctx, lambda updates, states: (updates, states[0]))

    def counted(self, state: Any, params: Any, ctx: Context) -> Any:
        """A state with the counts after the step. Every process advances them, on a matrix without elements: they depend on none."""
        if not tree.leaves(tree.map_slots(lambda *_: None, state)):
            return state
        none = [_without_elements(x) for x in tree.leaves(params)[:1]]
        (begun,) = self.work.init(none)
        before = with_slots(state, slots_in(begun))
        _, (after,) = self.work.run(none[0], (before,), ctx, none[0])
        return with_slots(after, slots_in(state))


def requested(
    transforms: tuple[AtOwner, ...],
    updates: P,
    states: tuple[Any, ...],
    params: P,
    ctx: Context,
    after: Callable[[P, tuple[Any, ...]], R],
) -> R:
    """Request the results of neighbours in a chain, and go on with ``after(updates, states)``.

    Args:
        transforms: The neighbours.
        updates: Rows of updates.
        states: Of the transforms.
        params: Rows of weights.
        ctx: Of the first of them.
        after: The rest of the step.
    """
    if not ctx.joint:
        return after(updates, states)

    def resumed(found: list[Tensor]) -> R:
        count = len(tree.leaves(updates))
        rows = iter(found[count:])
        new = [
            tree.map_nodes(
                lambda held: tree.map(lambda _: next(rows), held), StoredRows, one.counted(state, params, ctx)
            )
            for one, state in zip(transforms, states, strict=True)
        ]
        return after(tree.replace(updates, found[:count]), tuple(new))

    return ctx.request(Whole(transforms, updates, states, params, ctx), resumed)


def _without_elements(x: Tensor) -> Tensor:
    # A matrix: what refuses other shapes takes it.
    return x.new_empty((0, 0))


def why_not_elsewhere(transform: Transform[Any], shape: Sequence[int]) -> str | None:
    """The reason for which a transform cannot run at the owner of a parameter of this shape; None: it can."""
    like = [torch.empty(tuple(shape), device="meta")]
    if eval_params(transform, like, transform.init(like))[0] is not like[0]:
        return "it has other weights for evaluation"
    return "it reduces over parameters" if transform.reduces and _reduces_over_parameters(transform, like) else None


def _reduces_over_parameters(transform: Transform[Any], like: list[Tensor]) -> bool:
    """Whether a transform reduces over several parameters, and not only over each, which its owner has as a whole."""
    step = torch.ones((), dtype=torch.int64, device="meta")
    due = tuple((period, True) for period in periods(transform))
    ctx = Context(pending=True, step=step, updates=step, due=due)
    return isinstance(transform.update(like, transform.init(like), like, ctx), Pending)
