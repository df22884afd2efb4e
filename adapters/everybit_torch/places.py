"""Where the parameters of param groups lie: which have a unit of the engine's, and which wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from everybit.base import torch_dtype
from everybit.combinators import needs_whole_tensors
from everybit.policies import resolve_tree
from everybit_torch.dtensors import first_element, local
from everybit_torch.engine import Engine
from everybit_torch.gradients import GradientBuffer
from everybit_torch.groups import Optimizers
from everybit_torch.members import ParameterTable
from everybit_torch.placement import Placement, Run, Settled, is_settled, plan_placement
from everybit_torch.units import Unit, flatten, laid_out, numbered

ParamGroups = Sequence[Mapping[str, Any]]


class Places:
    """Places parameters when it is asked to, so that a model may still be moved or swapped before the first step.

    Args:
        engine: That steps them.
        allow_flat: Whether parameters may become views of a buffer.
        flat_gradients: Whether their gradients lie in a buffer, too.
    """

    def __init__(self, engine: Engine, *, allow_flat: bool, flat_gradients: bool) -> None:
        self._engine, self._allow_flat, self._flat_gradients = engine, allow_flat, flat_gradients
        self._settled: list[Settled] = []
        self._counted: dict[torch.dtype, int] = {}
        self._first_elements: dict[Tensor, int] = {}  # where a model was named

    def add_group(self) -> None:
        """There is one more param group."""
        self._settled.append(Settled())

    def is_settled(self, number: int) -> bool:
        """Whether any parameter of a group was placed, or numbered."""
        return bool(self._settled[number].known)

    def waiting(self, number: int) -> list[Tensor]:
        """The parameters of a group that are frozen, and have nothing but numbers."""
        return [parameter for parameter, _ in self._settled[number].waiting]

    def all_waiting(self) -> list[Tensor]:
        """Those of all groups."""
        return [parameter for number in range(len(self._settled)) for parameter in self.waiting(number)]

    # -- placing --------------------------------------------------------------------------------------------------------------

    def plan(
        self, param_groups: ParamGroups, wanted: frozenset[int], optimizers: Sequence[Optimizers] | None = None
    ) -> Placement | None:
        """Plan the placement of parameters, without changing anything; None if there is nothing to place.

        Args:
            param_groups: All there are.
            wanted: Parameters, by id, that get state although they are frozen.
            optimizers: For each group, by dtype; None: its present ones.

        Raises:
            RuntimeError: Parameters were cast since the optimizer was made, or taken out of a param group since the first step.
            ValueError: Parameters that cannot be stepped where they lie.
        """
        if is_settled(self._settled, [values["params"] for values in param_groups], wanted):
            return None
        present = [group.optimizers for group in self._engine.groups]
        return plan_placement(
            self._settled,
            present if optimizers is None else optimizers,
            param_groups,
            self._counted,
            self._first_elements,
            wanted,
            allow_flat=self._allow_flat,
        )

    def require_capturable(
        self, param_groups: ParamGroups, arguments_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        """Refuse a step that is captured in a CUDA graph, if more had to be done than is to be done again at every replay.

        Args:
            param_groups: All there are.
            arguments_of: From a param group to its factory's arguments.

        Raises:
            RuntimeError: A parameter that was not stepped before, or a hyperparameter that has changed since.
            ValueError: A hyperparameter that is a tensor on another device.
        """
        if any("policy" in values for values in param_groups) or self.plan(param_groups, frozenset()) is not None:
            raise RuntimeError(
                "step: a CUDA graph is being captured, and there are parameters that were not stepped yet, whose state every replay would"
                " begin anew; accepted is a step before the capture."
            )
        for unit in self._engine.units:
            group = self._engine.groups[unit.group]
            group.require_capturable(arguments_of(param_groups[unit.group]), unit.tensor.device)

    def place(self, param_groups: ParamGroups) -> None:
        """Give every parameter that has none a unit.

        A frozen parameter has no unit and no state until it is unfrozen; one of a lazy module not until it has a shape.

        Raises:
            RuntimeError: As :meth:`plan`.
            ValueError: As :meth:`plan`.
        """
        plan = self.plan(param_groups, frozenset())
        if plan is not None:
            self.carry_out(plan)

    def carry_out(self, plan: Placement) -> None:
        """Place parameters as planned."""
        self._counted, self._settled = plan.counted, plan.settled
        for run in plan.runs:
            self._place_run(run)
        self._number_parameters()

    def _number_parameters(self) -> None:
        """Number all parameters, those that wait too: on every rank the same."""
        self._engine.table = ParameterTable.of(parameter for group in self._settled for parameter in group.known)

    def _place_run(self, run: Run) -> None:
        optimizer, firsts = run.optimizer, run.firsts
        gradients = None
        (one,) = resolve_tree(optimizer.policy, [run.parameters[0].detach()])
        lengths = [local(parameter).numel() for parameter in run.parameters]
        starts, numel = laid_out(lengths, one.policy.block)
        if run.flat:
            if self._flat_gradients:
                gradients = GradientBuffer(run.parameters, torch_dtype(one.grads_main), starts, numel)
            tensor = flatten(run.parameters, one.policy.block)
        else:
            tensor, numel = run.tensor(), lengths[0]
            if optimizer.draws_bits:
                firsts = [firsts[0] + first_element(run.parameters[0])]
        first = numbered(lengths, firsts, starts, numel, one.policy.block, tensor.device)
        state = self._engine.init_state(optimizer, tensor, first, parameters=run.parameters)
        self._engine.add(run.unit(tensor, state, firsts, gradients))

    def number_elements(self, parameters: Iterable[Tensor]) -> None:
        """Number elements through all ``parameters`` of a model, as a ``FlatStepper`` does, whichever of them are this optimizer's.

        By its number an element draws its random bits: a run goes on with the same ones in another front end.
        """
        counted: dict[torch.dtype, int] = {}
        numbers: dict[Tensor, int] = {}
        for parameter in parameters:
            numbers[parameter] = counted.get(parameter.dtype, 0)
            counted[parameter.dtype] = numbers[parameter] + parameter.numel()
        self._first_elements |= numbers
        for group in self._settled:
            group.waiting = [(p, self._first_elements.get(p, first)) for p, first in group.waiting]

        def draws(unit: Unit) -> bool:
            return self._engine.optimizer_of(unit).draws_bits and all(p in numbers for p in unit.parameters)

        def first_of(parameter: Tensor) -> int:
            return numbers[parameter] + first_element(parameter)

        def gaps(unit: Unit) -> list[int]:
            if not draws(unit) or unit.block > 1:
                return []  # blocks are numbered one by one
            ends = [first_of(p) + local(p).numel() for p in unit.parameters]
            return [i for i in range(1, len(ends)) if first_of(unit.parameters[i]) != ends[i - 1]]

        self._engine.cut(gaps)
        for unit in self._engine.units:
            if draws(unit):
                unit.renumber([first_of(parameter) for parameter in unit.parameters])

    # -- gradients that lie in a buffer ---------------------------------------------------------------------------------------

    def clear_gradients(self, *, absent: bool) -> set[int]:
        """Zero them, and return whose they are, by id; with ``absent`` there are none then."""
        cleared: set[int] = set()
        for unit in self._engine.units:
            if isinstance(unit.gradients, GradientBuffer):
                unit.gradients.clear(unit.parameters, absent=absent)
                cleared.update(map(id, unit.parameters))
        return cleared

    def restore_views(self) -> None:
        """After a copy, show state and gradients where they lie now."""
        self._number_parameters()
        for unit in self._engine.units:
            unit.expect_places()
            self._engine.states.show(unit)
            if isinstance(unit.gradients, GradientBuffer):
                unit.gradients.restore(unit.parameters, [member.start for member in unit.members])

    # -- what one sees --------------------------------------------------------------------------------------------------------

    def described(self, number: int) -> str:
        """Say where the parameters of a group lie, and whether their step is compiled, if that was left open."""
        group = self._engine.groups[number]
        units = [unit for unit in self._engine.units if unit.group == number]
        flat = [unit for unit in units if unit.flat]
        elsewhere = len(units) - len(flat)
        if flat:
            placed = f"flat, {sum(len(u.members) for u in flat)} parameters in {len(flat)} run{'s' * (len(flat) > 1)}"
            placed += f", {elsewhere} parameter{'s' * (elsewhere > 1)} apart" if elsewhere else ""
        elif units:
            placed = f"tree, {sum(len(unit.members) for unit in units)} parameters where they were"
        else:
            whole = any(needs_whole_tensors(one.transform) for one in group.optimizers.values())
            placed = ("tree" if whole or not self._allow_flat else "flat") + ", from the first step on"
        if units and (frozen := len(self._settled[number].waiting)):
            placed += f", {frozen} frozen"
        if units and group.compile == "auto":
            placed += ", compiled" if group.compiles(units[0]) else ", uncompiled"
        return placed


def parameters_of(param_groups: ParamGroups) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for values in param_groups for parameter in values["params"]]
