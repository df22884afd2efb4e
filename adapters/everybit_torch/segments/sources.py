"""The requests of a transform, and the sources of their values: found by a run on a tensor without elements.

Transforms of this library make the same requests at every step. For them this is found once, so that a step need not run them to learn that
the norm of the gradients is all they request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import Due, Pending, SumOfSquares, advance, fields_of, periods, transforms_in
from everybit_torch.compiled import is_of_library
from everybit_torch.segments.segment import Segment
from everybit_torch.streams import is_capturing

Form = tuple[object, ...]
"""The classes of a transform and of those inside it, with their choices."""

MOST = 64
"""Optimizers of which the form is kept."""


class Source(NamedTuple):
    """The source of a request's value.

    Attributes:
        gradient_norm: Whether the contribution is the sum of the squares of the gradients as they came.
        pending: Whether there is a request: False if the transform makes no further request.
    """

    gradient_norm: bool
    pending: bool


class Sources:
    """The sources of requests, found once for each transform."""

    def __init__(self) -> None:
        self._found: dict[object, Source] = {}
        self._forms: dict[int, tuple[eb.Optimizer[Any], Form | None]] = {}
        self._in_work: dict[int, tuple[eb.Optimizer[Any], bool]] = {}
        self._totals: WeakKeyDictionary[Segment, dict[int, Tensor]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Sources], tuple[()]]:
        return Sources, ()  # a copy finds them anew

    def _form(self, optimizer: eb.Optimizer[Any]) -> Form | None:
        """A key for transforms with the same requests at every step; None: the requests may change."""
        known = self._forms.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            if len(self._forms) > MOST:
                self._forms.clear()  # optimizers are made anew when hyperparameters change
            transform = optimizer.transform
            known = self._forms[id(optimizer)] = optimizer, form_of(transform) if is_fixed(transform) else None
        return known[1]

    def of(self, segment: Segment, totals: Sequence[Tensor], due: Due) -> Source:
        """Return the source of the next request after those with ``totals``.

        Args:
            segment: A segment of any elements that the transform steps.
            totals: The totals that are known.
            due: The periodic work that is due.
        """
        form, unknown = self._form(segment.optimizer), Source(gradient_norm=False, pending=True)
        if form is None:
            return unknown if segment.is_whole else _source(segment, totals, due)
        key = (form, due, len(totals), segment.tensor.dtype, segment.is_part)
        if key not in self._found:
            if segment.is_whole and totals:
                return unknown
            self._found[key] = _source(segment, totals, due)
        return self._found[key]

    def in_periodic_work(self, segment: Segment) -> bool:
        """Whether a transform may make requests inside of periodic work. For a transform that needs whole tensors it is unknown."""
        optimizer = segment.optimizer
        known = self._in_work.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            if len(self._in_work) > MOST:
                self._in_work.clear()
            known = self._in_work[id(optimizer)] = optimizer, _requests_in_periodic_work(segment)
        return known[1]

    def kept(self, segment: Segment, number: int, total: Tensor) -> Tensor:
        """Return a total over several segments in memory that is the same at each step, so that code that reads it may run again.

        Args:
            segment: The first of them.
            number: How many totals came before it.
            total: The total.
        """
        if is_capturing():
            return total  # memory of a graph is the graph's
        held = self._totals.setdefault(segment, {})
        known = held.get(number)
        if known is None or (known.dtype, known.device) != (total.dtype, total.device) or known.shape != total.shape:
            known = held[number] = torch.empty_like(total)  # a total may be a tensor of the state
        return known.copy_(total)

    def note_end(self, segment: Segment, totals: Sequence[Tensor], due: Due) -> None:
        """Note that a transform made no request after these."""
        form = self._form(segment.optimizer)
        if form is not None:
            key = (form, due, len(totals), segment.tensor.dtype, segment.is_part)
            self._found[key] = Source(gradient_norm=False, pending=False)


def is_fixed(transform: eb.Transform[Any]) -> bool:
    """Whether a transform makes the same requests at every step with the same work due: those of this library do.

    One of a user's own may decide by its hyperparameters, its state or a total.
    """
    return all(is_of_library(type(one)) for one in transforms_in(transform) if one.reduces)


def _requests_in_periodic_work(segment: Segment) -> bool:
    every = periods(segment.optimizer.transform)
    if not every or segment.is_whole:
        return bool(every)
    answers: list[Due] = [(), *(tuple((period, due) for period in every) for due in (True, False))]
    return len({_count(segment, answer) for answer in answers}) > 1


def _count(segment: Segment, due: Due) -> int:
    totals: list[Tensor] = []
    while (found := _ask(segment, totals, due)[0]) is not None:
        totals.append(found.partial())
    return len(totals)


def form_of(transform: eb.Transform[Any]) -> Form:
    """Return the classes of a transform and of those inside it, with their choices; numbers do not change the requests."""
    return tuple(
        (type(node), *(value if isinstance(value, str | bool | None) else type(value) for value in _values(node)))
        for node in transforms_in(transform)
    )


def _values(node: Any) -> list[Any]:
    return [getattr(node, field.name) for field in fields_of(node)]


def _ask(segment: Segment, totals: Sequence[Tensor], due: Due) -> tuple[Pending | None, list[Tensor]]:
    """Run a transform without elements, or without values; return its open request, and the gradients that it was given."""
    optimizer = segment.optimizer
    if segment.is_whole:
        tensor = torch.empty_like(segment.tensor, device="meta")
        params, state = optimizer.decode([tensor], optimizer.init([tensor]))
    else:
        none = segment.cut(0, 0, lambda x: x)
        params, state = optimizer.decode([none.tensor], none.state)
    grads = [torch.empty_like(x) for x in params]
    ctx = eb.Context(pending=True, seed=optimizer.seed, due=due).at(state.step + 1)
    found: Any = optimizer.transform.update(grads, state.inner, params, ctx)
    found = advance(found, totals, holds_wholes=not segment.is_part)
    return found if isinstance(found, Pending) else None, grads


def _source(segment: Segment, totals: Sequence[Tensor], due: Due) -> Source:
    pending, grads = _ask(segment, totals, due)
    if pending is None:
        return Source(gradient_norm=False, pending=False)
    request = pending.request
    values = eb.tree.leaves(request.values) if isinstance(request, SumOfSquares) else []
    return Source(any(x is grads[0] for x in values), pending=True)
