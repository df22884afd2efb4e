"""Flat weights and main gradients of one buffer on a rank, and how gradients travel.

Gradients have three types, each of which only becomes the next: :class:`PartialSums`, the sums of this rank's own; :class:`Reduced`, sums
over the inner ranks; and a final gradient, summed over all ranks and divided once. So no gradient can be counted or divided twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from everybit_torch.collectives import (
    Communicator,
    FusedSum,
    GradientWires,
    Mode,
    Reduction,
    accumulate,
    all_reduce_into,
    as_sent,
    divide,
    reduce_scatter_into,
)
from everybit_torch.flat.places import Buffer, Place
from everybit_torch.sharded.strategies import Sharding


class FlatBuffer:
    """The weights and main gradients of one buffer on this rank.

    Args:
        buffer: The places of its parameters.
        parameters: The model's, by name; they become pieces of the weights.
        grads: How gradients are kept and sent.
        sharding: The tensors that the inner ranks share out.
        ranks: The inner and the outer ranks.
        fused: The compiled sum of values that an exact wire received, if there is one.

    Attributes:
        weights: All weights of the buffer.
        own_weights: Those of this rank's share.
        main: Main gradients: of the whole buffer, or of this rank's share alone if they are sharded.
        own: Those of this rank's share.
        gaps: Padding between parameters and after them.
        places: This rank's part of each parameter, with positions in the share; it may be empty.
    """

    def __init__(
        self,
        buffer: Buffer,
        parameters: Mapping[str, nn.Parameter],
        grads: GradientWires,
        sharding: Sharding,
        ranks: tuple[Communicator, Communicator],
        fused: FusedSum | None = None,
    ) -> None:
        self.buffer, self.grads, self.sharding, (self.inner, self.outer), self.fused = (
            buffer,
            grads,
            sharding,
            ranks,
            fused,
        )
        own = [parameters[place.spec.name] for place in buffer.places]
        self.weights = torch.zeros(buffer.numel, dtype=own[0].dtype, device=own[0].device)
        for parameter, place in zip(own, buffer.places, strict=True):
            parameter.data = self.weights[place.start : place.stop].view(place.spec.shape).copy_(parameter.detach())
        share = buffer.share(self.inner.rank if sharding.state else 0)
        self.own_weights = self.weights[share]
        self.main = torch.zeros_like(self.own_weights if sharding.grads else self.weights, dtype=grads.main)
        self.own = self.main if sharding.grads else self.main[share]
        self.gaps = buffer.gaps(range(len(buffer.places)))
        self.places: list[Place] = [place.within(share) for place in buffer.places]

    @property
    def has_bucket(self) -> bool:
        """Whether the gradients of each pass have memory of their own, in the wire's dtype, which is sent in that pass."""
        return self.sharding.grads

    def hand_out(self) -> None:
        """Send the new weights of each share to all inner ranks."""
        if self.sharding.state:
            self.inner.all_gather(
                self.weights, self.own_weights, f"new weights of {self.buffer}", self.buffer.uneven
            ).wait()


class PartialSums:
    """Sums of this rank's own gradients, which can be added to, and become :class:`Reduced` once.

    Args:
        of: The buffer.
        before: The sums of earlier passes of this cycle, to which these are added. Only where gradients are sharded.
    """

    def __init__(self, of: FlatBuffer, before: Reduced | None = None) -> None:
        self._of, self._before = of, before
        self._arrived: set[int] = set()
        self._sums: Tensor | None = (
            torch.empty_like(of.weights, dtype=of.grads.inner.dtype) if of.has_bucket else of.main
        )

    def add(self, number: int, gradient: Tensor) -> None:
        """Add a gradient of the parameter with this number in the buffer; its first is copied to its place."""
        assert self._sums is not None
        place, scale = self._of.buffer.places[number], self._of.grads.inner.prescale if self._of.has_bucket else 1.0
        mode: Mode = "add" if number in self._arrived else "copy"
        accumulate(self._sums[place.start : place.stop], gradient, mode=mode, scale=scale)
        self._arrived.add(number)

    def reduce(self, divisor: float | None) -> Reduced:
        """Begin the sum over the inner ranks.

        Args:
            divisor: The divisor of the sum over all ranks, if no other sum follows; else None.
        """
        sums, self._sums, of = self._sums, None, self._of
        assert sums is not None
        for gap in of.gaps if len(self._arrived) == len(of.buffer.places) else of.buffer.gaps(self._arrived):
            sums[gap].zero_()
        wire, what = of.grads.inner, f"gradients of {of.buffer}"
        sent = sums if of.has_bucket else as_sent(sums, wire)
        owned = sent is not of.main  # its memory is given back as soon as the sums are there
        now = divisor if of.outer.size == 1 else None
        if not of.sharding.state:
            under_way = all_reduce_into(
                of.main, sent, of.inner, wire, divisor=now, what=what, fused=of.fused, owned=owned
            )
        else:
            if self._before is not None:
                self._before.wait()
            mode: Mode = "copy" if self._before is None else "add"
            under_way = reduce_scatter_into(
                of.own,
                sent,
                of.inner,
                wire,
                mode=mode,
                divisor=now,
                what=what,
                fused=of.fused,
                owned=owned,
                lengths=of.buffer.uneven,
            )
        return Reduced(of, under_way, is_divided=now is not None)


class Reduced:
    """Sums over the inner ranks, maybe under way: they become final, or a part of the next :class:`PartialSums`.

    Args:
        of: The buffer.
        under_way: The reduction.
        is_divided: Whether it divides by the divisor of all ranks.
    """

    def __init__(self, of: FlatBuffer, under_way: Reduction, *, is_divided: bool) -> None:
        self._of, self._is_divided = of, is_divided
        self._under_way: Reduction | None = under_way

    @property
    def can_be_added_to(self) -> bool:
        """Whether another pass may follow in this cycle."""
        return self._of.has_bucket and not self._is_divided

    def settle(self) -> None:
        """Put the sums in their place if no other rank has to be waited for."""
        if self._under_way is not None and self._under_way.is_done():
            self.wait()

    def wait(self) -> None:
        """Wait until the sums are there."""
        if self._under_way is not None:
            self._under_way.finish()
            self._under_way = None

    def finish(self, divisor: float) -> Tensor:
        """Sum over the outer ranks, and divide; return the final gradient of this rank's share."""
        of = self._of
        self.wait()
        if of.outer.size > 1:
            wire, what = of.grads.outer, f"gradients of {of.buffer}, outer dimension"
            all_reduce_into(of.own, as_sent(of.own, wire), of.outer, wire, divisor=divisor, what=what).finish()
        elif not self._is_divided:
            divide(of.own, divisor)
        return of.own
