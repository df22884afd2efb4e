"""When gradients are copied or added to their buffers, and when these are reduced.

Gradients are reduced from the layout's last group to its first, in the same order on every rank, whatever order they arrive in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from everybit_torch.sharded.scheduling.events import Event

Phase = Literal["empty", "partial", "reduced", "final"]
"""What a main gradient holds: nothing of this cycle; sums of this rank's own gradients; over the inner ranks; over all, and divided."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A group of the layout whose parameters are trained.

    Attributes:
        number: In the layout.
        unit: The number of its unit.
        members: How many parameters it has.
    """

    number: int
    unit: int
    members: int


class GradientSchedule:
    """The events of gradients.

    Args:
        groups: The groups that are trained, in the layout's order.
        sharded: Main gradients are sharded: each backward pass is reduced, from a bucket of its own.
        overlaps: The reduction of a unit's gradients goes on while the next unit's arrive. False: it is waited for before these have a
            bucket.
    """

    def __init__(self, groups: Sequence[TrainedGroup], *, sharded: bool, overlaps: bool = True) -> None:
        self._groups, self._sharded, self._overlaps = list(groups), sharded, overlaps
        self._under_way = False  # whether reductions are
        self._position = {group.number: position for position, group in enumerate(groups)}
        self._next = len(groups) - 1
        self._arrived: list[set[int]] = [set() for _ in groups]  # since the last reduction
        self._seen: list[set[int]] = [set() for _ in groups]  # in this backward pass
        self._expected = [group.members for group in groups]
        self._buckets: set[int] = set()
        self._opened_for_pass: set[int] = set()

    @property
    def next(self) -> TrainedGroup | None:
        """The group whose turn it is to be reduced in this pass; None when all were."""
        return self._groups[self._next] if self._next >= 0 else None

    @property
    def any_arrived(self) -> bool:
        """Whether a buffer holds a gradient that was not reduced yet."""
        return any(self._arrived)

    def is_complete(self, number: int) -> bool:
        """Whether the gradient of every parameter that is trained now has arrived in this backward pass."""
        position = self._position[number]
        return len(self._seen[position]) >= self._expected[position]

    def begin_reductions(self) -> None:
        """Begin the reductions of a pass, of which none was made yet."""
        self._next = len(self._groups) - 1

    def begin_pass(self, expected: Sequence[int] | None = None) -> Iterator[Event]:
        """A backward pass begins.

        Args:
            expected: How many parameters of each group require a gradient now. None: nothing will arrive, and nothing is opened for it.
        """
        self.begin_reductions()
        self._seen = [set() for _ in self._groups]
        self._expected = [group.members for group in self._groups] if expected is None else list(expected)
        self._opened_for_pass = set()
        for position, group in enumerate(self._groups):
            if expected is not None and group.unit == 0:  # the model's own, whose gradients come first and last
                for event in self._open(position):
                    yield event
                    self._opened_for_pass.add(position)

    def cancel_pass(self) -> Iterator[Event]:
        """No gradient arrived, and none will: free what was opened for it."""
        for position in sorted(self._opened_for_pass):
            if not self._arrived[position]:
                yield Event("close", self._groups[position].number)
                self._buckets.discard(position)

    def arrive(self, number: int, place: int) -> Iterator[Event]:
        """The gradient of a group's parameter arrives."""
        position = self._position[number]
        yield from self._open(position)
        arrived = self._arrived[position]
        yield Event("add" if place in arrived else "copy", number, place)
        arrived.add(place)
        self._seen[position].add(place)

    def reduce_next(self, *, last: bool) -> Iterator[Event]:
        """Reduce the next group, when the reduction before it is over.

        Args:
            last: Nothing more comes in this cycle.
        """
        yield from self.finish()
        yield from self._reduce(self._next, last=last)
        self._next -= 1

    def finish(self) -> Iterator[Event]:
        """Wait for reductions under way, and put the sums into the main gradients."""
        yield Event("finish")
        self._under_way = False

    def finish_cycle(self, phases: Sequence[Phase]) -> Iterator[Event]:
        """Reduce what was not reduced yet, and divide.

        Args:
            phases: What the main gradients hold, with no reduction under way.
        """
        for position in reversed(range(len(self._groups))):
            if phases[position] == "empty" or (phases[position] == "partial" and not self._sharded):
                yield from self.finish()
                yield from self._reduce(position, last=True)
        yield from self.finish()
        for position in reversed(range(len(self._groups))):
            if phases[position] == "reduced":
                yield Event("finalize", self._groups[position].number)

    def clear(self) -> Iterator[Event]:
        """Forget all gradients."""
        self.begin_reductions()
        self._under_way = False
        for position, group in enumerate(self._groups):
            yield Event("clear", group.number)
            self._arrived[position], self._seen[position] = set(), set()
            self._buckets.discard(position)

    def _open(self, position: int) -> Iterator[Event]:
        """Make room for what arrives in a bucket, where main gradients are sharded."""
        if self._sharded and position not in self._buckets:
            if self._under_way and not self._overlaps:
                yield from self.finish()
            yield Event("open bucket", self._groups[position].number)
            self._buckets.add(position)

    def _reduce(self, position: int, *, last: bool) -> Iterator[Event]:
        group, arrived = self._groups[position], self._arrived[position]
        yield from self._open(position)
        for place in range(group.members):
            if place not in arrived:
                yield Event("zero", group.number, place)
        yield Event("reduce last" if last else "reduce", group.number)
        self._under_way = True
        if self._sharded:
            self._buckets.discard(position)
            self._arrived[position] = set()
