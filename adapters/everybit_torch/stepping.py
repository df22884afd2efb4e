"""One step of one unit without a compiler: the pure step of the core, written over what went in, at once or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import everybit as eb
from everybit.base import FirstElement
from everybit.protocol import Pending, advance, require_done, with_results
from everybit.stepping import Metrics, OptimizerState, StepTrace
from everybit.stepping.metrics import measure
from everybit_torch.gradients import Gathered, Grads, have_gradients
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of
from everybit_torch.units import Unit, write

# Elements stepped at a time without a compiler: the temporaries of one operation fit into a core's cache.
PIECE = 1 << 18
# On an accelerator: large enough for kernels to be worth their launch, small enough to be no second copy of a model.
DEVICE_PIECE = 1 << 24
# Elements stepped at a time on a CPU by compiled code that gives each element a number of its parameter: those numbers are written out.
EXPANDED_PIECE = 1 << 20


class Parts(Protocol):
    """A gradient of which there are parts."""

    def __getitem__(self, where: slice, /) -> Tensor:
        """The part for a piece."""
        ...


def piece_size(device: torch.device) -> int:
    """Elements stepped at a time on a device without a compiler."""
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE


def step_in_place(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    first: FirstElement,
    *,
    metrics: bool,
    totals: Sequence[Tensor] = (),
    members: tuple[eb.Members, ...] | None = None,
    due: Due = (),
    answers: int = 0,
) -> Metrics | None:
    """The pure step, and its results written over what went in; compiled, the writes become in-place stores.

    The last ``answers`` of the ``totals`` are the results of joint work.
    """
    ctx = eb.Context(first_element=first, members=members, due=due, joint=answers > 0)
    totals, results = totals[: len(totals) - answers], totals[len(totals) - answers :]
    begun = begin(optimizer, tensors, grads, state, ctx, totals)
    return finish(optimizer, tensors, state, begun, ctx, metrics=metrics, results=results)


def begin(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any],
    ctx: eb.Context,
    totals: Sequence[Tensor],
) -> Any:
    """Run the pure step with the totals of its reductions: return its trace, or the step that waits for joint work."""
    return advance(optimizer.step_traced(tensors, grads, state, replace(ctx, pending=len(totals) > 0)), totals)


def finish(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    state: OptimizerState[Any],
    begun: Any,
    ctx: eb.Context,
    *,
    metrics: bool,
    results: Sequence[Tensor] = (),
) -> Metrics | None:
    """Go on with a step that :func:`begin` returned, with the results of its joint work, and write it over what went in."""
    trace: StepTrace = require_done(with_results(begun, [results] if results else []), optimizer.transform)
    # What is measured of the parts is added up afterwards.
    measured = measure(optimizer, trace, ctx) if metrics else None
    write((tensors, state), (trace.params, trace.state))
    return measured


class Begun(NamedTuple):
    """A unit's step that waits for joint work.

    Attributes:
        optimizer: Of the step.
        unit: The unit.
        ctx: Of the step.
        pending: The rest of the step, with its request.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    ctx: eb.Context
    pending: Pending

    @classmethod
    def of(
        cls, optimizer: eb.Optimizer[Any], unit: Unit, grad: Tensor, totals: Sequence[Tensor], due: Due
    ) -> Begun | None:
        """Run a unit's step up to its first joint work; None if it has none.

        Args:
            optimizer: That steps it.
            unit: The unit.
            grad: In the shape of its tensor.
            totals: Of the transform's reductions.
            due: Which periodic work is due.
        """
        ctx = eb.Context(first_element=unit.first, members=members_of(unit), due=due, joint=True)
        here = [x.to(unit.tensor.device) for x in totals]
        found = begin(optimizer, [unit.tensor], [grad], unit.state, ctx, here)
        return cls(optimizer, unit, ctx, found) if isinstance(found, Pending) else None

    def finish(self, results: Sequence[Tensor], *, metrics: bool) -> Metrics | None:
        """Finish the step with the results of the work."""
        tensors, state = [self.unit.tensor], self.unit.state
        return finish(self.optimizer, tensors, state, self.pending, self.ctx, metrics=metrics, results=results)


class Ready(NamedTuple):
    """A unit that can be stepped.

    Attributes:
        unit: The unit.
        grads: Of its members.
        results: Of its joint work.
        begun: Its step up to that work; None: it begins anew.
    """

    unit: Unit
    grads: Grads
    results: list[Tensor]
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step of all units that was judged, with the totals of its reductions.

    Attributes:
        work: All units, with their members' gradients: all or none.
        gathered: By id of a unit whose transform reduces, its gradient.
        totals: By source, the totals of its reductions.
        due: By id of a unit, which periodic work is due; see ``Engine.step_unit``.
    """

    work: list[tuple[Unit, Grads]]
    gathered: dict[int, Gathered]
    totals: dict[str, list[Tensor]]
    due: dict[int, Due]

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has one."""
        return any(have_gradients(grads) for _, grads in self.work)


def step_unit(
    optimizer: eb.Optimizer[Any],
    unit: Unit,
    grad: Gathered,
    *,
    metrics: bool,
    totals: Sequence[Tensor] = (),
    due: Due = (),
    answers: int = 0,
) -> Metrics | None:
    """Step a unit: a long buffer piece by piece, so that temporaries stay in the cache."""

    def step(part: Unit, grad: Tensor) -> Metrics | None:
        return step_in_place(
            optimizer,
            [part.tensor],
            [grad],
            part.state,
            part.first,
            metrics=metrics,
            totals=totals,
            members=members_of(part),
            due=due,
            answers=answers,
        )

    elements = piece_size(unit.tensor.device)
    if unit.flat and unit.tensor.numel() > elements:
        return step_in_pieces(unit, grad, unit.pieces(elements), step)
    return step(unit, grad if isinstance(grad, Tensor) else grad[:])


def step_in_pieces(
    unit: Unit,
    grad: Parts,
    pieces: Iterable[tuple[slice, Unit]],
    step: Callable[[Unit, Tensor], Metrics | None],
) -> Metrics | None:
    """Step a flat unit piece by piece. The pieces' results are the whole's, bit for bit: that is what a transform promises that may be cut.

    Args:
        unit: The whole.
        grad: Of the shape of its tensor.
        pieces: Of the unit; counts and other shared state are copies, and those of the last piece are kept.
        step: Steps a piece in place.
    """
    total: Metrics | None = None
    last: Unit | None = None
    for where, last in pieces:
        measured = step(last, grad[where])
        if measured is not None:
            total = measured if total is None else total + measured
    if last is not None:
        write(unit.shared_state(), last.shared_state())
    return total
