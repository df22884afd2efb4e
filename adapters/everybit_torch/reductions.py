"""Two-phase reductions: the totals that a transform asks of its axis are found first, chunk by chunk, and it is stepped with them then.

A transform that reduces works element by element (or tensor by tensor) except for what it asks of ``ctx.axis``. In the first phase it is
run on every chunk until it asks for a reduction whose total is not known yet: that is the *pending reduction*, and the value that it
passes is the chunk's *partial result*. The partial results are reduced over all chunks and processes, and the transform is run again with
the total, once more for each further reduction. In the second phase it is stepped with all totals. No tree of all parameters is made, and
the first phase decodes only those slots which the pending reduction is computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import everybit as eb
from everybit.barriers import sum_of_squares
from everybit.dtypes import torch_dtype
from everybit.hyperparameters import hyperparameters
from everybit.optimizer import OptimizerState
from everybit.parts import needs_whole_tensors
from everybit.replay import Kind, NeedsReductionError, ReplayAxis
from everybit.transform import periods
from everybit_torch.gradients import Gathered, MemberGradients
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of, no_members_of
from everybit_torch.units import Unit, map_state

# Elements of which a partial result is computed at a time: the temporaries are those of a few operations, and there are few calls.
PIECE = 1 << 20
DEVICE_PIECE = 1 << 24

P = TypeVar("P")

WEIGHTS = "params"
"""The name of the weights among the inputs of a reduction; the others go by the names of their slots."""


class Part(NamedTuple):
    """A unit that takes part in reductions.

    Attributes:
        optimizer: The optimizer that steps it.
        unit: The unit.
        grad: In the shape of its tensor; None if it contributes nothing, and only takes part in the reductions.
        counted: Whether this process is the one that contributes its elements.
        due: Which periodic work is due for it; see :meth:`Reads.asks_in_periodic_work`.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    grad: Gathered | None
    counted: bool = True
    due: Due = ()


class Source(NamedTuple):
    """What a transform computes a reduction from.

    Attributes:
        names: Of slots, and maybe :data:`WEIGHTS`.
        gradient_norm: Whether the partial result is the sum of the squares of the gradients as they came: that needs no run of the
            transform, and no wider copy of the gradients.
    """

    names: frozenset[str]
    gradient_norm: bool


class Reads:
    """What a transform computes each of its reductions from; found once for each optimizer, reduction, and answer to which work is due.

    It is found by running the transform on tensors without elements, and recording which tensors are computed from which.
    """

    def __init__(self) -> None:
        self._known: list[tuple[eb.Optimizer[Any], Due, int, Source]] = []
        self._asking: list[tuple[eb.Optimizer[Any], bool]] = []

    def of(self, optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due = ()) -> Source:
        """Return the source of the pending reduction, which comes after those that ``totals`` answer."""
        for known, answer, asked, source in self._known:
            if known is optimizer and answer == due and asked == len(totals):
                return source
        source = self._find(optimizer, unit, totals, due)
        # Optimizers are made anew when hyperparameters change; the present ones stay.
        self._known = [*self._known[-63:], (optimizer, due, len(totals), source)]
        return source

    def asks_in_periodic_work(self, optimizer: eb.Optimizer[Any], unit: Unit) -> bool:
        """Whether a transform may ask for reductions inside of periodic work, so that what it asks for depends on which is due.

        It does not if it asks for as many reductions where nothing is decided, which does all work, as where everything is due, and
        as where nothing is. A transform that must see whole tensors is not asked, and may.
        """
        for known, asks in self._asking:
            if known is optimizer:
                return asks
        all_periods = periods(optimizer.transform)
        answers: list[Due] = [(), *(tuple((period, due) for period in all_periods) for due in (True, False))]
        asks = bool(all_periods) and (
            needs_whole_tensors(optimizer.transform)
            or len({_count_reductions(optimizer, unit, answer) for answer in answers}) > 1
        )
        self._asking = [*self._asking[-15:], (optimizer, asks)]
        return asks

    @staticmethod
    def _find(optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due) -> Source:
        tensor, held = _without_elements(unit)
        params, state = optimizer.decode([tensor], held)
        grads = [torch.empty_like(x) for x in params]
        none = no_members_of(unit)
        ctx = eb.Context(
            axis=ReplayAxis(totals),
            first_element=unit.first,
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
            return Source(following.of(pending.value), is_norm)
        return Source(frozenset(), gradient_norm=False)


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


def find_totals(parts: Sequence[Part], axis: eb.Axis, reads: Reads, known: Sequence[Tensor] = ()) -> list[Tensor]:
    """Find the totals, over all parts and processes, of a transform's reductions, in order; an empty list if it does not reduce.

    Every process has to call it, with at least one part: all take part in the same reductions, in the same order, and so does a process
    that has nothing to step. The first of the totals may be ``known`` already, on every process.

    Raises:
        RuntimeError: Parts that reduce differently.
    """
    totals: list[Tensor] = list(known)
    while (total := _total_of_parts(parts, totals, reads)) is not None:
        kind, dtype, value = total
        reduced = axis.sum(value) if kind == "sum" else axis.max(value)
        totals.append(reduced.to(dtype))
    return totals


def _total_of_parts(
    parts: Sequence[Part], totals: Sequence[Tensor], reads: Reads
) -> tuple[Kind, torch.dtype, Tensor] | None:
    """Reduce the partial results for the first reduction whose total is still unknown; None if ``totals`` answer all.

    Returns:
        What is asked for, its dtype, and the partial result of all parts, in float64.
    """
    first: NeedsReductionError | None = None
    running = torch.empty(0)
    for one in _all_partial_results(parts, totals, reads):
        if first is None:
            first, running = one, one.value.double()
        elif one.kind != first.kind:
            raise RuntimeError(
                f"{parts[0].optimizer.transform}: reduces differently for different parameters; accepted is a transform whose"
                " reductions go over all of its parameters."
            )
        else:
            value = one.value.to(running.device, torch.float64)
            running = running + value if one.kind == "sum" else torch.maximum(running, value)
    return None if first is None else (first.kind, first.value.dtype, running)


def _all_partial_results(
    parts: Sequence[Part], totals: Sequence[Tensor], reads: Reads
) -> Iterator[NeedsReductionError]:
    """Yield the partial results for the first reduction whose total is still unknown; nothing if ``totals`` answer all.

    The first is that of a chunk without elements, which a process that has nothing to step contributes too. A transform that must see whole
    tensors is not run on one: its parts are in one process.
    """
    if not parts[0].optimizer.transform.reduces:
        return
    if not needs_whole_tensors(parts[0].optimizer.transform):
        pending = _pending_reduction(parts[0], totals)
        if pending is None:
            return
        yield pending
    for part in parts:
        if part.grad is not None:
            yield from _partial_results(part, part.grad, totals, reads)


def _partial_results(
    part: Part, grad: Gathered, totals: Sequence[Tensor], reads: Reads
) -> Iterator[NeedsReductionError]:
    """Yield a part's partial results, chunk by chunk; nothing if ``totals`` answer all of the transform's reductions."""
    optimizer, unit, _, counted, due = part
    if unit.tensor.ndim != 1 or needs_whole_tensors(optimizer.transform):
        chunks: Iterable[tuple[Any, Unit]] = [(..., unit)]
        names = None
    else:
        source = reads.of(optimizer, unit, totals, due)
        wide = torch_dtype(optimizer.formats([unit.tensor])[0].policy.compute)
        # A gradient of a wider dtype is refused by the run of the transform, before anything is changed.
        if source.gradient_norm and torch.promote_types(grad.dtype, wide) is wide:
            yield NeedsReductionError("sum", _squares(grad) if counted else grad[:0].double().sum())
            return
        size = PIECE if unit.tensor.device.type in ("cpu", "meta") else DEVICE_PIECE
        chunks, names = unit.pieces(size, lambda x: x), source.names
    for where, chunk in chunks:
        axis = ReplayAxis(totals, counted=counted)
        ctx = eb.Context(first_element=chunk.first, axis=axis, members=members_of(chunk), due=due)
        pending = _ask(optimizer, chunk.tensor, grad[where], chunk.state, ctx, names)
        if pending is None:
            return
        yield pending


def _squares(grad: Gathered) -> Tensor:
    return grad.sum_of_squares() if isinstance(grad, MemberGradients) else sum_of_squares(grad)


def _pending_reduction(part: Part, totals: Sequence[Tensor]) -> NeedsReductionError | None:
    """Return the transform's pending reduction, with the partial result of a chunk without elements; None if there is none."""
    return _ask_without_elements(part.optimizer, part.unit, ReplayAxis(totals), part.due)


def _ask_without_elements(
    optimizer: eb.Optimizer[Any], unit: Unit, axis: eb.Axis, due: Due
) -> NeedsReductionError | None:
    tensor, state = _without_elements(unit)
    none = torch.empty_like(tensor, dtype=torch.float32)
    ctx = eb.Context(first_element=unit.first, axis=axis, members=no_members_of(unit), due=due)
    # Where there are no elements nothing has to be decoded.
    return _ask(optimizer, tensor, none, state, ctx, frozenset())


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
    _ask_without_elements(optimizer, unit, axis, due)
    return axis.asked


def _ask(
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    grad: Tensor,
    state: OptimizerState[Any],
    ctx: eb.Context,
    names: frozenset[str] | None,
) -> NeedsReductionError | None:
    try:
        optimizer.ask([tensor], [grad], state, ctx, reads=names)
    except NeedsReductionError as pending:
        pending.__traceback__ = None  # its frames hold what was computed on the way
        return pending
    return None


def _without_elements(unit: Unit) -> tuple[Tensor, OptimizerState[Any]]:
    state = map_state(unit.state, lambda x: x.reshape(-1)[:0], lambda x: x)
    return unit.tensor.reshape(-1)[:0], state
