"""Control over a cycle: which backward passes are summed over the ranks, and when weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.gathering import Gathering
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.shard_optimizer import ShardOptimizer
from everybit_torch.sharded.step_checks import Completeness


class UnshardHandle:
    """Weights that are being gathered, by ``unshard(async_op=True)``."""

    def __init__(self, gathering: Gathering | None, number: int) -> None:
        self._gathering, self._number = gathering, number

    def wait(self) -> None:
        """Wait until the unit's parameters have their values, unless they were given back."""
        if self._gathering is not None:
            self._gathering.wait_for(self._number)


class Control:
    """The methods of :class:`~everybit_torch.FlatStepper` by which a cycle is directed."""

    gradients: list[GradientBuffer]
    inner: Communicator
    outer: Communicator
    _passes: Passes
    _schedule: Schedule
    _optimizer: ShardOptimizer
    _gathering: Gathering | None

    completeness: Completeness

    @property
    def closed(self) -> bool:
        """Whether :meth:`~everybit_torch.FlatStepper.close` was called."""
        return self.completeness.is_closed

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Complete the sums over the ranks, and divide: the main gradients are final then. A step does this by itself.

        Until the step, they are the gradients of the parameters of ``as_optimizer()``, and may be scaled.

        Raises:
            RuntimeError: An error was not recovered from, or the stepper is closed.
        """
        self._passes.require_ready("finish_gradients")
        self._passes.begin_step()
        self._passes.failed = True
        self._passes.finish_gradients()
        self._optimizer.attach_gradients()
        self._passes.failed = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Complete the gradients as :meth:`~everybit_torch.FlatStepper.finish_gradients` does, and scale them. Collective.

        ``torch.nn.utils.clip_grad_norm_`` on the model's parameters finds no gradients: they are in this rank's buffers.

        Args:
            max_norm: Of all gradients together, after dividing.
            norm_type: Of the p-norm; ``inf`` for the greatest absolute value.

        Returns:
            The norm before, over all parameters and ranks: 0-d.

        Raises:
            RuntimeError: As :meth:`~everybit_torch.FlatStepper.finish_gradients`.
        """
        self.finish_gradients()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Context of one microbatch's backward pass; in the ``last`` one of a step gradients are summed over the ranks.

        A rank whose loss reaches no parameter contributes zeros. Without this context gradients are summed over the ranks by :meth:`step`
        (under ``no_shard`` and ``optim``, and if deferred), or in every backward pass, which every rank then has to run.

        Raises:
            RuntimeError: Inside another, or after the last one without a step.
        """
        if self._passes.in_context:
            raise RuntimeError("microbatch: one is open already; accepted is one after the other.")
        if any(buffer.phase == "final" for buffer in self.gradients):
            raise RuntimeError(
                "microbatch: the last one of this cycle is over; accepted next is step() or zero_grad()."
            )
        with self._passes.context(last=last, name="microbatch"):
            before = self._passes.total
            yield
            if self._passes.total == before:
                self._passes.empty_pass()
            if last:
                self._optimizer.attach_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of backward passes that are not the last before a step; sharded gradients are summed unless that is deferred.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=False, name="no_sync"):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Context of the last backward pass before a step: gradients are summed over the ranks while it runs.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=True, name="sync"):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """From now on, sum gradients over the ranks in each backward pass, or only in the last one of a cycle; FSDP2's name.

        Under ``optim_grads`` and ``optim_grads_params``. While it is False, gradients of backward passes add up whole on each rank, in the
        main gradient's dtype. They are summed over the ranks, once, by the next pass for which it is True, by a pass inside
        ``microbatch(last=True)`` or ``sync()``, or by :meth:`step`. Under ``no_shard`` and ``optim`` it is always so.

        Args:
            requires_gradient_sync: The same on every rank in the same pass. At first it is ``not defer_reduction``.

        Raises:
            TypeError: Not a bool.
            RuntimeError: Inside a microbatch or a backward pass, or an error was not recovered from.
        """
        if not isinstance(requires_gradient_sync, bool):
            raise TypeError(f"requires_gradient_sync: got {requires_gradient_sync!r}; accepted is True or False.")
        self._require_no_pass("set_requires_gradient_sync")
        self._schedule.defers = not requires_gradient_sync

    def _require_no_pass(self, name: str) -> None:
        if self._passes.in_context or self._passes.in_pass:
            raise RuntimeError(f"{name}: inside a microbatch or a backward pass; accepted is between two of them.")
        self._passes.require_ready(name)

    # -- when weights are gathered ---------------------------------------------------------------------------------------------------

    def set_reshard_after_forward(self, module: nn.Module, reshard_after_forward: bool, recurse: bool = True) -> None:
        """From now on, free a unit's weights after its forward pass (True), or keep them for its backward pass (False); FSDP2's name.

        Every rank has to call it, with the same arguments. Weights outside of all units stay in any case. :meth:`plan` includes the
        memory.

        Args:
            module: A unit, or the model.
            reshard_after_forward: False: a unit is gathered once in a microbatch, and stays in memory between its two passes. At first it
                is the stepper's ``reshard_after_forward``.
            recurse: Whether units inside it are changed, too.

        Raises:
            TypeError: Not a bool.
            ValueError: The module is no unit.
            RuntimeError: Inside a forward or a backward pass, or between the two; or ranks call something else. Nothing is changed.
        """
        name = "set_reshard_after_forward"
        units = self._units_with(name, "reshard_after_forward", module, reshard_after_forward, recurse)
        if (weights := self._schedule.weights) is not None:
            problem: str | None = None
            try:
                self._require_before_a_forward(name)
            except RuntimeError as error:
                problem = str(error)
            call = f"{name}({self._gathering.units[units[0]]}, {reshard_after_forward}, recurse={recurse})"  # type: ignore[union-attr]
            Everyone(self.inner, self.outer).require_same_call(call, "", problem)
            weights.retained = weights.retained.with_forward(units, stay=not reshard_after_forward)

    def set_reshard_after_backward(
        self, module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """From now on, free a unit's weights after a backward pass (True), or keep them for the next forward pass (False); FSDP2's name.

        While it is False, a microbatch after the first need not gather them for its forward pass. A step frees them, because it changes
        them. All ranks have to call it before the same backward pass, which checks that. :meth:`plan` includes the memory.

        Args:
            module: A unit, or the model.
            reshard_after_backward: At first True.
            recurse: Whether units inside it are changed, too.

        Raises:
            TypeError: Not a bool.
            ValueError: The module is no unit.
            RuntimeError: Inside a microbatch or a backward pass, or an error was not recovered from.
        """
        name = "set_reshard_after_backward"
        units = self._units_with(name, "reshard_after_backward", module, reshard_after_backward, recurse)
        self._require_no_pass(name)
        if (weights := self._schedule.weights) is not None:
            weights.retained = weights.retained.with_backward(units, stay=not reshard_after_backward)

    def _units_with(self, name: str, field: str, module: nn.Module, value: bool, recurse: bool) -> list[int]:
        for what, given in ((field, value), ("recurse", recurse)):
            if not isinstance(given, bool):
                raise TypeError(f"{name}: {what}: got {given!r}; accepted is True or False.")
        first = self._unit(name, module)
        if self._gathering is None or not recurse:
            return [first]
        inside = {id(one) for one in module.modules()}
        return [first, *(n for n, unit in enumerate(self._gathering.units) if n != first and id(unit.module) in inside)]

    def unshard(self, module: nn.Module, *, async_op: bool = False) -> UnshardHandle | None:
        """Gather the weights of a unit before the next forward pass; FSDP2's name.

        Weights are gathered in the layout's order, so those of units that come before it are gathered too. The forward pass uses them,
        and gathers the rest. Other ranks need not call this, but their next pass has to be a forward pass. Under strategies that do not
        shard weights it has no effect.

        Args:
            module: A unit, or the model, whose own parameters come first.
            async_op: Return at once; the forward pass waits by itself.

        Returns:
            A handle with :meth:`~UnshardHandle.wait`, if ``async_op``.

        Raises:
            ValueError: The module is no unit.
            RuntimeError: Inside a forward or a backward pass, or between the two.
        """
        number = self._unit("unshard", module)
        if self._gathering is not None:
            self._require_before_a_forward("unshard")
            self._gathering.unshard(number)
        handle = UnshardHandle(self._gathering, number)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self, module: nn.Module) -> None:
        """Free the weights that :meth:`unshard` has gathered, from this unit on, if no forward pass followed.

        All ranks have to have called :meth:`unshard`, and have to call this.

        Args:
            module: A unit, or the model: then all weights.

        Raises:
            ValueError: The module is no unit.
            RuntimeError: Inside a forward or a backward pass, or between the two; or another rank does something else.
        """
        number = self._unit("reshard", module)
        if self._gathering is not None:
            self._require_before_a_forward("reshard")
            self._gathering.reshard(number)

    def set_modules_to_forward_prefetch(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Request the weights of other units when the forward pass of one begins; the default is the next unit.

        Weights are gathered in the layout's order: those of units in between are requested, too. :meth:`plan` includes the memory.

        Args:
            module: A unit, or the model.
            modules: Units that come after it in the model. An empty list: weights are gathered when they are needed.

        Raises:
            ValueError: A module is no unit, or does not come after.
        """
        number, others = self._units_beside("set_modules_to_forward_prefetch", module, modules, after=True)
        if (weights := self._schedule.weights) is not None:
            weights.prefetch = weights.prefetch.before(number, others)

    def set_modules_to_backward_prefetch(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Ask for the weights of other units as the backward pass comes to one; without it, for those of the unit before.

        Weights are gathered in the reverse of the layout's order. Before the gradients of a unit are sent, those of the unit before it are
        asked for in any case: another rank may wait for them. It is in :meth:`plan`.

        Args:
            module: A unit.
            modules: Units that come before it in the model. None of them: weights are gathered when they are needed.

        Raises:
            ValueError: A module is no unit, or does not come before.
        """
        number, others = self._units_beside("set_modules_to_backward_prefetch", module, modules, after=False)
        if (weights := self._schedule.weights) is not None:
            weights.prefetch = weights.prefetch.before_backward(number, others)

    def _units_beside(
        self, name: str, module: nn.Module, modules: Sequence[nn.Module], *, after: bool
    ) -> tuple[int, list[int]]:
        number, others = self._unit(name, module), [self._unit(name, one) for one in modules]
        for other in others if self._gathering is not None else ():
            if (other <= number) if after else not 0 < other < number:
                units = self._gathering.units  # type: ignore[union-attr]
                raise ValueError(
                    f"{name}: got {units[other]} for {units[number]}; accepted are units that come {'after' if after else 'before'} it in"
                    " the model."
                )
        return number, others

    def _unit(self, name: str, module: nn.Module) -> int:
        if self._gathering is None:
            return 0
        number = self._gathering.number_of(module)
        if number is None:
            raise ValueError(
                f"{name}: got a {type(module).__name__} that is no unit; accepted are units, and the model."
            )
        return number

    def _require_before_a_forward(self, name: str) -> None:
        self._passes.require_ready(name)
        assert self._gathering is not None
        if self._passes.in_pass or not self._gathering.scheduled.before_a_forward:
            raise RuntimeError(
                f"{name}: inside a forward or a backward pass, or between the two; accepted is before a forward pass."
            )
