"""Hooks on the modules of units, which tell the schedule when forward and backward passes come to them, where parameters are sharded too.

When a unit's weights are gathered and freed is decided in :mod:`.scheduling.weights`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from everybit_torch import streams
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.module_hooks import ModuleHook
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.scheduling.ways import UseKey
from everybit_torch.sharded.unit_weights import UnitWeights
from everybit_torch.torch_internals.autograd import (
    in_a_backward_pass,
    recorded_nodes,
    reentrant_checkpoint,
    saved_tensors_hooks,
)


class Gathering:
    """Has units gathered and freed around their forward and backward passes, by hooks on their modules.

    Args:
        weights: Of the units.
        schedule: What follows a hook.
        executor: Carries it out.
        on_backward: Called as a backward pass comes to a unit, before anything else.
    """

    def __init__(
        self, weights: UnitWeights, schedule: Schedule, executor: Executor, on_backward: Callable[[], None]
    ) -> None:
        assert schedule.weights is not None
        self._weights, self._schedule, self._executor = weights, schedule, executor
        self._on_backward = weakref.WeakMethod(on_backward)
        self.units, self.scheduled = weights.units, schedule.weights
        self._handles = []
        self._followed: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
        for number, unit in enumerate(self.units):
            before = ModuleHook(self, "_before_forward", unit.module, number)
            after = ModuleHook(self, "_after_forward", unit.module, number)
            self._handles += [unit.module.register_forward_pre_hook(before), unit.module.register_forward_hook(after)]
        self.free_all()

    @property
    def communicator(self) -> Communicator:
        """The ranks that share the weights."""
        return self._weights.communicator

    @property
    def idle(self) -> list[str]:
        """Units that are trained, and had no forward pass in this cycle."""
        return [str(one) for number, one in enumerate(self.units) if one.trained and number not in self.scheduled.ran]

    def close(self) -> None:
        """Gather everything for good, and have no hooks any more."""
        self._executor.begin_here()
        self._executor.run(self.scheduled.gather_all())
        self.scheduled.held = True
        for handle in self._handles:
            handle.remove()

    def free_all(self) -> None:
        """Free everything: after a pass it is not needed, and after a step all weights are others."""
        self._executor.run_all(self.scheduled.free_all())

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Keep all units gathered, to evaluate or save the model; passes in here free no weights."""
        self._executor.begin_here()
        self._executor.run(self.scheduled.gather_all())
        before, self.scheduled.held = self.scheduled.held, True
        try:
            yield
        finally:
            self._executor.run_all(self.scheduled.stop_holding(held=before))

    @contextmanager
    def keeping(self, numbers: Collection[int]) -> Iterator[None]:
        """Keep some units gathered, whatever passes come."""
        new = set(numbers) - self.scheduled.kept
        self._executor.begin_here()
        self._executor.run(self.scheduled.keep(new))
        try:
            yield
        finally:
            self._executor.run_all(self.scheduled.release(new))

    @contextmanager
    def running(self, numbers: Collection[int]) -> Iterator[Callable[[Any], None]]:
        """Keep the units of a method that runs inside, as if it were their forward pass.

        Yields:
            What is to be told of the method's outputs, from which a backward pass comes.
        """
        # Inside of a unit's forward pass that is followed itself. What is gathered before one stays there from a backward pass, or by hand.
        inside = set() if self.scheduled.before_a_forward else self.scheduled.gathered
        follow = [number for number in numbers if number not in inside]

        def returned(outputs: Any) -> None:
            differentiable = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            if differentiable and torch.is_grad_enabled():
                for number in follow:
                    self.scheduled.ran.add(number)
                    self._follow(number, differentiable)

        if self.scheduled.in_backward:  # a checkpoint runs it again
            for number in numbers:
                self._before_forward(number, None)
            outputs: list[Any] = []
            yield outputs.append
            for number in numbers:
                self._after_forward(number, None, outputs)
            return
        with self.keeping(numbers):
            yield returned

    # -- by hand ------------------------------------------------------------------------------------------------------------------

    def number_of(self, module: nn.Module) -> int | None:
        """The number of the unit that a module is; None if it is none."""
        return next((number for number, unit in enumerate(self.units) if unit.module is module), None)

    def unshard(self, number: int) -> None:
        """Begin to gather by hand; see :meth:`.scheduling.weights.WeightSchedule.unshard`."""
        self._executor.begin_here()
        self._executor.run(self.scheduled.unshard(number))

    def wait_for(self, number: int) -> None:
        """Wait for what was gathered by hand."""
        self._executor.run(self.scheduled.wait_for(number))

    def reshard(self, number: int) -> None:
        """Free what was gathered by hand; see :meth:`.scheduling.weights.WeightSchedule.reshard`."""
        self._executor.begin_here()
        self._executor.run(self.scheduled.reshard(number))

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def _before_forward(self, number: int, _arguments: Any) -> None:
        recording = torch.is_grad_enabled()
        if not self.scheduled.in_backward:
            if number == 0:
                self._executor.begin_here()
            self._executor.run(self.scheduled.before_forward(number, recording=recording))
            return
        self.scheduled.ran.add(number)
        if not in_a_backward_pass():
            raise RuntimeError(
                f"{self.units[number]}: the backward pass before ended in an error, and its gradients are in part; accepted is"
                " zero_grad(), on every rank."
            )
        self._executor.run(self._schedule.run_again(number, recording=recording))

    def _after_forward(self, number: int, _arguments: Any, given: Any) -> Any:
        """Return other outputs, if some are not the unit's own; else None."""
        outputs = self._own_outputs(number, given)
        self._note_forward(number, outputs)
        return None if outputs is given else outputs

    def _own_outputs(self, number: int, outputs: Any) -> Any:
        """Outputs in which no tensor is another unit's output, or a part of weights that are about to be freed; as they are if none is.

        Hooks on one tensor run in the order in which they were made. A unit that returns what an inner unit returned would be entered
        after it in the backward pass, which says that the inner one has been left. A view of it has a hook of its own, and comes first.
        """
        weights = {_storage_of(buffer.whole) for buffer in self.units[number].buffers if buffer.whole.numel()}
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        freed = {id(x) for x in found if _storage_of(x) in weights}
        passed_on = {id(x) for x in found if x.requires_grad and x in self._followed} - freed
        if not freed and not passed_on:
            return outputs

        def own(x: Any) -> Any:
            if id(x) not in freed and id(x) not in passed_on:
                return x
            # A tensor of before no_grad() keeps its gradient in there.
            with torch.set_grad_enabled(x.requires_grad):
                return x.clone() if id(x) in freed else x.view_as(x)

        return tree_map(own, outputs)

    def _note_forward(self, number: int, outputs: Any) -> None:
        recording = torch.is_grad_enabled()
        if self.scheduled.in_backward:
            if self.scheduled.has_run_again(number, recording=recording):
                self._follow(number, outputs)
            return
        records = self.scheduled.records
        self._executor.run(self.scheduled.after_forward(number, recording=recording))
        if recording:
            self._follow(number, outputs)
        elif records and number > 0:
            checkpoint = _checkpoint(differentiable=False)
            self.scheduled.is_used(number, differentiable=False, checkpoint=checkpoint, recorded=False)

    def _follow(self, number: int, outputs: Any) -> None:
        """Have a backward pass tell when it comes to what a unit returned."""
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        unit = self.units[number]
        if not found and outputs is not None and unit.trained:
            raise TypeError(
                f"{unit}: returned a {type(outputs).__name__}, in which no tensor is found. Its weights are gathered"
                " when the backward pass comes to one; accepted are tensors, and dicts, lists, tuples and registered pytrees of them."
            )
        differentiable = [x for x in found if x.requires_grad]
        checkpoint = _checkpoint(differentiable=bool(differentiable))
        use = self.scheduled.is_used(number, differentiable=bool(differentiable), checkpoint=checkpoint)
        if differentiable:
            reference = weakref.ref(self)

            def enter(_: object) -> None:
                gathering = reference()
                if gathering is not None:
                    gathering._before_backward(number, use)

            register_multi_grad_hook(differentiable, enter, mode="any")
            for x in differentiable:
                self._followed[x] = number
            self._order_others(differentiable)

    def _order_others(self, differentiable: Sequence[Tensor]) -> None:
        """Have every tensor that a unit returned wait for the unit's weights, also one that was computed on another stream."""
        if len(differentiable) > 1 and streams.has_streams(differentiable[0].device):
            reference = weakref.ref(self)

            def order(_: Tensor) -> None:
                gathering = reference()
                if gathering is not None:
                    with gathering._executor.at_home():
                        pass

            for x in differentiable:
                x.register_hook(order)  # type: ignore[no-untyped-call]

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def _before_backward(self, number: int, use: UseKey) -> None:
        begin = self._on_backward()
        if begin is not None:
            begin()
        self._executor.run(self._schedule.come_to(number, use))

    def end_backward(self) -> None:
        """The backward pass is over: free what does not stay, unless a graph was made of it, which another pass may come to."""
        if not self.scheduled.keeps_for_graph:
            self._executor.run_all(self.scheduled.free_after_backward())

    # -- after an error -------------------------------------------------------------------------------------------------------------

    def begin_to_recover(self) -> tuple[bool, bool]:
        """Continue this rank's collectives after an error, without computing.

        Returns:
            Whether a backward pass is among them; and whether other ranks go on with it.
        """
        evaluating = self.scheduled.evaluating
        self._executor.run(self.scheduled.rejoin())
        if evaluating and not self.scheduled.in_backward:
            return False, True
        return True, self._weights.compare_again_with_others()

    def recover(self) -> None:
        """Recover from an error: end all collectives and the pass, and free all gathered weights, whatever failed."""
        self._weights.recover()
        self.scheduled.recover()
        self.free_all()


def _checkpoint(*, differentiable: bool) -> int:
    """A number for the checkpoint that is being recorded; 0 for none."""
    if not differentiable:
        # A reentrant one. Or another's implementation of it, or no_grad(), in which autograd's count of what it records stands still, but
        # for functions of the user's.
        reentrant = reentrant_checkpoint()
        return -1 - recorded_nodes() if reentrant is None else reentrant
    hooks = saved_tensors_hooks()
    return id(hooks[0]) if hooks and "checkpoint" in getattr(hooks[0], "__qualname__", "") else 0


def _storage_of(x: Tensor) -> int:
    """The address of a tensor's memory; zero, if it has none of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
