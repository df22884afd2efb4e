"""Two-phase totals: numbers over all elements of a step, or over those of each parameter, found before anything is stepped.

A transform may request a sum or a maximum over all parameters, such as the norm of the gradients. In the first phase it runs on every
segment, up to the first request without a known total. The contributions of segments and processes are added up, and the transform
runs anew with the total, once for each further request. In the second phase segments are stepped with all totals. No tree of all
parameters is made.

Numbers of each parameter, such as trust ratios, are met at once where a segment holds a whole parameter. If processes hold rows of it,
their contributions are added up over its mesh, for that segment alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.base import DTYPES, FirstElement, sum_of_all_squares
from everybit.protocol import Due
from everybit.protocol.requests import Kind
from everybit.stepping import OptimizerState
from everybit.stepping.layout import Layout
from everybit_torch.segments.segment import Segment
from everybit_torch.segments.sources import Sources

PIECE = 1 << 20
"""Elements of which a contribution is computed at a time on a CPU."""

DEVICE_PIECE = 1 << 24
"""Elements of which a contribution is computed at a time on an accelerator."""


class Work(NamedTuple):
    """A segment that takes part in a step.

    Attributes:
        segment: The segment.
        grad: The gradient, in its tensor's shape.
        due: The periodic work that is due.
        counts: Whether this process contributes its elements. Of copies on several processes one counts.
        axis: The processes that have the parameter's other elements: its own mesh. By default this process has all.
    """

    segment: Segment
    grad: Tensor
    due: Due = ()
    counts: bool = True
    axis: eb.Axis = eb.Local


class Partial(NamedTuple):
    """The contribution of some elements to a total.

    Attributes:
        kind: ``"sum"`` or ``"max"``.
        value: The contribution, in the dtype of the request or in float64.
        dtype: The dtype of the request.
        each: Whether it is for a number of each parameter.
    """

    kind: Kind
    value: Tensor
    dtype: torch.dtype
    each: bool = False

    def with_other(self, other: Partial) -> Partial:
        """Return the contribution of both, in float64."""
        value, added = self.value.double(), other.value.to(self.value.device, torch.float64)
        both = value + added if self.kind == "sum" else torch.maximum(value, added)
        return Partial(self.kind, both, self.dtype, self.each)


Find = Callable[[Segment, Tensor, Sequence[Tensor], Due], Partial | None]
"""Finds a segment's contribution to the first request that some totals leave open, or None."""


def contribution(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    totals: Sequence[Tensor],
    holds_wholes: bool,
    due: Due,
    layout: Layout | None = None,
) -> Partial | None:
    """Return the contribution of some elements to the first request that ``totals`` leave open, or None.

    It can be compiled: then only those slots are decoded from which the request is computed.
    """
    ctx = eb.Context(first_element=first, pending=True, due=due)
    found = optimizer.ask(tensors, grads, state, ctx, totals=totals, holds_wholes=holds_wholes, layout=layout)
    if found is None:
        return None
    value = found.partial()
    return Partial(found.kind, value, value.dtype, each=found.request.each)


def find_uncompiled(segment: Segment, grad: Tensor, totals: Sequence[Tensor], due: Due) -> Partial | None:
    """Find a segment's contribution, a piece of it at a time."""
    size = PIECE if segment.tensor.is_cpu else DEVICE_PIECE
    whole: Partial | None = None
    for where, part in segment.pieces(size, lambda x: x):
        own = grad if part is segment else grad[where]
        found = contribution(
            segment.optimizer, [part.tensor], [own], part.here().state, part.first,
            totals=totals, holds_wholes=not part.is_part, due=due, layout=segment.layout,
        )  # fmt: skip
        if found is None:
            return None
        whole = found if whole is None else whole.with_other(found)
    return whole


def find_totals(
    work: Sequence[Work], find: Find = find_uncompiled, sources: Sources | None = None
) -> list[list[Tensor]]:
    """Find the totals of a transform's requests, in order, for each segment.

    Parameters may lie on several meshes. A total is then reduced over each mesh, and the results are put together. Numbers of each
    parameter are reduced over its own mesh.

    Every process has to call it, with at least one segment for each axis, and with the axes in the same order. A process without elements
    gives a segment of an empty vector.

    Args:
        work: The segments of one transform.
        find: Finds a segment's contribution.
        sources: The known sources of the transform's requests.

    Raises:
        RuntimeError: Segments make different requests.
    """
    totals: list[list[Tensor]] = [[] for _ in work]
    if not work[0].segment.optimizer.reduces:
        return totals
    sources = Sources() if sources is None else sources
    found = _contributions(work, totals, find, sources)
    while any(part is not None for part in found):
        each = [number for number, part in enumerate(found) if part is not None and part.each]
        if each:
            for number, total in zip(each, _of_each([(work[n].axis, found[n]) for n in each]), strict=True):
                totals[number].append(total)
            further = _contributions([work[n] for n in each], [totals[n] for n in each], find, sources)
            for number, part in zip(each, further, strict=True):
                found[number] = part
            continue
        kinds = {None if part is None else part.kind for part in found}
        if len(kinds) > 1:
            raise RuntimeError(
                f"{work[0].segment.optimizer.transform}: makes different requests for different parameters; accepted is a transform whose"
                " requests go over all of its parameters."
            )
        total = sources.kept(
            work[0].segment, len(totals[0]), _of_all([(one.axis, part) for one, part in zip(work, found, strict=True)])
        )
        for own in totals:
            own.append(total)
        found = _contributions(work, totals, find, sources)
    return totals


def _contributions(
    work: Sequence[Work], totals: Sequence[Sequence[Tensor]], find: Find, sources: Sources
) -> list[Partial | None]:
    """The contribution of each segment to the first request that its totals leave open, or None."""
    asked = [sources.of(one.segment, own, one.due) for one, own in zip(work, totals, strict=True)]
    # A gradient of a wider dtype is refused by the run of the transform, before anything is changed.
    squared = [
        number
        for number, (one, source) in enumerate(zip(work, asked, strict=True))
        if source.pending and source.gradient_norm and not _is_too_wide(one)
    ]
    norms = _squares(work, squared)
    return [
        norms[number] if number in norms else _contribution(one, own, find, sources) if source.pending else None
        for number, (one, own, source) in enumerate(zip(work, totals, asked, strict=True))
    ]


def _is_too_wide(one: Work) -> bool:
    wide = DTYPES[one.segment.stored.policy.compute]
    return torch.promote_types(one.grad.dtype, wide) is not wide


def _squares(work: Sequence[Work], numbers: Sequence[int]) -> dict[int, Partial]:
    """The squares of the gradients of some segments: segments of one axis and device have one part, the sum over all of them."""
    together: dict[tuple[int, torch.device], list[int]] = {}
    for number in numbers:
        together.setdefault((id(work[number].axis), work[number].grad.device), []).append(number)
    found: dict[int, Partial] = {}
    for several in together.values():
        grads = [work[number].grad if work[number].counts else work[number].grad[:0] for number in several]
        found |= dict.fromkeys(several, Partial("sum", sum_of_all_squares(grads), torch.float64))
    return found


def _contribution(one: Work, totals: Sequence[Tensor], find: Find, sources: Sources) -> Partial | None:
    """A segment's contribution, found by a run of the transform."""
    segment, grad, due, counts, _ = one
    here = [x if x.device == grad.device else x.to(grad.device) for x in totals]
    part = find(segment, grad, here, due)
    if part is None:
        sources.note_end(segment, totals, due)
    elif not counts and part.kind == "sum":
        return Partial(part.kind, torch.zeros_like(part.value), part.dtype, part.each)
    return part


def _of_all(found: Sequence[tuple[eb.Axis, Partial | None]]) -> Tensor:
    """The total of the contributions to one request: over the segments of each axis, over its processes, and over all axes.

    A contribution that several segments have together counts once.
    """
    here: dict[int, tuple[eb.Axis, dict[int, Partial]]] = {}
    for axis, part in found:
        assert part is not None
        here.setdefault(id(axis), (axis, {}))[1][id(part)] = part
    whole: Partial | None = None
    for axis, of_axis in here.values():
        parts = [*of_axis.values()]
        kind, like = parts[0].kind, parts[0].value
        values = [part.value.to(like.device, torch.float64) for part in parts]
        several = values[0] if len(values) == 1 else _over(kind, torch.stack(values))
        reduced = Partial(kind, _reduced(axis, kind, several), parts[0].dtype)
        whole = reduced if whole is None else whole.with_other(reduced)
    assert whole is not None
    return whole.value.to(whole.dtype)


def _of_each(found: Sequence[tuple[eb.Axis, Partial | None]]) -> list[Tensor]:
    """The totals of numbers of each parameter, of one request of each segment; one reduction for an axis."""
    by_axis: dict[int, list[int]] = {}
    for number, (axis, _) in enumerate(found):
        by_axis.setdefault(id(axis), []).append(number)
    totals: dict[int, Tensor] = {}
    for several in by_axis.values():
        parts = [part for _, part in (found[number] for number in several) if part is not None]
        sums = _reduced(found[several[0]][0], "sum", torch.cat([part.value.double().reshape(-1) for part in parts]))
        pieces = torch.split(sums, [part.value.numel() for part in parts])
        for number, part, piece in zip(several, parts, pieces, strict=True):
            totals[number] = piece.view(part.value.shape).to(part.value.device, part.dtype)
    return [totals[number] for number in range(len(found))]


def _reduced(axis: eb.Axis, kind: Kind, value: Tensor) -> Tensor:
    return axis.sum(value) if kind == "sum" else axis.max(value)


def _over(kind: Kind, values: Tensor) -> Tensor:
    return values.sum(0) if kind == "sum" else values.amax(0)
