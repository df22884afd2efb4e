"""The buffers of gradients, which hold sums of this rank's own (partial) first, then sums over all ranks (reduced), and never both.

A buffer knows which of the two it holds. What would add a sum to itself, reduce twice or accumulate into what has been reduced is an
error and not a wrong gradient. Whether a gradient is copied or added is an event of the schedule; whether a sum is, is decided here, by
strategy, and not by what happens to alias what:

==========================  ==============================  =======================================================
strategy                    a gradient arrives              a reduction is over
==========================  ==============================  =======================================================
no_shard, optim             copied, then added, to main     *copied* to main (or it was reduced in place)
optim_grads, ..._params     copied to a bucket, for sending  copied to main, *added* from the second backward pass on
the same, deferred          copied, then added, in main's    as above, once for all deferred passes
                            dtype, for all ranks' parts
==========================  ==============================  =======================================================
"""

from __future__ import annotations

from collections.abc import Sequence
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
    can_be_freed,
    cast,
    divide,
    reduce_scatter_into,
)
from everybit_torch.memory_pool import MemoryPool
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.offload import FromHost, HostCopies
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
        keep: Keep the main gradient's memory from one cycle to the next.
        copies: Of the main gradient, if that lies on the host: it is brought to the device for as long as a sum is put into it.

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
        keep: bool = True,
        copies: HostCopies | None = None,
    ) -> None:
        self._keep, self._copies, self._pool, self._fused, self.device = keep, copies, pool, fused, device
        self.group, self.sharding, self.inner, self.outer = group, sharding, inner, outer
        self.wire, self.outer_wire = wire, outer_wire
        low, high = group.shard(inner.rank, inner.size) if sharding.state else (0, group.padded)
        size = high - low if sharding.grads else group.padded
        # The lengths of the inner ranks' parts, and of the parts of this one's for the outer ranks, where they differ.
        self._low, self._high = low, high
        self._lengths = group.sizes(inner.size) if sharding.state else ()
        self._outer_lengths: tuple[int, ...] = ()
        if sharding.outer == "optim":
            self._outer_lengths = group.sizes_within(inner.rank, inner.size, outer.size)
        if copies is None:
            self.main = torch.zeros(size, dtype=main, device=device)
        else:
            self.main = copies.allocate_on_host(size, main)
            copies.reserve(size, main)
        if not keep:
            pool.grow_beside(self.main.nbytes)
        self.phase: Phase = "empty"
        self._bucket: Tensor | None = None
        self._unreduced: Tensor | None = None
        self._squares: Squares | None = None
        first, stop = sharding.own_range(group, inner.rank, inner.size, outer.rank, outer.size)
        slices = list(group.slices(first, stop))
        self._filled = slices[-1].offset + slices[-1].high - slices[-1].low if slices else 0  # the rest is padding
        self.clear()

    @property
    def what(self) -> str:
        """The name of this buffer in error messages."""
        first = self.group.placements[0].spec.name
        others = len(self.group.placements) - 1
        return f"the gradients of {first}" + (f" and {others} other parameters" if others else "")

    @property
    def own(self) -> Tensor:
        """The part of the main gradient that this rank's optimizer steps."""
        return self._own_of(self.main)

    def _own_of(self, main: Tensor) -> Tensor:
        main = self._part_of(main)
        if self.sharding.outer != "optim":
            return main
        return self.outer.parts(main, self._outer_lengths)[self.outer.rank]

    @property
    def without_padding(self) -> Tensor:
        """The part that this rank's optimizer steps, up to the last element that is a parameter's."""
        return self.own[: self._filled]

    @property
    def to_read(self) -> Tensor | FromHost:
        """The same, to be read on the device part by part."""
        part = self.without_padding
        return part if self._copies is None else FromHost(part, self._copies, self.device)

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
        in_bucket = self.sharding.grads and self._unreduced is None
        accumulate(self._place(number), gradient, mode=mode, scale=self.wire.prescale if in_bucket else 1.0)

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
        found = self._bucket if self._unreduced is None else self._unreduced
        assert found is not None
        return found

    def open_bucket(self) -> None:
        """Allocate what gradients arrive in, where main gradients are sharded."""
        self._bucket = self._pool.empty(self.group.padded, self.wire.dtype, self.device)

    def open_unreduced(self) -> None:
        """Allocate the sum of passes that are not reduced, of the whole group and in the main gradient's dtype."""
        self._unreduced = self._pool.empty(self.group.padded, self.main.dtype, self.device)

    def open_main(self) -> None:
        """Allocate the main gradient, where its memory is not kept."""
        storage = self.main.untyped_storage()
        if storage.nbytes() == 0:
            self._pool.grow_beside(self.main.nbytes)
            storage.resize_(self.main.nbytes)

    def close(self) -> None:
        """Free what gradients would have arrived in; none has."""
        if self.sharding.grads:
            self._give_back()
        else:
            self._free_main()

    def _give_back(self) -> None:
        for one in (self._bucket, self._unreduced):
            self._pool.take_back(one)
        self._bucket = self._unreduced = None

    def _free_main(self) -> None:
        self._pool.grow_beside(-self.main.untyped_storage().nbytes())
        if not can_be_freed(self.main):
            self.main = torch.empty_like(self.main)  # the other stays with whoever holds on to it
        self.main.untyped_storage().resize_(0)

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
        mode: Literal["copy", "add"] = "copy"
        for start, stop in self.group.gaps:
            self._partial[start:stop].zero_()
        if self.sharding.grads:
            mode = "add" if self.phase == "reduced" else "copy"
            squares = self._squares = Squares.begin(self._working, self._filled) if now is not None else None
            reduction = reduce_scatter_into(
                self._working, self._take_sums(), self.inner, self.wire, mode=mode, divisor=now, owned=True, what=self.what,
                observe=None if squares is None else squares.add, pool=self._pool, fused=self._fused,
                lengths=self._lengths,
            )  # fmt: skip
        else:
            reduction = self._reduce_main(
                self.main,
                self.inner,
                self.wire,
                now,
                self.what,
                scattered=self.sharding.state,
                lengths=self._lengths,
            )
        self.phase = "reduced"
        install = reduction.install

        def finish() -> None:
            self._bring(holds=mode == "add")
            install()
            if now is not None or divisor is None:
                self._put()
            if self._squares is not None:
                self._squares.end(self.main)
            if divisor is not None:
                self.phase = "final"

        def finish_outer() -> None:
            assert divisor is not None
            self._reduce_outer(divisor)
            self._put()

        reduction.install = finish
        if divisor is not None and self.outer.size > 1:
            reduction.after = finish_outer
        return reduction

    # -- on the host ------------------------------------------------------------------------------------------------------------

    def divide(self, divisor: float) -> None:
        """Divide what this rank steps, which is final."""
        self._bring(holds=True)
        divide(self._own_of(self._working), divisor)
        self._put()

    @property
    def _working(self) -> Tensor:
        """The main gradient while sums are put into it: room on the device, if it lies on the host."""
        return self.main if self._copies is None else self._copies.room(self.main.numel(), self.main.dtype)

    def _bring(self, *, holds: bool) -> None:
        """Begin to work on it on the device; with its values, if it holds something that counts."""
        if self._copies is not None:
            self._copies.begin_in_room()
            if holds:
                self._copies.bring(self._working, self.main)

    def _put(self) -> None:
        """Bring it to the host again."""
        if self._copies is not None:
            self._copies.put(self.main, self._working)

    def _take_sums(self) -> Tensor:
        """Return what is sent, as it is sent. This buffer does not hold it any more."""
        sums, in_bucket = self._partial, self._unreduced is None
        sent = sums if in_bucket else self._as_sent(sums, self.wire)
        if sent is not sums:
            self._pool.take_back(sums)
        self._bucket = self._unreduced = None
        return sent

    def _reduce_main(
        self,
        sums: Tensor,
        communicator: Communicator,
        wire: Wire,
        divisor: float | None,
        what: str,
        *,
        scattered: bool,
        lengths: Sequence[int] = (),
    ) -> Reduction:
        """Start to reduce sums that lie in the main gradient, in place: every rank all of them, or each its part (``scattered``)."""
        partial = self._as_sent(sums, wire)
        owned = partial is not sums
        if not scattered:
            return all_reduce_into(
                sums,
                partial,
                communicator,
                wire,
                divisor=divisor,
                owned=owned,
                what=what,
                pool=self._pool,
                fused=self._fused,
            )
        into = communicator.parts(sums, lengths)[communicator.rank]
        return reduce_scatter_into(
            into,
            partial,
            communicator,
            wire,
            mode="copy",
            divisor=divisor,
            owned=owned,
            what=what,
            pool=self._pool,
            fused=self._fused,
            lengths=lengths,
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
        self._bring(holds=True)
        if self.outer.size > 1:
            self._reduce_outer(divisor)
        else:
            divide(self._part_of(self._working), divisor)
        self._put()
        self.phase = "final"

    def _part_of(self, main: Tensor) -> Tensor:
        """The part of the main gradient that holds a sum over the inner ranks."""
        whole = self.sharding.grads or not self.sharding.state
        return main if whole else main[self._low : self._high]

    def _reduce_outer(self, divisor: float) -> None:
        """Copies, never adds: the running sum is this rank's own."""
        self._reduce_main(
            self._part_of(self._working),
            self.outer,
            self.outer_wire,
            divisor,
            f"{self.what}, outer dimension",
            scattered=self.sharding.outer == "optim",
            lengths=self._outer_lengths,
        ).finish()

    def clear(self) -> None:
        """Forget all gradients, and free their memory unless it is kept."""
        self.phase, self._squares = "empty", None
        self._give_back()
        if not self._keep:
            self._free_main()
