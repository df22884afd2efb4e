"""A group: units with the same policies and hyperparameters, its optimizers, and its compiled steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators import needs_whole_tensors
from everybit.policies import AnyPolicy
from everybit.protocol import periods
from everybit.stepping import Metrics, OptimizerState, Unsafe
from everybit_torch.asking import Partial, ask_unit, partial_result
from everybit_torch.choosing import applied
from everybit_torch.compiled.compilation import can_compile
from everybit_torch.compiled.probing import Factory, fits, is_number
from everybit_torch.compiled.variants import LIMIT, Inputs, Variants
from everybit_torch.host_counts import Due
from everybit_torch.members import members_of
from everybit_torch.optim.groups import Group as ParamGroup
from everybit_torch.optim.groups import Optimizers
from everybit_torch.optim.migration import Migration, plan_migration
from everybit_torch.segments.steps import Compile
from everybit_torch.stepping import EXPANDED_PIECE, step_in_pieces, step_in_place, step_unit
from everybit_torch.streams import copies_need_no_wait, is_capturing
from everybit_torch.units import Unit, map_state

MOST_PERIODS = LIMIT.bit_length() - 1
"""Periods of which the host answers in compiled code, so that a step has no more variants than :data:`LIMIT` for its answers."""


class Group(ParamGroup):
    """A param group whose parameters are units; see :class:`~everybit_torch.optim.groups.Group` for the arguments."""

    def __init__(
        self,
        number: int,
        factory: Factory,
        policies: Mapping[torch.dtype, AnyPolicy],
        *,
        names: Mapping[str, tuple[str, ...]],
        owner: str,
        seed: int,
        unsafe: Unsafe,
        compile: Compile,
        source: str = "",
    ) -> None:
        super().__init__(
            number,
            factory,
            policies,
            names=names,
            owner=owner,
            seed=seed,
            unsafe=unsafe,
            compile=compile,
            source=source,
        )
        self._is_periodic = False
        self._variants = self._no_variants()
        self._partial_results = self._no_partial_results()
        self._numbers: dict[torch.device, Tensor] = {}
        self._in_graphs: list[Tensor] = []  # numbers that captured steps read, and that stay what they are

    def _no_variants(self) -> Variants[Metrics | None]:
        return Variants(self.number, self.factory, self._seed, step_in_place, self.compile)

    def _no_partial_results(self) -> Variants[Partial | None]:
        return Variants(self.number, self.factory, self._seed, partial_result, self.compile)

    def __getstate__(self) -> dict[str, Any]:
        made = {"_variants": self._no_variants(), "_partial_results": self._no_partial_results()}
        return self.__dict__ | made | {"_in_graphs": []}

    # -- hyperparameters ------------------------------------------------------------------------------------------------------

    def follow(self, arguments: Mapping[str, Any], optimizers: Optimizers) -> None:
        """Step with other hyperparameters from here on; the caller has migrated the state to them before."""
        super().follow(arguments, optimizers)
        self._is_periodic = any(periods(one.transform) for one in optimizers.values())
        self._variants.follow()
        self._partial_results.follow()
        for device in list(self._numbers):
            self._fill(device)

    def plan_migrations(
        self,
        units: Iterable[Unit],
        arguments: Mapping[str, Any],
        optimizers: Optimizers,
    ) -> Iterator[tuple[Unit, Migration]]:
        """Plan the state of those units that are the group's, for other hyperparameters.

        Raises:
            ValueError: It cannot be told; the message names the hyperparameters.
        """
        changed = self.changed(optimizers)
        if changed:
            self.require_cuts(optimizers)
        for unit in units:
            if unit.group != self.number or unit.tensor.dtype not in changed:
                continue
            try:
                plan = plan_migration(unit, applied(optimizers[unit.tensor.dtype], unit.decision))
            except ValueError as error:
                before = self.arguments
                names = [
                    name for name, targets in self.names.items()
                    if any(arguments[one] is not before[one] for one in targets if one in before)
                ]  # fmt: skip
                raise ValueError(f"param group {self.number}: {', '.join(names)}: {error}") from None
            yield unit, plan

    def optimizer_of(self, unit: Unit) -> eb.Optimizer[Any]:
        """The optimizer of a unit: the group's for its dtype, as its masks and labels came out."""
        return self.decided(unit.tensor.dtype, unit.decision)

    # -- stepping -------------------------------------------------------------------------------------------------------------

    def compiles(self, unit: Unit) -> bool:
        """Whether the step of a unit is compiled; of those of a group with one dtype all are, or none."""
        return self.steps[unit.tensor.dtype].compiles(unit.tensor.device)

    def due(self, unit: Unit) -> Due:
        """Say which periodic work is due in the next step of a unit, as the host counts them.

        Compiled code is made for each answer, so there the host answers of the longest periods, and the device decides of shorter ones.
        """
        steps = unit.host_count.read(unit.state.step) if self._is_periodic else None
        if steps is None:
            return ()
        found = self.optimizer_of(unit).due(steps + 1)
        return found[-MOST_PERIODS:] if self.compiles(unit) else found

    def step(
        self,
        unit: Unit,
        grad: Tensor,
        *,
        compile: bool,
        metrics: bool,
        totals: Sequence[Tensor] = (),
        due: Due = (),
        answers: Sequence[Tensor] = (),
    ) -> Metrics | None:
        """Step a unit in place; ``grad`` is in the shape of its tensor, ``answers`` are the results of its joint work.

        ``totals`` answer the transform's reductions, in order; see :mod:`everybit_torch.reductions`. They were found for the work that is
        ``due``.
        """
        tensor = unit.tensor
        optimizer = self.optimizer_of(unit)
        # Found on the device of the first unit of all.
        totals = [*(x if x.device == tensor.device else x.to(tensor.device) for x in totals), *answers]

        def uncompiled() -> Metrics | None:
            return step_unit(optimizer, unit, grad, metrics=metrics, totals=totals, due=due, answers=len(answers))

        if not (compile and self._can_compile(unit)):
            return uncompiled()
        if optimizer.per_tensor and not answers and unit.flat and tensor.is_cpu and tensor.numel() > EXPANDED_PIECE:
            step = partial(self.step, compile=True, metrics=metrics, totals=totals, due=due)
            return step_in_pieces(unit, grad, unit.pieces(EXPANDED_PIECE), step)
        inputs = self._inputs(
            unit, unit.state, grad, totals, due, (("metrics", metrics), ("answers", len(answers))), returns=metrics
        )
        measured = self._variants.step(inputs, self.arguments, self._read_numbers(tensor.device), uncompiled)
        if inputs.tensors[0] is not tensor:
            # Autograd does not see that writing to a vector changes the tensor.
            torch.autograd.graph.increment_version([tensor])
        return measured

    def partial_result(
        self,
        unit: Unit,
        state: OptimizerState[Any],
        grad: Tensor,
        totals: Sequence[Tensor],
        *,
        reads: frozenset[str] | None,
        counted: bool,
        due: Due,
    ) -> Partial | None:
        """:func:`~everybit_torch.asking.ask_unit`, by compiled code where that is possible."""
        optimizer = self.optimizer_of(unit)

        def uncompiled() -> Partial | None:
            return ask_unit(optimizer, unit, state, grad, totals, reads=reads, counted=counted, due=due)

        if not self._can_compile(unit):
            return uncompiled()
        inputs = self._inputs(unit, state, grad, totals, due, (("reads", reads), ("counted", counted)))
        return self._partial_results.step(inputs, self.arguments, self._read_numbers(unit.tensor.device), uncompiled)

    def _can_compile(self, unit: Unit) -> bool:
        return can_compile(unit.tensor.device) and unit.tensor.numel() > 0

    def _inputs(
        self,
        unit: Unit,
        state: OptimizerState[Any],
        grad: Tensor,
        totals: Sequence[Tensor],
        due: Due,
        choices: tuple[tuple[str, Any], ...],
        *,
        returns: bool = True,
    ) -> Inputs:
        """The arguments of compiled code for a unit, as vectors where the transform does not see the difference."""
        inputs = Inputs(
            [unit.tensor],
            [grad],
            state,
            unit.first_tensor,
            list(totals),
            members_of(unit),
            self.policies[unit.tensor.dtype],
            unit.decision,
            due,
            choices,
            returns,
        )
        vectors = unit.tensor.ndim != 1 and not needs_whole_tensors(self.optimizer_of(unit).transform)
        return _as_vectors(inputs) if vectors else inputs

    def _read_numbers(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters for compiled code that is about to run, and that may be captured."""
        numbers = self.numbers(device)
        if is_capturing() and not any(numbers is one for one in self._in_graphs):
            self._in_graphs.append(numbers)
        return numbers

    def numbers(self, device: torch.device) -> Tensor:
        """The numeric hyperparameters, in order, as one float64 tensor, so that a new value is new data and not new code."""
        held = self._numbers.get(device)
        return self._fill(device) if held is None else held

    def _fill(self, device: torch.device) -> Tensor:
        # The tensor is filled again, so that it stays the same object. What float64 does not hold is part of the code.
        values = [float(value) if fits(value) else 0.0 for value in self.arguments.values() if is_number(value)]
        held = self._numbers.get(device)
        if held is None or held.numel() != len(values) or any(held is one for one in self._in_graphs):
            held = self._numbers[device] = torch.empty(len(values), dtype=torch.float64, device=device)
        # A copy that blocks waits until the device has done all that it was asked for.
        held.copy_(torch.tensor(values, dtype=torch.float64), non_blocking=copies_need_no_wait(device))
        return held


def _as_vectors(inputs: Inputs) -> Inputs:
    """One tensor of any shape as a vector: the compiler then sees one code for all shapes.

    A transform that may be cut anywhere does not see the difference. Where memory is in another order, the inputs are what they were.
    """
    (tensor,) = inputs.tensors
    leaves = eb.tree.leaves((tensor, inputs.state))
    if not all(x.is_contiguous() for x in leaves):
        return inputs
    return replace(
        inputs,
        tensors=[_vector(tensor)],
        grads=[_vector(inputs.grads[0].contiguous())],
        state=map_state(inputs.state, _vector, lambda x: x),
    )


def _vector(x: Tensor) -> Tensor:
    # No view of a tensor of this shape to the compiler, which would make code for the shape after all.
    return x.view(-1).data
