"""Two-phase totals: numbers over all elements of a step, found before anything is stepped.

A transform may request a sum or a maximum over all parameters, such as the norm of the gradients. In the first phase it runs on every
segment, up to the first request without a known total. The contributions of segments and processes are added up, and the transform
runs anew with the total, once for each further request. In the second phase segments are stepped with all totals. No tree of all
parameters is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.base import FirstElement, sum_of_squares, torch_dtype
from everybit.base.barriers import scratch_for
from everybit.protocol.requests import Kind
from everybit.stepping import OptimizerState
from everybit_torch.host_counts import Due
from everybit_torch.segments.requests import Sources, is_fixed
from everybit_torch.segments.segment import Segment

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
    """

    kind: Kind
    value: Tensor
    dtype: torch.dtype

    def with_other(self, other: Partial) -> Partial:
        """Return the contribution of both, in float64."""
        value, added = self.value.double(), other.value.to(self.value.device, torch.float64)
        both = value + added if self.kind == "sum" else torch.maximum(value, added)
        return Partial(self.kind, both, self.dtype)


Reads = frozenset[str] | None
"""The slots, and maybe the weights, from which a contribution is computed; None: it is not known."""

Find = Callable[[Segment, Tensor, Sequence[Tensor], Due, bool, Reads], Partial | None]
"""Finds a segment's contribution to the first request that some totals leave open, or None."""


def contribution(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    totals: Sequence[Tensor],
    due: Due,
    counts: bool,
    reads: Reads = None,
) -> Partial | None:
    """Return the contribution of some elements to the first request that ``totals`` leave open, or None.

    It can be compiled: then only those slots are decoded from which the request is computed, also without ``reads``.
    """
    ctx = eb.Context(first_element=first, pending=True, requests_only=True, contributes=counts, due=due)
    found = optimizer.ask(tensors, grads, state, ctx, totals=totals, reads=reads)
    if found is None:
        return None
    value = found.partial()
    return Partial(found.kind, value, value.dtype)


def find_uncompiled(
    segment: Segment, grad: Tensor, totals: Sequence[Tensor], due: Due, counts: bool, reads: Reads = None
) -> Partial | None:
    """Find a segment's contribution, a piece of it at a time."""
    size = PIECE if segment.tensor.is_cpu else DEVICE_PIECE
    whole: Partial | None = None
    for where, part in segment.pieces(size, lambda x: x):
        own = grad if part is segment else grad[where]
        found = contribution(
            segment.optimizer, [part.tensor], [own], part.state, part.first,
            totals=totals, due=due, counts=counts, reads=reads,
        )  # fmt: skip
        if found is None:
            return None
        whole = found if whole is None else whole.with_other(found)
    return whole


def find_totals(work: Sequence[Work], find: Find = find_uncompiled, sources: Sources | None = None) -> list[Tensor]:
    """Find the totals of a transform's requests, in order.

    Parameters may lie on several meshes. A total is then reduced over each mesh, and the results are put together.

    Every process has to call it, with at least one segment for each axis, and with the axes in the same order. A process without elements
    gives a segment of an empty vector.

    Args:
        work: The segments of one transform.
        find: Finds a segment's contribution.
        sources: What is known of the transform's requests.

    Raises:
        RuntimeError: Segments make different requests.
    """
    if not work[0].segment.optimizer.reduces:
        return []
    sources = Sources() if sources is None else sources
    by_axis: dict[int, list[Work]] = {}
    for one in work:
        by_axis.setdefault(id(one.axis), []).append(one)
    totals: list[Tensor] = []
    while (found := _add_up(work, totals, find, sources)) is not None:
        whole: Partial | None = None
        for number, together in by_axis.items():
            axis, part = together[0].axis, found[number]
            reduce = axis.sum if part.kind == "sum" else axis.max
            reduced = Partial(part.kind, reduce(part.value.double()), part.dtype)
            whole = reduced if whole is None else whole.with_other(reduced)
        assert whole is not None
        totals.append(whole.value.to(whole.dtype))
    return totals


def _add_up(work: Sequence[Work], totals: Sequence[Tensor], find: Find, sources: Sources) -> dict[int, Partial] | None:
    """Add up the contributions to the first request that ``totals`` leave open, by axis; or return None."""
    if not sources.of(work[0].segment, totals, work[0].due).pending:
        return None
    found: dict[int, Partial] = {}
    kind: Kind | None = None
    for number, (segment, grad, due, counts, axis) in enumerate(work):
        source, wide = sources.of(segment, totals, due), torch_dtype(segment.stored.policy.compute)
        part: Partial | None
        # A gradient of a wider dtype is refused by the run of the transform, before anything is changed.
        if source.gradient_norm and torch.promote_types(grad.dtype, wide) is wide:
            own = grad if counts else grad[:0]
            part = Partial("sum", sum_of_squares(own, scratch_for([own])), torch.float64)
        else:
            here = [x if x.device == grad.device else x.to(grad.device) for x in totals]
            part = find(segment, grad, here, due, counts, source.names)
        kind_here = None if part is None else part.kind
        if number and kind_here != kind:
            raise RuntimeError(
                f"{segment.optimizer.transform}: makes different requests for different parameters; accepted is a transform whose requests"
                " go over all of its parameters."
            )
        kind = kind_here
        if part is None and is_fixed(segment.optimizer.transform):
            break
        if part is not None:
            found[id(axis)] = found[id(axis)].with_other(part) if id(axis) in found else part
    if not found:
        sources.note_end(work[0].segment, totals, work[0].due)
    return found or None
