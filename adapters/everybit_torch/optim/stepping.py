"""A step of all parameters, in the order of events: gradients are looked at, totals found, and only then is a weight changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import Due
from everybit.stepping import Metrics
from everybit_torch.optim import common_numbers
from everybit_torch.optim.parameters import Parameters, Stepped
from everybit_torch.optim.visiting import Visit, Visited
from everybit_torch.placements import axis_of, is_primary_copy, mesh_of
from everybit_torch.segments import Partial, Run, Segment, Single, Work, find_totals
from everybit_torch.streams import is_capturing
from everybit_torch.torch_internals.dtensors import local
from everybit_torch.torch_internals.kernel_calls import KernelCalls, Prepared
from everybit_torch.torch_internals.kernel_lists import launches

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True, eq=False)
class Task:
    """Parameters that have gradients.

    Attributes:
        stepped: The parameters.
        grads: Their gradients, of this rank's parts.
        due: The periodic work that is due.
        totals: The totals of the transform's requests.
        gathered: The gradients in the shape of the segment's tensor, if they were gathered for totals.
    """

    stepped: Stepped
    grads: list[Tensor]
    due: Due = ()
    totals: Sequence[Tensor] = ()
    gathered: Tensor | None = None

    def gather(self) -> Tensor:
        """Return the gradients in the shape of the segment's tensor."""
        return self.stepped.of.gather(self.grads)


_GRAD = attrgetter("grad")

# -- 1: gradients; nothing is changed yet ---------------------------------------------------------------------------------------


def find_gradients(parameters: Parameters) -> tuple[list[Task], list[Visit]]:
    """Find the parameters that have gradients: those that are stepped here, and those that visit owners.

    Parameters of a bucket of which some have no gradient are stepped by themselves from here on: their counts of steps differ.

    Raises:
        TypeError: A sparse gradient.
        RuntimeError: A CUDA graph is being captured, and a bucket would come apart, or parameters visit. Or ranks have gradients for
            different parameters. Or some that visit have none, and their transform's estimate is one for all.
    """
    found = [(one, gradients(one)) for one in parameters.stepped]
    if mixed := [one for one, grads in found if len(grads) > 1 and len({grad is None for grad in grads}) > 1]:
        if is_capturing():
            raise RuntimeError(
                f"{mixed[0].names[0]}: a CUDA graph is being captured, and of the parameters that are stepped together with it some have no"
                " gradient now; accepted is a step before the capture in which the same parameters have gradients."
            )
        parameters.come_apart(mixed)
        found = [(one, gradients(one)) for one in parameters.stepped]
    tasks = [Task(one, cast("list[Tensor]", grads)) for one, grads in found if grads[0] is not None]
    for task in tasks:
        if task.stepped.of.segment.optimizer.periods:
            task.due = task.stepped.steps.due(task.stepped.of.segment)
    visits = [Visit(one, one.gradients()) for one in parameters.visiting]
    if visits and is_capturing():
        raise RuntimeError(
            "step: a CUDA graph is being captured, and rows of parameters that are stepped whole travel between ranks, as in no replay;"
            " accepted are steps outside of graphs."
        )
    for visit in visits:
        visit.visiting.prepare(visit.grads)
    if visits:
        common_numbers.require_all(parameters, [task.stepped for task in tasks], visits)
    return tasks, [one for one in visits if any(grad is not None for grad in one.grads)]


def gradients(one: Stepped) -> list[Tensor | None]:
    """Return the gradients of parameters; None for a parameter without.

    Raises:
        TypeError: A sparse gradient.
    """
    grads: list[Tensor | None] = [*map(_GRAD, one.of.parameters)]
    for number, grad in enumerate(grads):
        if grad is not None and grad.layout is not torch.strided:
            raise TypeError(
                f"{one.names[number]}: got a {grad.layout} gradient; accepted are dense gradients (torch.nn.Embedding(sparse=False), or"
                " torch.optim.SparseAdam for sparse ones)."
            )
    return [None if grad is None else local(grad) for grad in grads] if one.of.is_sharded else grads


# -- 2: totals; a collective, if a transform requests any -----------------------------------------------------------------------


def add_totals(parameters: Parameters, tasks: Sequence[Task], visits: Sequence[Visit]) -> None:
    """Find the totals that transforms request, and give them to those that are stepped by them."""
    reducing = [task for task in tasks if task.stepped.of.segment.optimizer.reduces]
    sources = [task.stepped.group.source for task in reducing]
    sources += [one.group.source for visit in visits for one in visit.visiting.members if one.optimizer.reduces]
    for source in dict.fromkeys(sources):
        several = [task for task in reducing if task.stepped.group.source == source]
        _add_totals(parameters, several, [visit for visit in visits if visit.visiting.source == source])


def _add_totals(parameters: Parameters, tasks: Sequence[Task], visits: Sequence[Visit]) -> None:
    """Find the totals of one source's requests.

    The norm of a parameter that visits is computed from this rank's rows, if it is the only request.
    """
    plain = (eb.Local, True) if parameters.ranks is None else parameters.ranks
    wholes = [task.stepped.of for task in tasks]
    axes = [parameters.axis_and_counts(of.parameters[0]) if of.is_sharded else plain for of in wholes]
    _settle_due(parameters, tasks, visits, is_alone=not visits and all(axis is eb.Local for axis, _ in axes))
    finds: dict[int, Callable[[Tensor, Sequence[Tensor], Due], Partial | None]] = {}
    work: list[Work] = []
    receivers: list[Task | Visit] = []
    for task, (axis, counts) in zip(tasks, axes, strict=True):
        one, task.gathered = task.stepped, task.gather()
        work.append(Work(one.of.segment, task.gathered, task.due, counts, axis))
        receivers.append(task)
        finds[id(one.of.segment)] = partial(one.steps.find, one.of.segment, decision=one.decision)
    for visit in visits:
        for member, grad in zip(visit.visiting.members, visit.grads, strict=True):
            if grad is None or not member.optimizer.reduces:
                continue
            shadow = member.visitor.shadow()
            axis, counts = parameters.axis_and_counts(member.parameter)
            work.append(Work(shadow, grad if counts else grad[:0], axis=axis))  # else the owner contributes
            receivers.append(visit)
            finds[id(shadow)] = partial(_at_owner, visit, member)

    def find(segment: Segment, grad: Tensor, totals: Sequence[Tensor], due: Due) -> Partial | None:
        return finds[id(segment)](grad, totals, due)

    for receiver, totals in zip(receivers, find_totals(work, find, parameters.sources), strict=True):
        receiver.totals = totals


def _settle_due(parameters: Parameters, tasks: Sequence[Task], visits: Sequence[Visit], *, is_alone: bool) -> None:
    """Let all parameters and processes decide alike where it depends on due work which requests a transform makes.

    Parameters may have different counts, and no process knows those of others. Where decisions may differ the device decides.
    """
    if is_alone and len({task.due for task in tasks}) == 1:
        return
    visited = [one for visit in visits for one in visit.visiting.members if one.optimizer.reduces]
    segments = [*(task.stepped.of.segment for task in tasks), *(one.visitor.shadow() for one in visited)]
    if any(parameters.sources.in_periodic_work(segment) for segment in segments):
        for task in tasks:
            task.due = ()
        for one in visited:
            one.due = ()


def _at_owner(
    visit: Visit,
    member: Visited,
    grad: Tensor,  # noqa: ARG001  # that of the rows
    totals: Sequence[Tensor],
    due: Due,  # noqa: ARG001  # the owner knows
) -> Partial | None:
    return visit.visiting.contribution(member, visit.grads, totals)


# -- 3: steps -------------------------------------------------------------------------------------------------------------------


def step(
    parameters: Parameters, tasks: Sequence[Task], visits: Sequence[Visit], *, metrics: bool = False
) -> Metrics | None:
    """Carry a step out.

    Args:
        parameters: All there are.
        tasks: Those that have gradients, and are stepped here.
        visits: Those that visit owners.
        metrics: Whether to measure it.

    Returns:
        The metrics of the parameters on this rank.
    """
    measured: Metrics | None = None
    mesh = measured_mesh(parameters) if metrics else None
    watch, written = parameters.watch, _written(tasks, visits) if parameters.watch is not None else []
    if watch is not None:
        watch.look(written)
    # Of a tensor that must stay whole another rank may have all of it.
    here = [task for task in tasks if not task.stepped.of.segment.is_whole or task.stepped.of.numel]
    if here and not here[0].stepped.of.segment.tensor.is_cpu:
        # The longest first: Triton measures how to divide the first that code is made for, and divides all others alike.
        here.sort(key=lambda task: task.stepped.of.numel, reverse=True)
    for host in (parameters.hosts or {}).values():
        host.begin([task.stepped.of.segment for task in here if task.stepped.of.segment.host is host])
    if not metrics and not torch.compiler.is_compiling():
        ready = _ReadyCalls()
        here = [task for task in here if not ready.add(task)]
        ready.call()
    for task in here:
        grad, task.gathered = task.gather() if task.gathered is None else task.gathered, None
        found = step_one(task, grad, metrics=metrics)
        if found is not None and is_counted(task.stepped, mesh):
            measured = found if measured is None else added(measured, found)
    for host in (parameters.hosts or {}).values():
        host.finish()
    if any(task.stepped.of.segment.optimizer.common for task in tasks):
        common_numbers.spread(parameters.stepped, [task.stepped for task in tasks])
    for visit in visits:
        device = local(visit.visiting.members[0].parameter).device
        totals = [x.to(device) for x in visit.totals]
        found = visit.visiting.step(visit.grads, totals, metrics=metrics)
        if found is not None:
            measured = found if measured is None else added(measured, found)
    if watch is not None:
        watch.note(written)
    return measured


def _written(tasks: Sequence[Task], visits: Sequence[Visit]) -> list[Tensor]:
    """The parameters that a step writes to."""
    visited = [member.parameter for visit in visits for member in visit.visiting.members]
    return [parameter for task in tasks for parameter in task.stepped.of.parameters] + visited


class _ReadyCalls:
    """The calls that step segments as they were stepped last.

    A long segment empties the caches, and Python between two of them takes five times as long. So calls are prepared before the first,
    and writes are counted after the last.
    """

    def __init__(self) -> None:
        self._calls: list[Prepared] = []
        # On a GPU, with their gradients, by their graphs.
        self._queued: dict[int, tuple[list[KernelCalls], list[Tensor]]] = {}
        self._written: list[Tensor] = []  # unseen by autograd
        self._counted: list[tuple[Segment, int]] = []  # and the earlier steps, which the host knows

    def add(self, task: Task) -> bool:
        """Prepare the call for parameters that are stepped where they lie. False: their code is found at their turn."""
        one, of, segment = task.stepped, task.stepped.of, task.stepped.of.segment
        if not isinstance(of, (Single, Run)):
            return False
        grad = task.grads[0] if isinstance(of, Single) else task.gather() if task.gathered is None else task.gathered
        call = one.steps.again(segment, grad, task.totals, one.decision, task.due)
        if call is None:
            return False
        if (before := segment.count.known(segment.state.step)) is not None:
            self._counted.append((segment, before))
        if isinstance(call, KernelCalls):
            if call.queue is None:
                self._calls += call.prepared(grad)
            else:
                calls, grads = self._queued.setdefault(id(call.graph), ([], []))
                calls.append(call)
                grads.append(grad)
            self._written += call.written
        else:
            self._calls.append((call, [grad]))
        return True

    def call(self) -> None:
        """Step the segments."""
        for calls, grads in self._queued.values():
            self._calls += launches(calls, grads)
        for call, arguments in self._calls:
            call(*arguments)
        if self._written:
            torch.autograd.graph.increment_version(self._written)
        for segment, before in self._counted:
            segment.note_step(before)


def measured_mesh(parameters: Parameters) -> DeviceMesh | None:
    """Return the mesh over which metrics are added up; see :func:`~everybit_torch.placements.mesh_of`."""
    return mesh_of([p for one in parameters.stepped for p in one.of.parameters])


def is_counted(one: Stepped, mesh: DeviceMesh | None) -> bool:
    """Whether the metrics of parameters count on this rank, of those with equal elements."""
    return mesh is None or is_primary_copy(one.of.parameters[0], mesh)


def step_one(task: Task, grad: Tensor, *, metrics: bool = False) -> Metrics | None:
    """Step some parameters at once."""
    one, segment = task.stepped, task.stepped.of.segment
    here = [x if x.device == segment.tensor.device else x.to(segment.tensor.device) for x in task.totals]
    found = one.steps.step(segment, grad, here, decision=one.decision, due=task.due, metrics=metrics)
    one.of.scatter()
    return found


def over_all(
    parameters: Sequence[Tensor], measured: Metrics | None, ranks: tuple[eb.Axis, bool] | None = None
) -> Metrics | None:
    """Add up metrics over the processes that have parts of the parameters. Collective.

    Args:
        parameters: The parameters.
        measured: The metrics of the parts on this rank.
        ranks: The processes that have the other parts of plain tensors; see :class:`~everybit_torch.optim.parameters.Parameters`.

    Raises:
        ValueError: The parameters lie on several meshes.
    """
    mesh = mesh_of(parameters)
    if mesh is None and ranks is None:
        return measured
    if measured is None:
        measured = Metrics.zero(local(parameters[0]).device)
    axis = ranks[0] if mesh is None and ranks is not None else axis_of(cast("DeviceMesh", mesh))
    return eb.tree.map(axis.sum, measured)


def added(total: Metrics, measured: Metrics) -> Metrics:
    """Add metrics, maybe from another device."""
    return total + eb.tree.map(lambda x, like: x.to(like.device), measured, total)
