"""Two-phase reductions: the totals of a transform's requests are found first, chunk by chunk, and it is stepped with them then.

A transform that reduces works element by element (or tensor by tensor) except for what it requests. In the first phase it is run on every
chunk up to the first request whose total is not known yet: that is the *pending reduction*, and the chunk contributes its *partial
result*. The partial results are reduced over all chunks and processes, and the transform is run again with
the total, once more for each further reduction. In the second phase it is stepped with all totals. No tree of all parameters is made, and
the first phase decodes only those slots which the pending reduction is computed from (:mod:`everybit_torch.asking`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.base import sum_of_squares, torch_dtype
from everybit.base.barriers import scratch_for
from everybit.protocol.requests import Kind
from everybit_torch.asking import Partial, Reads, ask_unit, ask_without_elements
from everybit_torch.gradients import Gathered, MemberGradients
from everybit_torch.host_counts import Due
from everybit_torch.units import Unit

# Elements of which a partial result is computed at a time: the temporaries are those of a few operations, and there are few calls.
PIECE = 1 << 20
DEVICE_PIECE = 1 << 24


def piece_size(device: torch.device) -> int:
    """Elements of which a partial result is computed at a time on a device."""
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE


class Part(NamedTuple):
    """A unit that takes part in reductions.

    Attributes:
        optimizer: The optimizer that steps it.
        unit: The unit.
        grad: In the shape of its tensor; None if it contributes nothing, and only takes part in the reductions.
        counted: Whether this process is the one that contributes its elements.
        due: Which periodic work is due for it; see ``Engine.step_unit``.
        find: Finds partial results by compiled code, as :func:`~everybit_torch.asking.ask_unit` does; None: they are found uncompiled.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    grad: Gathered | None
    counted: bool = True
    due: Due = ()
    find: Callable[..., Partial | None] | None = None


def settle_due(
    units: Sequence[Unit],
    gathered: Mapping[int, Gathered],
    due: dict[int, Due],
    reads: Reads,
    optimizer_of: Callable[[Unit], eb.Optimizer[Any]],
    *,
    alone: bool,
) -> None:
    """Let all units and processes decide alike where it depends on due work which reductions a transform requests.

    Units may have different counts, and no process knows those of others. Where decisions may differ the device decides.

    Args:
        units: That share reductions.
        gathered: By id of the unit, the gradients of those that have some.
        due: By id of those, which periodic work is due; changed here.
        reads: Which transforms request reductions inside of periodic work.
        optimizer_of: What steps a unit.
        alone: Whether no other process shares the reductions.
    """
    stepped = [unit for unit in units if id(unit) in gathered]
    decisions = {due.get(id(unit), ()) for unit in stepped}
    if alone and len(decisions) == 1:
        # Those without gradients too: one of them may be run for all.
        due.update(dict.fromkeys(map(id, units), *decisions))
    elif any(reads.promises(optimizer_of(unit), unit).in_periodic_work for unit in stepped):
        for unit in stepped:
            due.pop(id(unit), None)


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
    first: Partial | None = None
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


def _all_partial_results(parts: Sequence[Part], totals: Sequence[Tensor], reads: Reads) -> Iterator[Partial]:
    """Yield the partial results for the first reduction whose total is still unknown; nothing if ``totals`` answer all.

    The first is that of a chunk without elements, which a process that has nothing to step contributes too. A transform that must see whole
    tensors is run on one only where there is nothing to step.
    """
    if not parts[0].optimizer.transform.reduces:
        return
    whole = reads.promises(parts[0].optimizer, parts[0].unit).whole
    if not whole or all(part.grad is None for part in parts):
        pending = _pending_reduction(parts[0], totals, reads)
        if pending is None:
            return
        yield pending
    for part in parts:
        if part.grad is not None:
            yield from _partial_results(part, part.grad, totals, reads)


def _partial_results(part: Part, grad: Gathered, totals: Sequence[Tensor], reads: Reads) -> Iterator[Partial]:
    """Yield a part's partial results, chunk by chunk; nothing if ``totals`` answer all of the transform's reductions."""
    optimizer, unit, _, counted, due, compiled = part
    if reads.promises(optimizer, unit).whole or (unit.tensor.ndim != 1 and compiled is None):
        chunks: Iterable[tuple[Any, Unit]] = [(cast(Any, ...), unit)]
        names, compiled = None, None  # code would be made for each shape
    else:
        source = reads.of(optimizer, unit, totals, due)
        wide = torch_dtype(optimizer.formats([unit.tensor])[0].policy.compute)
        # A gradient of a wider dtype is refused by the run of the transform, before anything is changed.
        if source.gradient_norm and torch.promote_types(grad.dtype, wide) is wide:
            yield Partial("sum", _squares(grad) if counted else grad[:0].double().sum())
            return
        pieces = unit.pieces(piece_size(unit.tensor.device), lambda x: x)
        chunks, names = pieces if unit.flat else [(cast(Any, ...), unit)], source.names
    for where, chunk in chunks:
        find = partial(ask_unit, optimizer) if compiled is None else compiled
        pending = find(chunk, chunk.state, grad[where], totals, reads=names, counted=counted, due=due)
        if pending is None:
            return
        yield pending


def _squares(grad: Gathered) -> Tensor:
    if isinstance(grad, MemberGradients):
        return grad.sum_of_squares()
    return sum_of_squares(grad, scratch_for([grad]))


def _pending_reduction(part: Part, totals: Sequence[Tensor], reads: Reads) -> Partial | None:
    """Return the transform's pending reduction, with the partial result of a chunk without elements; None if there is none."""
    optimizer, unit, _, _, due, _ = part
    if reads.promises(optimizer, unit).fixed:
        source = reads.of(optimizer, unit, totals, due)
        if not source.pending:
            return None
        if source.gradient_norm:
            return Partial("sum", torch.zeros((), dtype=torch.float64, device=unit.tensor.device))
    return ask_without_elements(optimizer, unit, totals, due)
