"""The backward passes of a cycle: how gradients come into the buffers, and when they are summed over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.comparisons import Comparer
from everybit_torch.sharded.executor import Executor
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.module_hooks import ModuleHook
from everybit_torch.sharded.nonfinite import count_nonfinite
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.gradients import Phase
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.weights import MOVED
from everybit_torch.torch_internals import autograd


class Passes:
    """The backward passes since the last step.

    A hook on every parameter tells the schedule that its gradient has arrived, and has the events carried out that follow.

    Args:
        parameters: All of the model's, by name, in the layout's order.
        gradients: The buffers of those that are trained, by the number of their group.
        schedule: What follows a hook.
        executor: Carries it out.
        nan: Whether gradients are looked at when they arrive.
        communicators: The inner and the outer ranks.
        device: Of the model.
        require_ready: Raises where a pass may not begin; it is told what is refused.

    Attributes:
        require_ready: As given.
        in_pass: A backward pass goes on.
        in_context: Inside ``microbatch``, ``sync`` or ``no_sync``.
        failed: An error was not recovered from; so it is while something goes on that may fail.
        reduced: How many passes of this cycle were summed over the ranks.
        total: How many there were since the stepper was made.
        touched: For each parameter, whether it had a gradient in this cycle.
        nonfinite: For each parameter, how many elements of this rank's own gradients were not finite, if that is looked at.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        gradients: Mapping[int, GradientBuffer],
        schedule: Schedule,
        executor: Executor,
        nan: NanCheck,
        communicators: tuple[Communicator, Communicator],
        device: torch.device,
        require_ready: Callable[[str], None],
    ) -> None:
        self._gradients = dict(gradients)
        self._schedule, self._executor = schedule, executor
        self._nan, self._communicators = nan, communicators
        self.require_ready = require_ready
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        groups = [buffer.group for buffer in self._gradients.values()]
        trained = {place.spec.name for group in groups for place in group.placements}
        self._frozen = [(name, p) for name, p in parameters.items() if name not in trained]
        self._members = [[parameters[place.spec.name] for place in group.placements] for group in groups]
        self._homes = [
            (name, parameter, parameter.data_ptr()) for name, parameter in parameters.items() if name in trained
        ]
        self.touched = [False] * len(self._names)
        self.nonfinite = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self.in_context = self.in_pass = self.failed = False
        self.reduced = self.total = 0
        self._comparer = Comparer(*communicators)
        executor.on(self._comparer.handlers)
        self._owes_pass = self._finishing = False

    @property
    def interrupted(self) -> bool:
        """Whether an error was not recovered from, or a pass goes on."""
        return self.failed or self.in_pass

    # -- gradients arrive ------------------------------------------------------------------------------------------------------------

    def holds_gradients(self) -> bool:
        """Whether a buffer holds gradients of this cycle."""
        phases = [buffer.phase for buffer in self._gradients.values()]
        return self.in_pass or self._schedule.gradients.any_arrived or any(phase != "empty" for phase in phases)

    def watch(self, model: nn.Module) -> list[Any]:
        """Have gradients come here from now on, and passes begin; handles of the hooks."""
        numbers = {name: number for number, name in enumerate(self._names)}
        handles = []
        for group, buffer in self._gradients.items():
            for place, placement in enumerate(buffer.group.placements):
                number = numbers[placement.spec.name]
                arrive = self._arrival(group, place, number)
                handles.append(self._parameters[number].register_post_accumulate_grad_hook(arrive))  # type: ignore[no-untyped-call]
        hook = ModuleHook(self, "after_forward", model, 0, compiled=False)
        return [*handles, model.register_forward_hook(hook)]

    def _arrival(self, group: int, place: int, number: int) -> Callable[[Tensor], None]:
        # Hooks live as long as the model, and torch's collector does not see through them: they must not keep the stepper alive.
        reference = weakref.ref(self)

        def arrive(parameter: Tensor) -> None:
            passes = reference()
            if passes is not None:
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                passes.begin()
                with torch.no_grad():  # backward(create_graph=True) runs hooks with gradients enabled
                    passes._take(gradient.detach(), group, place, number)

        return arrive

    def _take(self, gradient: Tensor, group: int, place: int, number: int) -> None:
        """A parameter's gradient has arrived."""
        if gradient.layout is not torch.strided:
            raise TypeError(f"{self._names[number]}: got a {gradient.layout} gradient; accepted are dense gradients.")
        if self._nan == "param":
            self.nonfinite[number] += count_nonfinite(gradient)
        self.touched[number] = True
        self._executor.run(self._schedule.arrive(group, place), gradient)

    def after_forward(self, _number: int, _arguments: Any, outputs: Any) -> None:
        """Have a pass begin when the backward pass comes to what the model returned, and not in the inner pass of a checkpoint."""
        tensors = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if tensors and torch.is_grad_enabled():
            reference = weakref.ref(self)

            def enter(_: object) -> None:
                passes = reference()
                if passes is not None:
                    passes.begin()

            register_multi_grad_hook(tensors, enter, mode="any")

    # -- one backward pass ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass begins, if none goes on.

        Raises:
            RuntimeError: It may not; the message says why.
        """
        if self.in_pass:
            return
        self.require_ready("backward")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name}: requires_grad is True, and was False when the stepper was made, which has no place for its gradient."
                    " Make a new stepper, and carry the state over with a checkpoint."
                )
        self.require_in_place()
        self.in_pass = True
        self._executor.begin_here()
        expected = [sum(parameter.requires_grad for parameter in members) for members in self._members]
        accumulates = any(map(_accumulates, self._parameters))
        self._executor.run(self._schedule.begin_pass(expected, accumulates=accumulates))
        autograd.at_the_end_of_the_pass(self._end_autograd)

    def require_in_place(self) -> None:
        """Refuse parameters that were given other memory.

        Raises:
            RuntimeError: The message names the parameter.
        """
        for name, parameter, address in self._homes:
            if parameter.data_ptr() != address:
                raise RuntimeError(MOVED.format(name=name))

    def _end_autograd(self) -> None:
        """Autograd is done with everything that it was asked for."""
        if not self.in_pass:
            return
        if self._schedule.arrived:
            self._end_pass()
            return
        # torch.autograd.grad, for which this is not the backward pass. (A loss that reaches no parameter: its microbatch takes part.)
        self.in_pass = False
        self._executor.run(self._schedule.cancel_pass())

    def _end_pass(self) -> None:
        self._executor.run(self._schedule.end_pass())
        self.in_pass = False
        self.total += 1
        self.reduced += self._schedule.reduces

    # -- contexts --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def context(self, *, last: bool, name: str) -> Iterator[None]:
        """Backward passes in here are the last of their cycle, or are not.

        Args:
            last: Which of the two.
            name: For error messages.

        Raises:
            RuntimeError: Inside another.
        """
        if self.in_context:
            raise RuntimeError(
                f"{name}: a microbatch, sync or no_sync is open already; accepted is one after the other."
            )
        self.require_ready(name)
        passes = self.total
        self.in_context, self._schedule.last = True, last
        try:
            yield
        except BaseException:
            # zero_grad() goes on from here, and needs to know whether other ranks still wait for this one's pass.
            self.failed, self._owes_pass = True, self.total == passes
            self.in_context = False
            raise
        self.in_context, self._schedule.last = False, None

    def empty_pass(self) -> None:
        """Take part in what other ranks' passes do, where a loss reached no parameter."""
        events = self._schedule.empty_pass()
        self._executor.run(events)
        self.in_pass = True
        self._end_pass()

    # -- the end of a cycle ----------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Compare with the other ranks that all of them begin a step.

        Raises:
            RuntimeError: Another rank begins something else.
        """
        self._executor.begin_here()
        self._executor.run(self._schedule.begin_step())

    def finish_gradients(self) -> None:
        """Sum over the ranks what was not yet, and divide."""
        self._finishing = True
        self._executor.begin_here()
        phases: list[Phase] = [buffer.phase for buffer in self._gradients.values()]
        self._executor.run(self._schedule.finish_gradients(phases))
        self._finishing = False

    def forget(self) -> None:
        """The next cycle begins: nothing has arrived."""
        self._comparer.apart = False
        self._executor.begin_here()
        self._executor.run(self._schedule.gradients.clear())
        self.touched = [False] * len(self._names)
        self.nonfinite.zero_()
        for parameter in self._parameters:
            parameter.grad = None
        self.reduced = 0

    def recover(self) -> None:
        """After an error: take part to the end in what other ranks may be doing, wait for all that is under way, and forget it."""
        self._executor.begin_here()
        with suppress(Exception):  # a rank may be gone; what comes next says so
            if not self._comparer.apart:
                self._take_part_to_the_end()
        for communicator in self._communicators:
            communicator.drain()
        self._executor.drop()
        self._schedule.begin_reductions()
        self.in_pass = self._owes_pass = self._finishing = False
        if not self.in_context:
            self._schedule.last = None

    def _take_part_to_the_end(self) -> None:
        if (self._owes_pass or self.in_pass) and self._schedule.reduces:
            if not self.in_pass:
                self._schedule.begin_reductions()
            self._executor.run(self._schedule.take_part(reduces=True))
        elif self._finishing:
            self._executor.run([Event("drain")])
            self.finish_gradients()


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the backward pass that is going on accumulates a parameter's gradient, as far as its own graph tells."""
    if not parameter.requires_grad:
        return False
    try:
        return autograd.will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # its gradient is what torch.autograd.grad was asked for
        return False
