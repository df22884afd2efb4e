"""Adds up the bytes of a schedule's events: what is allocated on the way, and what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everybit_torch.collectives.reduction import Wire, accumulate_bytes, install_bytes
from everybit_torch.fused_sums import TOGETHER
from everybit_torch.memory_pool import Account, keeps_memory
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.traffic import (
    compared_bytes,
    sent_by_exchange,
    sent_by_reduction,
    sent_by_sum,
)
from everybit_torch.sharded.scheduling.events import Event, Kind
from everybit_torch.sharded.scheduling.schedule import Stage


@dataclass(frozen=True, slots=True)
class StepBytes:
    """The bytes of the parts of a step that are no events of a group.

    Attributes:
        agree: Temporary bytes of what ranks agree on.
        step: Temporary bytes of the optimizer.
        agreed: Bytes of the numbers in which ranks agree.
        reductions: How many float64 numbers each reduction has that the transforms ask for.
        device: Where it is taken.
        located: Bytes of a rank's counts of gradients that are not finite, where these are told by parameter; else 0.
    """

    agree: int
    step: int
    agreed: int
    reductions: tuple[int, ...]
    device: torch.device
    located: int = 0


class Meter:
    """The bytes that a rank has allocated, besides persistent ones, and the bytes that it has sent, after each event.

    Args:
        groups: Of the layout, on this rank.
        step: Bytes of a step.

    Attributes:
        peak: The most that were, since this was last set.
        sent: Bytes that were sent, by collective.
    """

    def __init__(self, groups: Sequence[GroupPlan], step: StepBytes) -> None:
        self._groups, self._step = list(groups), step
        self._pool = Account(keeps=keeps_memory(step.device))
        self.peak = 0
        self.sent: Counter[str] = Counter()
        self._buckets: Counter[int] = Counter()
        self._in_flight: list[tuple[GroupPlan, int, bool]] = []
        self._handlers: dict[Kind, Callable[[Event], None]] = {
            "compare microbatch": self._compare,
            "compare step": self._compare,
            "open bucket": self._open_bucket,
            "copy": self._accumulate,
            "add": self._accumulate,
            "close": self._clear,
            "clear": self._clear,
            "reduce": self._reduce,
            "reduce last": self._reduce,
            "finish": self._finish,
            "agree": self._agree,
            "step": self._take_step,
            "spread": self._spread,
        }

    @property
    def _ranks(self) -> tuple[int, int]:
        return self._groups[0].ranks.inner, self._groups[0].ranks.outer

    def _compare(self, _event: Event) -> None:
        self._send(compared_bytes(self._ranks))

    def follow(self, events: Sequence[Event]) -> None:
        """Take note of events. Those that neither allocate nor send anything are passed over."""
        for event in events:
            handler = self._handlers.get(event.kind)
            if handler is not None:
                handler(event)

    @property
    def live(self) -> int:
        """Bytes that are allocated now."""
        return self._pool.nbytes

    def _lend(self, nbytes: int) -> None:
        if nbytes:
            self._pool.lend(nbytes)
            self.peak = max(self.peak, self.live)

    def _take_back(self, nbytes: int) -> None:
        if nbytes:
            self._pool.take_back(nbytes)

    def _briefly(self, nbytes: int) -> None:
        self.peak = max(self.peak, self.live + nbytes)

    def _send(self, sent: Counter[str]) -> None:
        self.sent.update(sent)

    def _spread(self, event: Event) -> None:
        one = self._groups[event.number]
        self._send(sent_by_exchange("all_gather", one.weights, one.ranks.inner))

    # -- gradients --------------------------------------------------------------------------------------------------------------------

    def _open_bucket(self, event: Event) -> None:
        nbytes = self._buckets[event.number] = self._groups[event.number].bucket
        self._lend(nbytes)

    def _clear(self, event: Event) -> None:
        self._take_back(self._buckets.pop(event.number, 0))

    def _accumulate(self, event: Event) -> None:
        one = self._groups[event.number]
        in_bucket = one.kind.grads
        self._briefly(
            accumulate_bytes(
                one.group.placements[event.place].spec.numel,
                one.wire.dtype if in_bucket else one.main,
                one.group.dtype,
                adds=event.kind == "add",
                scale=one.wire.prescale if in_bucket else 1.0,
                chunk=one.chunk,
            )
        )

    def _reduce(self, event: Event) -> None:
        one, last = self._groups[event.number], event.kind == "reduce last"
        sent = self._buckets.pop(event.number, 0)
        if not one.kind.grads and one.wire.dtype is not one.main:
            sent = one.bucket
            self._lend(sent)
            self._briefly(
                accumulate_bytes(
                    one.group.padded, one.wire.dtype, one.main, adds=False, scale=one.wire.prescale, chunk=one.chunk
                )
            )
        self._lend(one.received)
        self._in_flight.append((one, sent, last))
        self._send(sent_by_reduction(one, last=last))

    def _finish(self, _event: Event) -> None:
        for one, sent, last in self._in_flight:
            # What was received is added up; natively that is where what was sent is.
            if one.received:
                self._take_back(sent)
            squares = one.squares_as_written(self._step.device) if last else None
            self._briefly(_install_bytes(one, last=last) + (squares or 0))
            self._take_back(one.received or sent)
            if last and one.ranks.outer > 1:
                self._reduce_outer(one)
        self._in_flight.clear()

    def _reduce_outer(self, one: GroupPlan) -> None:
        wire, outer = one.outer_wire, one.ranks.outer
        reduced = one.part if one.kind.state else one.group.padded
        own = reduced // outer
        cast = reduced * wire.dtype.itemsize if wire.dtype is not one.main else 0
        received = own * outer * wire.dtype.itemsize if wire.exact else 0
        self._lend(cast)
        if cast:
            self._briefly(
                accumulate_bytes(reduced, wire.dtype, one.main, adds=False, scale=wire.prescale, chunk=one.chunk)
            )
        self._lend(received)
        if received:
            self._take_back(cast)
        self._briefly(
            _sum_bytes(
                one,
                wire,
                own if wire.exact else reduced,
                outer if wire.exact else 1,
                in_place=not cast and not wire.exact,
                divides=True,
            )
        )
        self._take_back(received or cast)

    # -- a step -----------------------------------------------------------------------------------------------------------------------

    def _agree(self, _event: Event) -> None:
        self._pool.drop()
        self._briefly(self._step.agree)
        for size in self._ranks:
            self._send(sent_by_sum(self._step.agreed, size))
        located = self._step.located
        for size in self._ranks:
            located *= size
            self._send(sent_by_exchange("all_gather", located, size))

    def _take_step(self, _event: Event) -> None:
        self._briefly(self._step.step)
        for numbers in self._step.reductions if self._groups[0].kind.state else ():
            self._send(sent_by_sum(numbers * torch.float64.itemsize, self._ranks[0]))


def meter(
    stages: Sequence[Stage], groups: Sequence[GroupPlan], step: StepBytes, microbatches: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the most bytes that a cycle allocates beside what persists, by stage, and the bytes that it sends, by collective.

    Args:
        stages: Of a cycle. If they have fewer microbatches than ``microbatches``, the second stands for all that are left out.
        groups: Of the layout, on one rank.
        step: Bytes of a step.
        microbatches: The number of microbatches in a step.
    """
    peaks: dict[str, int] = dict.fromkeys(("backward", "step"), 0)
    sent: Counter[str] = Counter()
    left_out = microbatches - 1 - stages[-1].microbatch
    one = Meter(groups, step)
    for stage in stages:
        one.peak, one.sent = one.live, Counter()
        one.follow(stage.events)
        peaks[stage.name] = max(peaks[stage.name], one.peak)
        times = 1 + left_out if stage.microbatch == 1 and stage.name != "step" else 1
        sent.update({name: times * nbytes for name, nbytes in one.sent.items()})
    return peaks, {name: nbytes for name, nbytes in sent.items() if nbytes}


def _install_bytes(one: GroupPlan, *, last: bool) -> int:
    whole = not one.kind.state
    numel = one.group.padded if whole and not one.wire.exact else one.part
    same = one.wire.dtype is one.main and not one.kind.grads
    parts, divides = one.ranks.inner if one.wire.exact else 1, last and one.ranks.outer == 1
    return _sum_bytes(one, one.wire, numel, parts, in_place=same and not one.wire.exact, divides=divides)


def _sum_bytes(one: GroupPlan, wire: Wire, numel: int, parts: int, *, in_place: bool, divides: bool) -> int:
    """Bytes that adding up so many parts of ``numel`` elements takes."""
    if one.fused and parts > 1:
        return numel * torch.float64.itemsize if parts > TOGETHER else 0
    return install_bytes(
        numel,
        one.main,
        parts,
        part=wire.dtype,
        in_place=in_place,
        divides=divides,
        scale=1 / wire.prescale,
        device=one.device,
    )
