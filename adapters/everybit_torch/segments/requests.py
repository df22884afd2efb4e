"""The requests that a transform makes, and what each is computed from: found by a run on a tensor without elements.

Transforms of this library make the same requests at every step. For them this is found once, so that a step need not run them to learn that
the norm of the gradients is all they request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators import Lookahead, LowRank
from everybit.protocol import Pending, SumOfSquares, advance, enter, fields_of, periods, transforms_in
from everybit_torch.host_counts import Due
from everybit_torch.segments.segment import Segment

WEIGHTS = "params"
"""The name of the weights among the inputs of a request; the others go by the names of their slots."""

_READ_WEIGHTS = (Lookahead, LowRank)
"""Combinators of this library that read weights themselves; the others leave that to the transforms inside."""


Form = tuple[object, ...]
"""The classes of a transform and of those inside it, with their choices."""

MOST = 64
"""Optimizers of which the form is kept."""


class Source(NamedTuple):
    """What a request is computed from.

    Attributes:
        names: Slots, and maybe :data:`WEIGHTS`; None: it is not known.
        gradient_norm: Whether the contribution is the sum of the squares of the gradients as they came.
        pending: Whether there is a request: False if the transform makes none after those that are answered.
    """

    names: frozenset[str] | None
    gradient_norm: bool
    pending: bool


class Sources:
    """What the requests of transforms are computed from, found once for each."""

    def __init__(self) -> None:
        self._found: dict[object, Source] = {}
        self._forms: dict[int, tuple[eb.Optimizer[Any], Form | None]] = {}
        self._in_work: dict[int, tuple[eb.Optimizer[Any], bool]] = {}

    def _form(self, optimizer: eb.Optimizer[Any]) -> Form | None:
        """What transforms with the same requests at every step have in common; None: a transform whose requests may change."""
        known = self._forms.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            if len(self._forms) > MOST:
                self._forms.clear()  # optimizers are made anew when hyperparameters change
            transform = optimizer.transform
            known = self._forms[id(optimizer)] = optimizer, form_of(transform) if is_fixed(transform) else None
        return known[1]

    def of(self, segment: Segment, totals: Sequence[Tensor], due: Due) -> Source:
        """Return the source of the first request after those that ``totals`` answer.

        Args:
            segment: Of any elements that the transform steps.
            totals: The totals that are known.
            due: The periodic work that is due.
        """
        form, unknown = self._form(segment.optimizer), Source(None, gradient_norm=False, pending=True)
        if form is None:
            return unknown if segment.is_whole else _source(segment, totals, due)
        key = (form, due, len(totals), segment.tensor.dtype, segment.members is None)
        if key not in self._found:
            if segment.is_whole and totals:
                return unknown
            self._found[key] = _first_of_whole(segment) if segment.is_whole else _source(segment, totals, due)
        return self._found[key]

    def in_periodic_work(self, segment: Segment) -> bool:
        """Whether a transform may make requests inside of periodic work. Of one that needs whole tensors it is not known."""
        optimizer = segment.optimizer
        known = self._in_work.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            if len(self._in_work) > MOST:
                self._in_work.clear()
            known = self._in_work[id(optimizer)] = optimizer, _requests_in_periodic_work(segment)
        return known[1]

    def note_end(self, segment: Segment, totals: Sequence[Tensor], due: Due) -> None:
        """Note that a transform made no request after these."""
        form = self._form(segment.optimizer)
        if form is not None:
            key = (form, due, len(totals), segment.tensor.dtype, segment.members is None)
            self._found[key] = Source(frozenset(), gradient_norm=False, pending=False)


def is_fixed(transform: eb.Transform[Any]) -> bool:
    """Whether a transform makes the same requests at every step: those of this library do.

    One of a user's own may decide by its hyperparameters, its state or a total.
    """
    reducing = (one for one in transforms_in(transform) if one.reduces)
    return not periods(transform) and all(map(is_ours, reducing))


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
    """Return the classes of a transform and of those inside it, with their choices; numbers do not change what is requested."""
    return tuple(
        (type(node), *(value if isinstance(value, str | bool | None) else type(value) for value in _values(node)))
        for node in transforms_in(transform)
    )


def _values(node: Any) -> list[Any]:
    return [getattr(node, field.name) for field in fields_of(node)]


def is_ours(transform: object) -> bool:
    """Whether a transform is of this library."""
    return type(transform).__module__.partition(".")[0] in ("everybit", "everybit_torch")


def _ask(segment: Segment, totals: Sequence[Tensor], due: Due) -> tuple[Pending | None, set[str], list[Tensor]]:
    """Run a transform without elements; return its pending request, what it read until then, and the gradients that it was given."""
    optimizer = segment.optimizer
    none = segment.cut(0, 0, lambda x: x)
    params, state = optimizer.decode([none.tensor], none.state)
    grads = [torch.empty_like(x) for x in params]
    names: set[str] = set()

    def note(transform: eb.Transform[Any], state: Any) -> None:
        names.update(reads_of(transform, state))

    ctx = eb.Context(
        members=none.members, pending=True, requests_only=True, entered=note, seed=optimizer.seed, due=due
    ).at(state.step + 1)
    result: Any = advance(enter(optimizer.transform, grads, state.inner, params, ctx, lambda *_: None), totals)
    return result if isinstance(result, Pending) else None, names, grads


def _source(segment: Segment, totals: Sequence[Tensor], due: Due) -> Source:
    pending, names, grads = _ask(segment, totals, due)
    if pending is None:
        return Source(frozenset(), gradient_norm=False, pending=False)
    request = pending.request
    values = eb.tree.leaves(request.values) if isinstance(request, SumOfSquares) else []
    return Source(frozenset(names), any(x is grads[0] for x in values), pending=True)


class _ReachedError(Exception):
    """A transform that needs whole tensors is about to run."""


def _first_of_whole(segment: Segment) -> Source:
    """Find out whether a transform of whole tensors requests the norm of the gradients before anything else."""
    optimizer, tensor = segment.optimizer, torch.empty_like(segment.tensor, device="meta")
    params, state = optimizer.decode([tensor], optimizer.init([tensor]))
    grads = [torch.empty_like(x) for x in params]

    def note(transform: eb.Transform[Any], _: Any) -> None:
        if len(list(transforms_in(transform))) == 1 and transform.cut == "tensor":
            raise _ReachedError

    ctx = eb.Context(pending=True, requests_only=True, entered=note, seed=optimizer.seed).at(state.step + 1)
    try:
        found: Any = enter(optimizer.transform, grads, state.inner, params, ctx, lambda *_: None)
    except _ReachedError:
        found = None
    request = found.request if isinstance(found, Pending) else None
    values = eb.tree.leaves(request.values) if isinstance(request, SumOfSquares) else []
    return Source(None, any(x is grads[0] for x in values), pending=True)


def reads_of(transform: eb.Transform[Any], state: Any) -> set[str]:
    """Return the slots that a transform decodes itself, and :data:`WEIGHTS` if it reads these."""
    if is_ours(transform) and len(list(transforms_in(transform))) > 1:
        # Transforms inside are entered by themselves.
        names = {name for name, is_slot in (eb.tree.slot_fields(state) or {}).items() if is_slot}
        return names | {WEIGHTS} if isinstance(transform, _READ_WEIGHTS) else names
    names = set()

    def note(name: str, slot: Any) -> Any:
        names.add(name)
        return slot

    eb.tree.map_slots(note, state)
    return names | {WEIGHTS} if getattr(transform, "reads_weights", True) else names
