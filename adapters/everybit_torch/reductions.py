"""Two-phase reductions: the totals that a transform asks of its axis are found first, chunk by chunk, and it is stepped with them then.

A transform that reduces works element by element (or tensor by tensor) except for what it asks of ``ctx.axis``. In the first phase it is
run on every chunk until it asks for a reduction whose total is not known yet: that is the *pending reduction*, and the value that it
passes is the chunk's *partial result*. The partial results are reduced over all chunks and processes, and the transform is run again with
the total, once more for each further reduction. In the second phase it is stepped with all totals. No tree of all parameters is made, and
the first phase decodes only those slots which the pending reduction is computed from.

Of transforms of this library it is known after their first step which reductions they ask for, since that never changes: they are run no
more for reductions that need no run, such as the norm of the gradients, nor to hear that they ask for nothing further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import everybit as eb
from everybit.barriers import scratch_for, sum_of_squares
from everybit.combinators.chain import Chain, NamedChain
from everybit.dtypes import torch_dtype
from everybit.hyperparameters import hyperparameters
from everybit.optimizer import OptimizerState
from everybit.parts import map_parts, needs_whole_tensors, transforms_in
from everybit.replay import Kind, NeedsReductionError, ReplayAxis
from everybit.transform import periods
from everybit_torch.direct_calls import is_settled
from everybit_torch.gradients import Gathered, MemberGradients
from everybit_torch.members import members_of, no_members_of
from everybit_torch.units import Unit, map_state

# Elements of which a partial result is computed at a time: the temporaries are those of a few operations, and there are few calls.
PIECE = 1 << 20
DEVICE_PIECE = 1 << 24

WEIGHTS = "params"
"""The name of the weights among the inputs of a reduction; the others go by the names of their slots."""


class Part(NamedTuple):
    """A unit that takes part in reductions.

    Attributes:
        optimizer: The optimizer that steps it.
        unit: The unit.
        grad: In the shape of its tensor; None if it contributes nothing, and only takes part in the reductions.
        counted: Whether this process is the one that contributes its elements.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    grad: Gathered | None
    counted: bool = True


class Source(NamedTuple):
    """What a transform computes a reduction from.

    Attributes:
        names: Of slots, and maybe :data:`WEIGHTS`.
        gradient_norm: Whether the partial result is the sum of the squares of the gradients as they came: that needs no run of the
            transform, and no wider copy of the gradients.
        pending: Whether there is such a reduction: False if the transform asked for no more than was answered.
    """

    names: frozenset[str]
    gradient_norm: bool
    pending: bool


class _Kind(NamedTuple):
    """What is asked of a transform at every step: whether its reductions are the same ones, and whether it must see whole tensors."""

    fixed: bool
    whole: bool


class Reads:
    """What a transform computes each of its reductions from; found once for each reduction.

    It is found by running the transform on tensors without elements, and recording which tensors are computed from which.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[eb.Optimizer[Any], _Kind]] = []
        # By optimizer, and by what its reductions depend on, each with the number of reductions before.
        self._known: list[tuple[eb.Optimizer[Any], eb.Transform[Any] | None, int, Source]] = []

    def kind(self, optimizer: eb.Optimizer[Any]) -> _Kind:
        """Return what the steps of an optimizer have in common."""
        for known, kind in self._kinds:
            if known is optimizer:
                return kind
        kind = _Kind(has_fixed_reductions(optimizer.transform), needs_whole_tensors(optimizer.transform))
        self._kinds = [*self._kinds[-15:], (optimizer, kind)]
        return kind

    def of(self, optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor]) -> Source:
        """Return the source of the pending reduction, which comes after those that ``totals`` answer."""
        for known, _, asked, source in self._known:
            if known is optimizer and asked == len(totals):
                return source
        # Optimizers are made anew when hyperparameters change; the present ones stay.
        leading = _leading(optimizer.transform)
        settled = leading if is_settled(leading) else None
        alike = (one for _, like, asked, one in self._known if asked == len(totals) and settled and like == settled)
        source = next(alike, None) or self._find(optimizer, unit, totals)
        self._known = [*self._known[-15:], (optimizer, settled, len(totals), source)]
        return source

    @staticmethod
    def _find(optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor]) -> Source:
        tensor, held = _without_elements(unit)
        params, state = optimizer.decode([tensor], held)
        grads = [torch.empty_like(x) for x in params]
        none = no_members_of(unit)
        ctx = eb.Context(
            axis=ReplayAxis(totals),
            first_element=unit.first,
            members=none,
            seed=optimizer.seed,
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
    if not reads.kind(parts[0].optimizer).whole:
        pending = _pending_reduction(parts[0], totals, reads)
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
    optimizer, unit, _, counted = part
    if unit.tensor.ndim != 1 or reads.kind(optimizer).whole:
        chunks: Iterable[tuple[Any, Unit]] = [(..., unit)]
        names = None
    else:
        source = reads.of(optimizer, unit, totals)
        wide = torch_dtype(optimizer.formats([unit.tensor])[0].policy.compute)
        # A gradient of a wider dtype is refused by the run of the transform, before anything is changed.
        if source.gradient_norm and torch.promote_types(grad.dtype, wide) is wide:
            yield NeedsReductionError("sum", _squares(grad) if counted else grad[:0].double().sum())
            return
        size = PIECE if unit.tensor.device.type in ("cpu", "meta") else DEVICE_PIECE
        chunks, names = unit.pieces(size, lambda x: x), source.names
    for where, chunk in chunks:
        axis = ReplayAxis(totals, counted=counted)
        ctx = eb.Context(first_element=chunk.first, axis=axis, members=members_of(chunk))
        pending = _ask(optimizer, chunk.tensor, grad[where], chunk.state, ctx, names)
        if pending is None:
            return
        yield pending


def _squares(grad: Gathered) -> Tensor:
    if isinstance(grad, MemberGradients):
        return grad.sum_of_squares()
    return sum_of_squares(grad, scratch_for([grad]))


def _pending_reduction(part: Part, totals: Sequence[Tensor], reads: Reads) -> NeedsReductionError | None:
    """Return the transform's pending reduction, with the partial result of a chunk without elements; None if there is none."""
    if reads.kind(part.optimizer).fixed:
        source = reads.of(part.optimizer, part.unit, totals)
        if not source.pending:
            return None
        if source.gradient_norm:
            return NeedsReductionError("sum", torch.zeros((), dtype=torch.float64, device=part.unit.tensor.device))
    tensor, state = _without_elements(part.unit)
    none = torch.empty_like(tensor, dtype=torch.float32)
    ctx = eb.Context(first_element=part.unit.first, axis=ReplayAxis(totals), members=no_members_of(part.unit))
    # Where there are no elements nothing has to be decoded.
    return _ask(part.optimizer, tensor, none, state, ctx, frozenset())


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
