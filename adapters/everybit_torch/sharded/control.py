"""What a user tells a stepper about the cycle that goes on: which backward pass is the last, and which are summed over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.passes import Passes
from everybit_torch.sharded.scheduling.schedule import Schedule
from everybit_torch.sharded.shard_optimizer import ShardOptimizer


class Control:
    """The methods of :class:`~everybit_torch.FlatStepper` by which a cycle is directed."""

    gradients: list[GradientBuffer]
    _passes: Passes
    _schedule: Schedule
    _optimizer: ShardOptimizer

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """One microbatch: its backward pass, and on the ``last`` one of a step the sum over the ranks.

        A rank whose loss reaches no parameter takes part with zeros. Without this context gradients are summed over the ranks by
        :meth:`step` (``no_shard``, ``optim``, and where that is deferred), or in every backward pass; then every rank needs one each time.

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
        """Backward passes in here are not the last of their step. Sharded gradients are summed over the ranks unless that is deferred.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=False, name="no_sync"):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """The one backward pass in here is the last of its step: gradients are summed over the ranks while it goes on.

        Raises:
            RuntimeError: Inside a microbatch.
        """
        with self._passes.context(last=True, name="sync"):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Sum the gradients of each backward pass over the ranks from here on, or only those of a cycle's last; under FSDP2's name.

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
        self._require_between_passes("set_requires_gradient_sync")
        self._schedule.defers = not requires_gradient_sync

    def _require_between_passes(self, name: str) -> None:
        if self._passes.in_context or self._passes.in_pass:
            raise RuntimeError(f"{name}: inside a microbatch or a backward pass; accepted is between two of them.")
        self._passes.require_ready(name)
