"""Weights of a step that are handed out while the next forward pass begins, where every rank keeps all weights and a part of the state.

A step starts to gather each group's weights, in the order in which units lie in the model, and returns. A hook on every module waits for
the groups of its unit before it computes. Whatever else the stepper or torch offers to read the model waits for all of them, or says that
it does not: see :meth:`everybit_torch.FlatStepper.wait_for_weights`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.module_hooks import no_hook
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.step_checks import Completeness
from everybit_torch.torch_internals.tracing import call_untraced


class LateWeights:
    """Waits for weights that are under way before a module computes with them, by hooks on all modules of a model.

    Args:
        model: Whose weights.
        units: Names and modules, in the layout's order, the model first.
        layout: Of the model.
        parameters: The model's, by name.
        schedule: Which says what is under way.
        executor: Waits.
        completeness: Of weights and state, which do not belong together where weights did not arrive.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, nn.Module]],
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        schedule: Schedule,
        executor: Executor,
        completeness: Completeness,
    ) -> None:
        self._schedule, self._executor, self._completeness = schedule, executor, completeness
        of_parameter = {
            id(parameters[place.spec.name]): group.unit for group in layout.groups for place in group.placements
        }
        numbers = {id(module): number for number, (_, module) in enumerate(units)}
        self._handles: list[Any] = []
        inside: dict[str, int] = {}
        for name, module in model.named_modules():
            around = inside.get(name.rpartition(".")[0], 0)
            inside[name] = numbers.get(id(module), around)
            own = {of_parameter[id(p)] for p in module.parameters(recurse=False) if id(p) in of_parameter}
            hook = _Hook(self, module, sorted(own | {inside[name]}), is_unit=id(module) in numbers)
            self._handles += [
                module.register_forward_pre_hook(hook),
                module.register_state_dict_pre_hook(_All(self, module)),
                module.register_load_state_dict_pre_hook(_All(self, module)),
            ]

    def close(self) -> None:
        """Wait for everything, and have no hooks any more."""
        self.wait()
        for handle in self._handles:
            handle.remove()

    def recover(self) -> None:
        """After an error: wait for everything, whatever becomes of it."""
        with suppress(Exception):  # weights that did not arrive are noted
            self.wait()

    @property
    def under_way(self) -> bool:
        """Whether anything is."""
        return bool(self._schedule.late)

    def wait(self, units: Collection[int] | None = None) -> None:
        """Wait for the weights of these units; None: for all.

        Raises:
            RuntimeError: Another rank died.
        """
        if not self._schedule.late:
            return
        try:
            self._executor.run(self._schedule.settle(units))
        except BaseException:
            self._completeness.mark_incomplete("weights of the last step did not arrive")
            with suppress(Exception):  # they come from the same ranks
                self._executor.run_all(list(self._schedule.settle()))
            raise


class _OfModule:
    """A hook on one module, which does nothing on another, and does not keep its owner alive."""

    def __init__(self, owner: LateWeights, module: nn.Module) -> None:
        self._owner, self._module = weakref.ref(owner), weakref.ref(module)

    def _owner_of(self, module: nn.Module) -> LateWeights | None:
        return self._owner() if module is self._module() else None

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Leave no hook in copies of the model.

        Raises:
            RuntimeError: Some of its weights are those from before the last step.
        """
        owner = self._owner()
        if owner is not None and owner.under_way:
            raise RuntimeError(
                "copy: weights of the last step are under way to this rank (overlap_param_gather=True), and a copy of the model would have"
                " older ones; accepted is stepper.wait_for_weights() first, or stepper.copy_model()."
            )
        return no_hook, ()


class _Hook(_OfModule):
    """Waits for the weights of some units before a module's forward pass."""

    def __init__(self, owner: LateWeights, module: nn.Module, units: Sequence[int], *, is_unit: bool) -> None:
        super().__init__(owner, module)
        self._units, self._is_unit = units, is_unit

    def __call__(self, module: nn.Module, _arguments: Any) -> None:
        """Wait; torch calls hooks so."""
        # In what is compiled a unit's hook is enough, and each divides it in two.
        if not self._is_unit and torch.compiler.is_compiling():
            return
        owner = self._owner_of(module)
        if owner is not None and owner.under_way:
            call_untraced(owner.wait, self._units)


class _All(_OfModule):
    """Waits for all weights before a module's are saved or loaded."""

    def __call__(self, module: nn.Module, *_arguments: Any) -> None:
        """Wait; torch calls hooks so."""
        owner = self._owner_of(module)
        if owner is not None:
            owner.wait()
