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
from everybit.base import FirstElement
from everybit.protocol.requests import Kind
from everybit.stepping import OptimizerState
from everybit_torch.host_counts import Due
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
    """

    segment: Segment
    grad: Tensor
    due: Due = ()
    counts: bool = True


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


Find = Callable[[Segment, Tensor, Sequence[Tensor], Due, bool], Partial | None]
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
) -> Partial | None:
    """Return the contribution of some elements to the first request that ``totals`` leave open, or None.

    It can be compiled: then only those slots are decoded from which the request is computed.
    """
    ctx = eb.Context(first_element=first, pending=True, requests_only=True, contributes=counts, due=due)
    found = optimizer.ask(tensors, grads, state, ctx, totals=totals)
    if found is None:
        return None
    value = found.partial()
    return Partial(found.kind, value, value.dtype)


def find_uncompiled(segment: Segment, grad: Tensor, totals: Sequence[Tensor], due: Due, counts: bool) -> Partial | None:
    """Find a segment's contribution, a piece of it at a time."""
    size = PIECE if segment.tensor.is_cpu else DEVICE_PIECE
    whole: Partial | None = None
    for where, part in segment.pieces(size, lambda x: x):
        own = grad if part is segment else grad[where]
        found = contribution(
            segment.optimizer, [part.tensor], [own], part.state, part.first, totals=totals, due=due, counts=counts
        )
        if found is None:
            return None
        whole = found if whole is None else whole.with_other(found)
    return whole


def find_totals(work: Sequence[Work], axis: eb.Axis = eb.Local, find: Find = find_uncompiled) -> list[Tensor]:
    """Find the totals of a transform's requests, in order.

    Every process has to call it, with at least one segment. A process without elements gives a segment of an empty vector.

    Args:
        work: The segments of one transform.
        axis: Adds up over the processes.
        find: Finds a segment's contribution.

    Raises:
        RuntimeError: Segments make different requests.
    """
    if not work[0].segment.optimizer.reduces:
        return []
    totals: list[Tensor] = []
    while (total := _add_up(work, totals, find)) is not None:
        reduce = axis.sum if total.kind == "sum" else axis.max
        totals.append(reduce(total.value.double()).to(total.dtype))
    return totals


def _add_up(work: Sequence[Work], totals: Sequence[Tensor], find: Find) -> Partial | None:
    """Add up the contributions of all segments to the first request that ``totals`` leave open, or None."""
    whole: Partial | None = None
    for number, (segment, grad, due, counts) in enumerate(work):
        here = [x if x.device == segment.tensor.device else x.to(segment.tensor.device) for x in totals]
        found = find(segment, grad, here, due, counts)
        if number and (found and found.kind) != (whole and whole.kind):
            raise RuntimeError(
                f"{segment.optimizer.transform}: makes different requests for different parameters; accepted is a transform whose requests"
                " go over all of its parameters."
            )
        whole = found if whole is None or found is None else whole.with_other(found)
    return whole
