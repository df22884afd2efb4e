"""Records which reductions a transform asks of its axis, and from which inputs it computes each of them.

It is found by running the transform on tensors without elements. Of transforms of this library it is known after their first step, since
it never changes: they are run no more for reductions that need no run, such as the norm of the gradients, nor to hear that they ask for
nothing further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import everybit as eb
from everybit.barriers import sum_of_squares
from everybit.blocks import FirstElement
from everybit.combinators.chain import Chain, NamedChain
from everybit.hyperparameters import hyperparameters
from everybit.optimizer import OptimizerState
from everybit.parts import map_parts, needs_whole_tensors, transforms_in
from everybit.replay import NeedsReductionError, Pending, RecordingAxis, ReplayAxis
from everybit.transform import decays, periods
from everybit_torch.direct_calls import is_settled
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of, no_members_of
from everybit_torch.units import Unit, map_state

P = TypeVar("P")

WEIGHTS = "params"
"""The name of the weights among the inputs of a reduction; the others go by the names of their slots."""


class Source(NamedTuple):
    """The inputs from which a transform computes a reduction.

    Attributes:
        names: Of slots, and maybe :data:`WEIGHTS`.
        gradient_norm: Whether the partial result is the sum of the squares of the gradients as they came: that needs no run of the
            transform, and no wider copy of the gradients.
        pending: Whether there is such a reduction: False if the transform asked for no more than was answered.
    """

    names: frozenset[str]
    gradient_norm: bool
    pending: bool


class _Promises(NamedTuple):
    """The reductions that a transform asks for at every step.

    Attributes:
        fixed: Whether its reductions are always the same ones.
        whole: Whether it must see whole tensors.
        in_periodic_work: Whether it may ask for reductions inside of periodic work.
    """

    fixed: bool
    whole: bool
    in_periodic_work: bool


class _Known(NamedTuple):
    """A reduction of which the source is known: its optimizer, what else has the same reductions, which work is due, and its number."""

    optimizer: eb.Optimizer[Any]
    leading: eb.Transform[Any] | None
    due: Due
    asked: int
    source: Source


class Reads:
    """The inputs of transforms' reductions, found once for each reduction and for each set of due periodic work.

    It is found by running the transform on tensors without elements, and recording which tensors are computed from which.
    """

    def __init__(self) -> None:
        self._promises: list[tuple[eb.Optimizer[Any], _Promises]] = []
        self._known: list[_Known] = []

    def promises(self, optimizer: eb.Optimizer[Any], unit: Unit) -> _Promises:
        """Return what the steps of an optimizer have in common.

        It may ask for reductions inside of periodic work if it asks for another number of them where nothing is decided, which does all
        work, than where everything is due, or where nothing is. One that must see whole tensors is not asked, and may.
        """
        for known, promises in self._promises:
            if known is optimizer:
                return promises
        whole, all_periods = needs_whole_tensors(optimizer.transform), periods(optimizer.transform)
        answers: list[Due] = [(), *(tuple((period, due) for period in all_periods) for due in (True, False))]
        promises = _Promises(
            has_fixed_reductions(optimizer.transform),
            whole,
            bool(all_periods)
            and (whole or len({_count_reductions(optimizer, unit, answer) for answer in answers}) > 1),
        )
        # Optimizers are made anew when hyperparameters change; the present ones stay.
        self._promises = [*self._promises[-15:], (optimizer, promises)]
        return promises

    def of(self, optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due = ()) -> Source:
        """Return the source of the pending reduction, which comes after those that ``totals`` answer."""
        asked = len(totals)
        for known in self._known:
            if known.optimizer is optimizer and known.due == due and known.asked == asked:
                return known.source
        leading = _leading(optimizer.transform)
        settled = leading if is_settled(leading) else None
        alike = (
            known.source
            for known in self._known
            if settled and known.leading == settled and known.due == due and known.asked == asked
        )
        source = next(alike, None) or self._find(optimizer, unit, totals, due)
        self._known = [*self._known[-63:], _Known(optimizer, settled, due, asked, source)]
        return source

    @staticmethod
    def _find(optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due) -> Source:
        tensor, held = without_elements(unit)
        params, state = optimizer.decode([tensor], held)
        grads = [torch.empty_like(x) for x in params]
        none = no_members_of(unit)
        ctx = eb.Context(
            axis=ReplayAxis(totals),
            members=none,
            seed=optimizer.seed,
            due=due,
        ).at(state.step + 1)
        numbers = [value for _, value in hyperparameters(optimizer.transform) if isinstance(value, Tensor)]
        following = _Origins(
            {id(x): frozenset() for x in (*totals, *numbers, *eb.tree.leaves((state, none)), *grads, ctx.step)}
        )

        def note(name: str, slot: Any) -> Any:
            following.origins.update({id(x): frozenset({name}) for x in eb.tree.leaves(slot)})
            return slot

        eb.tree.map_slots(note, state.inner)
        following.origins.update({id(x): frozenset({WEIGHTS}) for x in eb.tree.leaves(params)})
        try:
            with following:
                optimizer.transform.update(grads, state.inner, params, ctx)
        except NeedsReductionError as pending:
            squared = following.squared.get(id(pending.value))
            is_norm = pending.kind == "sum" and any(squared is grad for grad in grads)
            return Source(following.of(pending.value), is_norm, pending=True)
        return Source(frozenset(), gradient_norm=False, pending=False)


def has_fixed_reductions(transform: eb.Transform[Any]) -> bool:
    """Whether a transform asks for the same reductions at every step: those of this library do, and one that does not reduce.

    One of a user's own may ask for what its hyperparameters, its state or a total say.
    """
    reducing = (one for one in transforms_in(transform) if one.reduces)
    return not periods(transform) and all(
        type(one).__module__.partition(".")[0] in ("everybit", "everybit_torch") for one in reducing
    )


def _leading(transform: Any) -> Any:
    """The part of a transform on which its reductions depend: of chains, what comes up to the last that reduces."""
    if not isinstance(transform, (Chain, NamedChain)):
        return map_parts(_leading, transform)
    parts = list(transform.transforms if isinstance(transform, Chain) else transform.transforms.values())
    while parts and not parts[-1].reduces:
        parts.pop()
    return Chain((*parts[:-1], *map(_leading, parts[-1:])))


@dataclass(frozen=True, slots=True)
class _Skipped(eb.Elementwise):
    """The identity in the place of a transform, with its state, and what it declares of that, by which formats are chosen."""

    transform: Any

    def init(self, params: Any) -> Any:
        """The transform's state."""
        return self.transform.init(params)

    def update(self, updates: Any, state: Any, _params: Any, _ctx: Any = None) -> tuple[Any, Any]:
        """Return both as they are."""
        return updates, state

    def decays(self) -> tuple[eb.SlotDecay, ...]:
        """The transform's."""
        return decays(self.transform)


def up_to_reductions(transform: Any) -> Any:
    """A transform that is run on the same state for its reductions alone: what comes in its chains after the last is skipped."""
    if not isinstance(transform, (Chain, NamedChain)):
        return transform
    named = transform.transforms if isinstance(transform, NamedChain) else None
    parts = list(transform.transforms) if isinstance(transform, Chain) else list(transform.transforms.values())
    last = max((number for number, part in enumerate(parts) if part.reduces), default=-1)
    kept = [
        part if number < last else up_to_reductions(part) if number == last else _Skipped(part)
        for number, part in enumerate(parts)
    ]
    return Chain(tuple(kept)) if named is None else NamedChain(dict(zip(named, kept, strict=True)))


class _Origins(TorchFunctionMode):
    """Records which tensors are computed from which, by id.

    A tensor that comes from elsewhere may have been computed from anything.
    """

    def __init__(self, origins: dict[int, frozenset[str]]) -> None:
        super().__init__()
        self.origins = origins
        self.squared: dict[int, Tensor] = {}  # by id of a sum of squares, what was squared
        self._held: list[Any] = []  # so that no id comes twice

    def of(self, tensor: Tensor) -> frozenset[str]:
        known = self.origins.get(id(tensor))
        return frozenset().union(*self.origins.values()) if known is None else known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in eb.tree.leaves([args, kwargs or {}]) if isinstance(x, Tensor)]
        names: frozenset[str] = frozenset().union(*map(self.of, given))
        if func is sum_of_squares:
            self.squared[id(made)] = given[0]
        for x in eb.tree.leaves([made]):
            if isinstance(x, Tensor):
                self.origins[id(x)] = names | self.origins.get(id(x), frozenset())
                self._held.append(x)
        return made


def ask_without_elements(optimizer: eb.Optimizer[Any], unit: Unit, axis: eb.Axis, due: Due) -> Pending | None:
    """Run a transform on a chunk of a unit without elements; return the reduction that ``axis`` does not answer, None if there is none."""
    tensor, state = without_elements(unit)
    if needs_whole_tensors(optimizer.transform):
        # The state of a matrix is not that of a vector.
        state = optimizer.init([tensor])
    none = torch.empty_like(tensor, dtype=torch.float32)
    ctx = eb.Context(axis=axis, members=no_members_of(unit), due=due)
    # Where there are no elements nothing has to be decoded.
    return ask(optimizer, tensor, none, state, ctx, frozenset())


class _CountingAxis:
    """The axis of a single process, which counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def sum(self, value: Tensor) -> Tensor:
        self.asked += 1
        return value

    def max(self, value: Tensor) -> Tensor:
        self.asked += 1
        return value

    def owned(self, tree: P) -> P:
        return tree


def _count_reductions(optimizer: eb.Optimizer[Any], unit: Unit, due: Due) -> int:
    axis = _CountingAxis()
    ask_without_elements(optimizer, unit, axis, due)
    return axis.asked


def ask(
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    grad: Tensor,
    state: OptimizerState[Any],
    ctx: eb.Context,
    names: frozenset[str] | None,
) -> Pending | None:
    """Run a transform until it asks for a reduction that the context does not answer; return that, with what it passes to it.

    Args:
        optimizer: Of the transform.
        tensor: What is stepped; it is not changed.
        grad: Its gradient.
        state: Its state.
        ctx: With the axis.
        names: The slots that the value is computed from, which are decoded; None: all.
    """
    try:
        optimizer.ask([tensor], [grad], state, ctx, reads=names)
    except NeedsReductionError as pending:
        return Pending(pending.kind, pending.value)
    return None


def partial_result(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    totals: Sequence[Tensor],
    members: tuple[eb.Members, ...] | None,
    due: Due,
    reads: frozenset[str] | None,
    counted: bool,
) -> Pending | None:
    """What :func:`ask` returns for elements of a unit; a function that can be compiled.

    Compiled code cannot be left in the middle. There the transform runs to its end, and the compiler leaves out what comes after the
    pending reduction.
    """
    if not torch.compiler.is_compiling():
        replay = ReplayAxis(totals, counted=counted, first=first)
        ctx = eb.Context(first_element=first, axis=replay, members=members, due=due)
        return ask(optimizer, tensors[0], grads[0], state, ctx, reads)
    axis = RecordingAxis(totals, counted=counted, first=first)
    optimizer.ask(
        tensors, grads, state, eb.Context(first_element=first, axis=axis, members=members, due=due), reads=reads
    )
    return axis.pending


def ask_unit(
    optimizer: eb.Optimizer[Any],
    unit: Unit,
    state: OptimizerState[Any],
    grad: Tensor,
    totals: Sequence[Tensor],
    *,
    reads: frozenset[str] | None,
    counted: bool,
    due: Due,
) -> Pending | None:
    """The pending reduction of a unit's transform, after those that ``totals`` answer, and its partial result; None if there is none.

    Args:
        optimizer: Of the transform.
        unit: Whose elements they are.
        state: Its state, where it is stepped.
        grad: In the shape of its tensor.
        totals: Of the reductions before.
        reads: From which slots, and whether from the weights, the partial result is computed; None: from all.
        counted: Whether this process contributes the elements.
        due: Which periodic work is due.
    """
    members = members_of(unit)
    return partial_result(
        optimizer, [unit.tensor], [grad], state, unit.first,
        totals=totals, members=members, due=due, reads=reads, counted=counted,
    )  # fmt: skip


def without_elements(unit: Unit) -> tuple[Tensor, OptimizerState[Any]]:
    """A unit's tensor and state, without elements, where its count lies: they may be elsewhere between steps."""
    device = unit.state.step.device
    state = map_state(unit.state, lambda x: x.reshape(-1)[:0].to(device), lambda x: x)
    return unit.tensor.reshape(-1)[:0].to(device), state
