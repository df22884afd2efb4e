"""The queue of reductions: gradients are reduced from the layout's last group to its first, in the same order on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from everybit_torch.collectives.reduction import Reduction
from everybit_torch.sharded.gradient_buffers import GradientBuffer


class ReductionQueue:
    """The reductions of one backward pass after another.

    Args:
        buffers: In the layout's order.
    """

    def __init__(self, buffers: Sequence[GradientBuffer]) -> None:
        self._buffers = list(buffers)
        self._next = len(self._buffers) - 1
        self._under_way: list[Reduction] = []

    def begin(self) -> None:
        """A backward pass begins: nothing of it was sent."""
        self._next = len(self._buffers) - 1

    @property
    def next(self) -> GradientBuffer | None:
        """The group whose turn it is; None when all were sent."""
        return self._buffers[self._next] if self._next >= 0 else None

    @property
    def closes_unit(self) -> bool:
        """Whether the next is the last of its unit."""
        following = self._buffers[self._next - 1] if self._next > 0 else None
        return following is None or following.group.unit != self._buffers[self._next].group.unit

    def was_sent(self, number: int) -> bool:
        """Whether a group's turn is over in this pass."""
        return number > self._next

    def send_next(self, divisor: float | None, *, bounded: bool) -> None:
        """Start the next reduction.

        Args:
            divisor: See :meth:`GradientBuffer.reduce`.
            bounded: Wait for the one before it first, so that at most one is under way. False: nobody is waited for, and what is sent stays
                in memory until it has arrived.
        """
        if bounded:
            self.finish()
        else:
            while self._under_way and self._under_way[0].is_done():
                self._finish_first()
        reduction = self._buffers[self._next].reduce(divisor)
        self._under_way.append(reduction)
        self._next -= 1

    def send(self, buffer: GradientBuffer, divisor: float | None) -> None:
        """Start a reduction out of a backward pass, after the one before it."""
        self.finish()
        self._under_way.append(buffer.reduce(divisor))

    def finish(self) -> None:
        """Wait for what is under way, and put the sums into the main gradients."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        # It stays in the list until it is finished: what is interrupted is still under way.
        self._under_way[0].finish()
        del self._under_way[0]

    def drop(self) -> None:
        """Forget what is under way, which has been waited for."""
        self._under_way = []
        self._next = len(self._buffers) - 1
