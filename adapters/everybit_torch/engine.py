"""The engine under every front end: it steps stored segments of memory, whose members have names.

It knows no model, no hooks of autograd, no ``torch.optim``, and of other processes only the axis over which it reduces. A front end makes
groups and adds units to them; it translates hyperparameters into arguments of the groups' factories, and says when to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.stepping import Metrics, OptimizerState
from everybit_torch import byte_account
from everybit_torch.arguments import differ
from everybit_torch.asking import Reads
from everybit_torch.dtensors import Over, bits_of, local
from everybit_torch.entries import UnitStates
from everybit_torch.following import follow, require_followable
from everybit_torch.gradients import Gathered, Grads, MemberGradients, have_gradients, is_cut
from everybit_torch.groups import Group
from everybit_torch.host_counts import Due
from everybit_torch.joining import Joining
from everybit_torch.joint_steps import JointSteps, arranged, collected
from everybit_torch.members import ParameterTable
from everybit_torch.reductions import Part, find_totals, settle_due
from everybit_torch.stepping import Begun, PreparedStep, step_in_pieces
from everybit_torch.streams import is_capturing
from everybit_torch.units import CHUNK, Unit, init_state, write

Given = Mapping[int, Mapping[str, Tensor]]
"""Entries of state, by id of the parameter."""


class Engine:
    """Groups, their units, and what is kept for the members.

    Args:
        over: Of some parameters, what reductions over all of them go over; None: this process alone.
        torch_names: Names of slots, and what torch's optimizer calls them.
    """

    def __init__(
        self,
        over: Callable[[Sequence[Tensor]], Over | None],
        *,
        torch_names: Mapping[str, str] | None = None,
    ) -> None:
        self.groups: list[Group] = []
        self.units: list[Unit] = []
        self.states = UnitStates(torch_names=torch_names)
        """Return the state of each parameter, as views, and the entries that other code keeps beside it."""
        self.metrics: Metrics | None = None
        """Of the last step that was measured."""
        self.had_gradients = False
        """Whether the last step had some."""
        self.table: ParameterTable | None = None
        """Numbers of all parameters that share reductions, on all processes the same; None: the members of the units, in order. A front end
        sets it after it has added units, and whenever there are more parameters."""
        self.reads = Reads()
        self._joining: Joining[Unit] = Joining()
        self._joint, self._over = JointSteps(), over

    def __getstate__(self) -> dict[str, Any]:
        # Of the states that show what is in the units a front end saves what others keep there.
        # The table knows parameters by their ids.
        kept = {name: value for name, value in self.__dict__.items() if name != "states"}
        return kept | {"reads": Reads(), "table": None, "_joint": JointSteps()}

    # -- groups and units -----------------------------------------------------------------------------------------------------

    def optimizer_of(self, unit: Unit) -> eb.Optimizer[Any]:
        """The optimizer of a unit, as its masks and labels came out."""
        return self.groups[unit.group].optimizer_of(unit)

    def init_state(
        self,
        optimizer: eb.Optimizer[Any],
        tensor: Tensor,
        first: int | Blocks,
        *,
        chunk: int = CHUNK,
    ) -> OptimizerState[Any]:
        """The state of a unit before its first step, in memory where it belongs; computed ``chunk`` elements at a time."""
        return init_state(optimizer, tensor, first, chunk=chunk)

    def add(self, unit: Unit) -> None:
        """Step a unit from here on."""
        self.units.append(unit)
        self.groups[unit.group].steps[unit.tensor.dtype].elements += unit.tensor.numel()
        self.states.show(unit)
        self.table = None

    def describe(self, units: Sequence[Unit]) -> None:
        """Let those units say which parameters their elements belong to whose transform asks for numbers of each."""
        for unit in units:
            if self.optimizer_of(unit).per_tensor:
                if self.table is None:
                    self.table = ParameterTable.of(p for one in self.units for p in one.parameters)
                self.table.describe(unit)

    def cut(self, boundaries: Callable[[Unit], list[int]]) -> None:
        """Cut flat units, for good.

        Args:
            boundaries: The numbers of the members before which a flat unit is cut.
        """
        self._joining.forget()
        self._replace({id(unit): list(unit.split(at)) for unit in self.units if unit.flat and (at := boundaries(unit))})

    def _replace(self, parts: Mapping[int, list[Unit]]) -> None:
        """Put parts in the place of units, by id."""
        if parts:
            self.units = [part for unit in self.units for part in parts.get(id(unit), (unit,))]
        for part in (part for several in parts.values() for part in several):
            self.states.show(part)

    def follow_parameters(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Follow members that were given other memory since the last step, or bring them back; ``parameters`` returns all there are.

        Raises:
            RuntimeError: A member was given something else than other memory; the message says what. Nothing is changed.
        """
        if all(unit.in_place() for unit in self.units):
            return
        there = parameters()
        require_followable(self.units, there)
        self._joining.forget()
        self.units, changed = follow(self.units, there)
        for unit in changed:
            self.states.show(unit)

    # -- hyperparameters ------------------------------------------------------------------------------------------------------

    def follow(self, arguments: Sequence[dict[str, Any]]) -> None:
        """Step with these hyperparameters from here on; state that they need begins, and what they do not need is put aside.

        Args:
            arguments: For each group, its factory's.

        Raises:
            TypeError: A hyperparameter that is none.
            ValueError: A hyperparameter out of range, or one by which it cannot be told which state is carried over. Nothing is changed.
        """
        changes = [
            (group, new, group.build(new))
            for group, new in zip(self.groups, arguments, strict=True)
            if differ(new, group.arguments)
        ]
        plans = [
            (unit, plan)
            for group, new, optimizers in changes
            for unit, plan in group.plan_migrations(self.units, new, optimizers)
        ]
        for group, new, optimizers in changes:
            group.follow(new, optimizers)
        if plans:
            self._joining.forget()
        for unit, plan in plans:
            optimizer = self.optimizer_of(unit)
            unit.state, (unit.stored,) = plan.state, optimizer.formats([unit.tensor])
            self.states.follow(unit, plan.begun, plan.ended)

    # -- stepping -------------------------------------------------------------------------------------------------------------

    def prepare(self, known: Sequence[Tensor] = ()) -> PreparedStep:
        """Find the gradients, cut units between members with one and members without, and reduce: no weight is changed yet.

        Units that were cut so before are joined again where that is possible. Every process has to do it: all take part in the same
        reductions.

        Args:
            known: Answers to the first reductions of every transform that reduces.

        Raises:
            TypeError: A sparse gradient.
            RuntimeError: A unit that would be cut in a step that is captured in a CUDA graph.
        """
        work = collected(self.units)
        if is_capturing():
            self._joining.capture([(unit, [grad is not None for grad in grads]) for unit, grads in work])
        elif self._joining.is_needed or any(unit.flat and is_cut(grads) for unit, grads in work):
            self.units, made = self._joining.arrange(self.units, lambda unit: [g is not None for g in unit.collect()])
            for unit in made:
                self.states.show(unit)
            work = collected(self.units)
        reducing = [(unit, grads) for unit, grads in work if self.optimizer_of(unit).reduces]
        # A transform that reduces looks at all gradients before any is used.
        gathered = {
            id(unit): unit.gathered(cast(list[Tensor], grads)) for unit, grads in reducing if have_gradients(grads)
        }
        due = {
            id(unit): found
            for unit, grads in work
            if have_gradients(grads) and (found := self.groups[unit.group].due(unit))
        }
        totals = self._find_totals([unit for unit, _ in reducing], gathered, due, known)
        return PreparedStep(work, gathered, totals, due)

    def _find_totals(
        self, reducing: list[Unit], gathered: Mapping[int, Gathered], due: dict[int, Due], known: Sequence[Tensor]
    ) -> dict[str, list[Tensor]]:
        """Find the totals of the transforms' reductions over all units and processes, by source, in the order of the groups.

        Args:
            reducing: The units whose transform reduces.
            gathered: By id of the unit, the gradients of those that have some.
            due: By id of those, which periodic work is due; settled here, see :func:`~everybit_torch.reductions.settle_due`.
            known: The first of the totals of every transform.
        """
        if not reducing:
            return {}
        over = self._over([parameter for unit in reducing for parameter in unit.parameters])
        if over is None and not gathered:
            return {}
        by_source: dict[str, list[Unit]] = {}
        for unit in reducing:
            by_source.setdefault(self.groups[unit.group].source, []).append(unit)
        axis = eb.Local if over is None else over.axis
        totals: dict[str, list[Tensor]] = {}
        for source, units in by_source.items():
            if over is not None or any(unit.flat for unit in units):
                self.describe(units)
            else:
                # Each is a whole parameter of this process: numbers of each need no reduction.
                for unit in units:
                    unit.whole = unit.table = None
            if due:
                settle_due(
                    units, gathered, due, self.reads, self.optimizer_of, alone=over is None or over.axis.is_alone
                )
            totals[source] = find_totals(
                [self._part(one, gathered, due, over) for one in units], axis, self.reads, known
            )
        return totals

    def _part(self, unit: Unit, gathered: Mapping[int, Gathered], due: Mapping[int, Due], over: Over | None) -> Part:
        counted = over is None or not unit.parameters or over.counts(unit.parameters[0])
        group, grad = self.groups[unit.group], gathered.get(id(unit))
        find = group.partial_result if group.compiles(unit) else None
        return Part(self.optimizer_of(unit), unit, grad, counted, due.get(id(unit), ()), find)

    def step(self, prepared: PreparedStep, *, metrics: bool = False) -> None:
        """Carry a step out.

        Args:
            prepared: By :meth:`prepare`.
            metrics: Measure it.
        """
        total: Metrics | None = None
        over = self._over([p for unit in self.units for p in unit.parameters]) if metrics else None

        def known(unit: Unit) -> tuple[Sequence[Tensor], Due]:
            totals = prepared.totals.get(self.groups[unit.group].source, ()) if prepared.totals else ()
            return totals, prepared.due.get(id(unit), ())

        def begin(unit: Unit, grads: Grads) -> Begun | None:
            grad = prepared.gathered.get(id(unit))
            grad = unit.gathered(cast(list[Tensor], grads)) if grad is None else grad
            return Begun.of(self.optimizer_of(unit), unit, cast(Tensor, grad), *known(unit))

        with self._joining.stepping([unit for unit, grads in prepared.work if have_gradients(grads)]):
            for unit, grads, results, begun in arranged(prepared.work, self._joint, self.optimizer_of, begin):
                gathered, (totals, due) = prepared.gathered.pop(id(unit), None), known(unit)
                measured = self.step_unit(
                    unit, grads, totals, gathered, metrics=metrics, due=due, results=results, begun=begun
                )
                counted = over is None or not unit.parameters or over.counts(unit.parameters[0])
                if measured is not None and counted:
                    total = measured if total is None else added(total, measured)
        if not metrics:
            return
        if over is not None:
            total = Metrics.zero(self.units[0].state.step.device) if total is None else total
            total = eb.tree.map(over.axis.sum, total)
        self.metrics = total

    def step_unit(
        self,
        unit: Unit,
        grads: Grads,
        totals: Sequence[Tensor] = (),
        gathered: Gathered | None = None,
        *,
        metrics: bool = False,
        due: Due | None = None,
        results: Sequence[Tensor] = (),
        begun: Begun | None = None,
    ) -> Metrics | None:
        """Step a unit whose members have gradients, all or none.

        Args:
            unit: The unit.
            grads: Its members' gradients.
            totals: Of the transform's reductions.
            gathered: The gradients, if they were gathered already.
            metrics: Measure it.
            due: Which periodic work is due, as it was when the totals were found. None: for a unit that is stepped by itself.
            results: Of its joint work; none for a unit that is stepped by itself.
            begun: The step up to that work; None: it begins anew.
        """
        if not have_gradients(grads):
            return None
        group = self.groups[unit.group]
        if totals and not group.optimizer_of(unit).reduces:
            totals = ()
        compile = group.compiles(unit)
        periodic = group.due(unit) if due is None else due
        steps = unit.host_count.known(unit.state.step)

        def step(part: Unit, grad: Tensor) -> Metrics | None:
            return group.step(
                part, grad, compile=compile, metrics=metrics, totals=totals, due=periodic, answers=results
            )

        if begun is not None:
            measured = begun.finish(results, metrics=metrics)
        else:
            grad = unit.gathered(cast(list[Tensor], grads)) if gathered is None else gathered
            measured = self._step_pieces(unit, grad, step)
        if steps is not None:
            unit.host_count.note(unit.state.step, steps + 1)
        if unit.flat:
            # Autograd does not see that writing to the buffer changes the parameters; a graph that needs the old values must not run.
            torch.autograd.graph.increment_version(unit.parameters)
        return measured

    def _step_pieces(
        self, unit: Unit, grad: Gathered, step: Callable[[Unit, Tensor], Metrics | None]
    ) -> Metrics | None:
        if isinstance(grad, MemberGradients):
            return step_in_pieces(unit, grad, unit.pieces(0, stops=grad.stops()), step)
        return step(unit, grad)

    def last_metrics(self) -> Metrics:
        """Return the metrics of the last measured step, over all parameters; RuntimeError if there is none."""
        if self.metrics is None:
            raise RuntimeError("metrics: no step was measured yet; pass metrics=True, or set metrics_enabled = True.")
        return self.metrics

    # -- what is kept ---------------------------------------------------------------------------------------------------------

    def load(self, given: Given) -> None:
        """Write entries of state, by id of the parameter; parameters without any are as before their first step.

        Members to which different shared numbers are given, such as counts, are stepped apart from here on.
        """
        self._cut_by_shared_state(given)
        for unit in self.units:
            if any(id(parameter) not in given for parameter in unit.parameters):
                optimizer = self.optimizer_of(unit)
                write(unit.state, self.init_state(optimizer, unit.tensor, unit.first))
            for member in unit.members:
                own = unit.named_state(member)
                for name, value in given.get(id(member.parameter), {}).items():
                    if name in own:
                        own[name].copy_(local(value))

    def _cut_by_shared_state(self, given: Given) -> None:
        """Cut flat units between members to which different shared numbers are given."""

        def boundaries(unit: Unit) -> list[int]:
            # Of those that are given none: as before the first step.
            shared = Unit(0, none := unit.tensor[:0], [], self.optimizer_of(unit).init([none]), 0, True).shared_state()
            values = [
                [bits_of(given.get(id(p), {}).get(name, begun)) for name, begun in shared.items()]
                for p in unit.parameters
            ]
            return [number for number in range(1, len(values)) if values[number] != values[number - 1]]

        self.cut(boundaries)

    def bytes_table(self, others: Sequence[Tensor] = ()) -> dict[str, int]:
        """Bytes of the tensors that are allocated now, by use; ``others`` are parameters that are in no unit."""
        return byte_account.bytes_table(self.units, self.states, others)


def added(total: Metrics, measured: Metrics) -> Metrics:
    """Add what was measured elsewhere, maybe on another device."""
    return total + eb.tree.map(lambda x, like: x.to(like.device), measured, total)
