"""The buffers of gradients, which hold sums of this rank's own (partial) first, then sums over all ranks (reduced), and never both.

A buffer knows which of the two it holds. What would add a sum to itself, reduce twice or accumulate into what has been reduced is an
error and not a wrong gradient. Whether a gradient is copied or added is an event of the schedule; whether a sum is, is decided here, by
strategy, and not by what happens to alias what:

===============  ================================  =========================================================
strategy         a gradient arrives                a reduction is over
===============  ================================  =========================================================
no_shard, optim  copied, then added, to main       *copied* to main (or it was reduced in place)
optim_grads      copied to a bucket, for sending   copied to main, *added* from the second backward pass on
===============  ================================  =========================================================
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.reduction import (
    FusedSum,
    Reduction,
    Wire,
    accumulate,
    all_reduce_into,
    cast,
    divide,
    reduce_scatter_into,
)
from everybit_torch.memory_pool import MemoryPool
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.scheduling.gradients import Phase
from everybit_torch.sharded.squares import Squares
from everybit_torch.sharded.strategies import Sharding


class GradientBuffer:
    """The gradients of one group of parameters.

    Args:
        group: Of the layout.
        sharding: Decides what is kept.
        inner: The ranks that buffers are sharded over.
        outer: The ranks that hold copies of the same shards.
        main: dtype of the main gradient.
        wire: How gradients travel between the inner ranks.
        outer_wire: And between the outer ones.
        device: Where everything lies.
        pool: Lends memory for what is there during a pass: buckets, and what is sent and received.
        fused: Adds up what an exact wire has received.

    Attributes:
        device: As given.
        main: The main gradient: the whole group's, padded (``no_shard``, ``optim``), or this inner rank's part of it.
        phase: ``"empty"``; ``"partial"``: sums of this rank's gradients; ``"reduced"``: sums over the inner ranks; ``"final"``: over all
            ranks, and divided.
    """

    def __init__(
        self,
        group: Group,
        sharding: Sharding,
        inner: Communicator,
        outer: Communicator,
        main: torch.dtype,
        wire: Wire,
        outer_wire: Wire,
        device: torch.device,
        *,
        pool: MemoryPool,
        fused: FusedSum | None = None,
    ) -> None:
        self._pool, self._fused, self.device = pool, fused, device
        self.group, self.sharding, self.inner, self.outer = group, sharding, inner, outer
        self.wire, self.outer_wire = wire, outer_wire
        low, high = group.shard(inner.rank, inner.size) if sharding.state else (0, group.padded)
        # The lengths of the inner ranks' parts, where they differ.
        self._low, self._high = low, high
        self._lengths = group.sizes(inner.size) if sharding.state else ()
        self.main = torch.zeros(high - low if sharding.grads else group.padded, dtype=main, device=device)
        self.phase: Phase = "empty"
        self._bucket: Tensor | None = None
        self._squares: Squares | None = None
        slices = list(group.slices(low, high))
        self._filled = slices[-1].offset + slices[-1].high - slices[-1].low if slices else 0  # the rest is padding

    @property
    def what(self) -> str:
        """The name of this buffer in error messages."""
        first = self.group.placements[0].spec.name
        others = len(self.group.placements) - 1
        return f"the gradients of {first}" + (f" and {others} other parameters" if others else "")

    @property
    def own(self) -> Tensor:
        """The part of the main gradient that this rank's optimizer steps, which holds a sum over the inner ranks."""
        whole = self.sharding.grads or not self.sharding.state
        return self.main if whole else self.main[self._low : self._high]

    @property
    def without_padding(self) -> Tensor:
        """The part that this rank's optimizer steps, up to the last element that is a parameter's."""
        return self.own[: self._filled]

    def sum_of_squares(self) -> Tensor | None:
        """The sum of squares of :attr:`without_padding`, if it was found when the main gradient was written, and that is as it was."""
        found = self._squares
        return found.total if found is not None and found.is_complete_for(self.main) else None

    # -- accumulating -----------------------------------------------------------------------------------------------------------

    def accumulate(self, number: int, gradient: Tensor, *, mode: Literal["copy", "add"]) -> None:
        """Copy or add the gradient of the group's parameter ``number``, to what has been opened for it.

        Raises:
            RuntimeError: The cycle's sums are reduced already.
        """
        if self.phase == "final" or (self.phase == "reduced" and not self.sharding.grads):
            raise RuntimeError(
                f"{self.group.placements[number].spec.name}: a gradient arrived after {self.what} were summed over the ranks; adding to it"
                " would count it wrongly. Accepted is one backward pass inside microbatch(last=True), and then step() or zero_grad()."
            )
        if not self.sharding.grads:
            self.phase = "partial"
        accumulate(self._place(number), gradient, mode=mode, scale=self.wire.prescale if self.sharding.grads else 1.0)

    def zero(self, number: int) -> None:
        """Write zeros for the parameter ``number``, of which no gradient arrived."""
        self._place(number).zero_()

    def _place(self, number: int) -> Tensor:
        placement = self.group.placements[number]
        return self._partial[placement.start : placement.stop]

    @property
    def _partial(self) -> Tensor:
        """The buffer in which gradients are accumulated."""
        if not self.sharding.grads:
            return self.main
        assert self._bucket is not None
        return self._bucket

    def open_bucket(self) -> None:
        """Allocate what gradients arrive in, where main gradients are sharded."""
        self._bucket = self._pool.empty(self.group.padded, self.wire.dtype, self.device)

    def close(self) -> None:
        """Free what gradients would have arrived in; none has."""
        self._pool.take_back(self._bucket)
        self._bucket = None

    # -- reducing ---------------------------------------------------------------------------------------------------------------

    def reduce(self, divisor: float | None) -> Reduction:
        """Start the sum over the inner ranks of what has arrived.

        Args:
            divisor: What the sum over all ranks is to be divided by; None if more is to come in this cycle.

        Raises:
            RuntimeError: The buffer holds a sum over the ranks already.
        """
        if self.phase == "final" or (self.phase == "reduced" and not self.sharding.grads):
            raise RuntimeError(
                f"{self.what} were summed over the ranks already; accepted next is step() or zero_grad()."
            )
        now = divisor if self.outer.size == 1 else None
        for start, stop in self.group.gaps:
            self._partial[start:stop].zero_()
        if self.sharding.grads:
            mode: Literal["copy", "add"] = "add" if self.phase == "reduced" else "copy"
            squares = self._squares = Squares.begin(self.main, self._filled) if now is not None else None
            sent, self._bucket = self._partial, None
            reduction = reduce_scatter_into(
                self.main, sent, self.inner, self.wire, mode=mode, divisor=now, owned=True, what=self.what,
                observe=None if squares is None else squares.add, pool=self._pool, fused=self._fused,
                lengths=self._lengths,
            )  # fmt: skip
        else:
            reduction = self._reduce_inner(now)
        self.phase = "reduced"
        install = reduction.install

        def finish() -> None:
            install()
            if self._squares is not None:
                self._squares.end(self.main)
            if divisor is not None:
                self.phase = "final"

        def finish_outer() -> None:
            assert divisor is not None
            self._reduce_outer(divisor)

        reduction.install = finish
        if divisor is not None and self.outer.size > 1:
            reduction.after = finish_outer
        return reduction

    def divide(self, divisor: float) -> None:
        """Divide what this rank steps, which is final."""
        divide(self.own, divisor)

    def _reduce_inner(self, divisor: float | None) -> Reduction:
        """Start to reduce sums that lie in the whole main gradient: every rank gets all of them, or each its part."""
        if not self.sharding.state:
            return self._all_reduce(self.main, self.inner, self.wire, divisor, self.what)
        partial = self._as_sent(self.main, self.wire)
        return reduce_scatter_into(
            self.own,
            partial,
            self.inner,
            self.wire,
            mode="copy",
            divisor=divisor,
            owned=partial is not self.main,
            what=self.what,
            pool=self._pool,
            fused=self._fused,
            lengths=self._lengths,
        )

    def _reduce_outer(self, divisor: float) -> None:
        """Copies, never adds: the running sum is this rank's own."""
        self._all_reduce(self.own, self.outer, self.outer_wire, divisor, f"{self.what}, outer dimension").finish()

    def _all_reduce(
        self, sums: Tensor, communicator: Communicator, wire: Wire, divisor: float | None, what: str
    ) -> Reduction:
        partial = self._as_sent(sums, wire)
        return all_reduce_into(
            sums,
            partial,
            communicator,
            wire,
            divisor=divisor,
            owned=partial is not sums,
            what=what,
            pool=self._pool,
            fused=self._fused,
        )

    def _as_sent(self, sums: Tensor, wire: Wire) -> Tensor:
        """Sums in the wire's dtype and scale: the given tensor, where it has that dtype."""
        if sums.dtype is wire.dtype:
            return sums if wire.prescale == 1.0 else sums.mul_(wire.prescale)
        sent = self._pool.empty(sums.numel(), wire.dtype, sums.device)
        cast(sent, sums, wire.prescale)
        return sent

    def finalize(self, divisor: float) -> None:
        """Sum over the outer ranks and divide, where no reduction was told that it was the last.

        Raises:
            RuntimeError: There is something that was not summed over the inner ranks.
        """
        if self.phase == "final":
            return
        if self.phase != "reduced":
            raise RuntimeError(f"{self.what} are {self.phase}; they are to be summed over the ranks first.")
        if self.outer.size > 1:
            self._reduce_outer(divisor)
        else:
            divide(self.own, divisor)
        self.phase = "final"

    def clear(self) -> None:
        """Forget all gradients."""
        self.phase, self._squares = "empty", None
        self.close()
