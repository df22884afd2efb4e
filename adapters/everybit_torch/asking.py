"""The reductions that a transform requests, and the slots and weights from which each of them is computed.

Both are found by running the transform on tensors without elements. A request is computed from what the transforms hold that are entered
before it: their slots, and the weights if one of them reads these. Transforms of this library make the same requests at every step, so that
they are run once, and need not be run for the norm of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import everybit as eb
from everybit.base import FirstElement
from everybit.combinators import needs_whole_tensors
from everybit.protocol import Pending, SumOfSquares, advance, enter, periods
from everybit.protocol.requests import Kind
from everybit.stepping import OptimizerState
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of, no_members_of
from everybit_torch.segments.requests import form_of, is_fixed, reads_of
from everybit_torch.units import Unit, map_state


class Source(NamedTuple):
    """The inputs from which a transform computes a reduction.

    Attributes:
        names: Of slots, and maybe :data:`WEIGHTS`.
        gradient_norm: Whether the partial result is the sum of the squares of the gradients as they came: that needs no run of the
            transform, and no wider copy of the gradients.
        pending: Whether there is such a reduction: False if the transform makes no request after those that are answered.
    """

    names: frozenset[str]
    gradient_norm: bool
    pending: bool


class _Promises(NamedTuple):
    """The reductions that a transform requests at every step.

    Attributes:
        form: Identifies transforms with the same requests at every step; None: a transform whose requests may change.
        whole: Whether it must see whole tensors.
        in_periodic_work: Whether it may make requests inside of periodic work.
    """

    form: tuple[object, ...] | None
    whole: bool
    in_periodic_work: bool

    @property
    def fixed(self) -> bool:
        """Whether its reductions are always the same."""
        return self.form is not None


class Reads:
    """The inputs of transforms' reductions, found once for each reduction and for each set of due periodic work."""

    def __init__(self) -> None:
        self._promises: list[tuple[eb.Optimizer[Any], _Promises]] = []
        self._sources: dict[object, Source] = {}

    def promises(self, optimizer: eb.Optimizer[Any], unit: Unit) -> _Promises:
        """Return what the steps of an optimizer have in common.

        It may make requests inside of periodic work if it makes another number of them where nothing is decided, which does all work, than
        where everything is due, or where nothing is. One that must see whole tensors is not run, and may.
        """
        for known, promises in self._promises:
            if known is optimizer:
                return promises
        whole, all_periods = needs_whole_tensors(optimizer.transform), periods(optimizer.transform)
        answers: list[Due] = [(), *(tuple((period, due) for period in all_periods) for due in (True, False))]
        promises = _Promises(
            form_of(optimizer.transform) if is_fixed(optimizer.transform) else None,
            whole,
            bool(all_periods)
            and (whole or len({_count_reductions(optimizer, unit, answer) for answer in answers}) > 1),
        )
        # Optimizers are made anew when hyperparameters change; the present ones stay.
        self._promises = [*self._promises[-15:], (optimizer, promises)]
        return promises

    def of(self, optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due = ()) -> Source:
        """Return the source of the pending reduction, which comes after those that ``totals`` answer."""
        form = self.promises(optimizer, unit).form
        if form is None:
            return _source(optimizer, unit, totals, due)
        key = (form, due, len(totals), unit.whole is None)
        if key not in self._sources:
            self._sources[key] = _source(optimizer, unit, totals, due)
        return self._sources[key]


def _source(optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due) -> Source:
    """Run the transform on a chunk without elements, and note the transforms that are entered."""
    tensor, held = without_elements(unit)
    params, state = optimizer.decode([tensor], held)
    grads = [torch.empty_like(x) for x in params]
    names: set[str] = set()

    def note(transform: eb.Transform[Any], state: Any) -> None:
        names.update(reads_of(transform, state))

    ctx = eb.Context(
        pending=True, requests_only=True, entered=note, members=no_members_of(unit), seed=optimizer.seed, due=due
    ).at(state.step + 1)
    result: Any = advance(enter(optimizer.transform, grads, state.inner, params, ctx, lambda *_: None), totals)
    if not isinstance(result, Pending):
        return Source(frozenset(), gradient_norm=False, pending=False)
    values = eb.tree.leaves(result.request.values) if isinstance(result.request, SumOfSquares) else []
    return Source(frozenset(names), any(x is grads[0] for x in values), pending=True)


class Partial(NamedTuple):
    """The contribution of some elements to a reduction.

    Attributes:
        kind: ``"sum"`` or ``"max"``.
        value: The contribution.
    """

    kind: Kind
    value: Tensor


def ask_without_elements(
    optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor], due: Due
) -> Partial | None:
    """Run a transform on a chunk of a unit without elements; return the reduction that ``totals`` do not answer, None if there is none."""
    tensor, state = without_elements(unit)
    if needs_whole_tensors(optimizer.transform):
        # The state of a matrix is not that of a vector.
        state = optimizer.init([tensor])
    none = torch.empty_like(tensor, dtype=torch.float32)
    ctx = eb.Context(pending=True, requests_only=True, members=no_members_of(unit), due=due)
    # Where there are no elements nothing has to be decoded.
    return _partial(optimizer.ask([tensor], [none], state, ctx, totals=totals, reads=frozenset()))


def _partial(pending: Pending | None) -> Partial | None:
    return None if pending is None else Partial(pending.kind, pending.partial())


def _count_reductions(optimizer: eb.Optimizer[Any], unit: Unit, due: Due) -> int:
    totals: list[Tensor] = []
    while (found := ask_without_elements(optimizer, unit, totals, due)) is not None:
        totals.append(found.value)
    return len(totals)


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
) -> Partial | None:
    """The contribution of elements of a unit to the first reduction that ``totals`` do not answer; a function that can be compiled."""
    ctx = eb.Context(
        first_element=first, pending=True, requests_only=True, contributes=counted, members=members, due=due
    )
    return _partial(optimizer.ask(tensors, grads, state, ctx, totals=totals, reads=reads))


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
) -> Partial | None:
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
