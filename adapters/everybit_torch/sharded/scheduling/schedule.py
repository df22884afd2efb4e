"""The schedule of a stepper on flat buffers: the events that follow each signal; and the cycle that is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.gradients import GradientSchedule, Phase, TrainedGroup
from everybit_torch.sharded.strategies import Sharding


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, besides the layout, that determine a schedule.

    Attributes:
        sharding: What is sharded.
        overlap_reductions: Whether the reduction of a unit's gradients goes on while those of the next arrive, where they are sharded.
    """

    sharding: Sharding
    overlap_reductions: bool = True

    @property
    def compares_phases(self) -> bool:
        """Whether ranks compare which phase of a cycle begins: where each has collectives, and the host carries them out.

        There a collective that meets another of a different size ends the process.
        """
        return self.sharding.grads and not self.overlap_reductions


class Schedule:
    """Answers each signal with the events that follow it. An event counts when the next one is asked for.

    Args:
        layout: Of the model.
        settings: See there.

    Attributes:
        gradients: Of groups.
        last: Whether the backward pass that goes on, or comes next, is the last of its cycle; None if nobody has said.
        accumulates: Whether the pass that goes on accumulates a parameter's gradient, as far as its graph tells.
        arrived: Whether one has arrived.
    """

    def __init__(self, layout: Layout, settings: Settings) -> None:
        self._settings = settings
        self.trained = [
            TrainedGroup(number, group.unit, len(group.placements))
            for number, group in enumerate(layout.groups)
            if group.requires_grad
        ]
        self.gradients = GradientSchedule(
            self.trained, sharded=settings.sharding.grads, overlaps=settings.overlap_reductions
        )
        self.last: bool | None = None
        self.accumulates = self.arrived = self._sends = False

    # -- phases that all ranks begin together -----------------------------------------------------------------------------------------

    def begin_reductions(self) -> None:
        """The next backward pass has not sent anything."""
        self._sends = False
        self.gradients.begin_reductions()

    def _begin_to_send(self) -> Iterator[Event]:
        """The first sum of a backward pass is about to be sent; not earlier, since a pass may turn out to have none."""
        if self._settings.compares_phases and not self._sends:
            self._sends = True
            yield Event("compare microbatch", int(self.last is True))

    def begin_step(self) -> Iterator[Event]:
        """A step begins, or gradients are completed before it."""
        if self._settings.compares_phases:
            yield Event("compare step")

    # -- one backward pass ------------------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed over the ranks in this backward pass."""
        return self.last is True or self._settings.sharding.grads

    def begin_pass(self, expected: Sequence[int], *, accumulates: bool = True) -> Iterator[Event]:
        """A backward pass begins; see :meth:`.gradients.GradientSchedule.begin_pass`."""
        self.accumulates, self.arrived = accumulates, False
        yield from self.gradients.begin_pass(expected)

    def arrive(self, number: int, place: int) -> Iterator[Event]:
        """The gradient of a parameter arrives: the one at a place of a group."""
        yield from self.gradients.arrive(number, place)
        self.arrived = True
        if self.gradients.is_complete(number):
            yield from self._advance()

    def _advance(self) -> Iterator[Event]:
        """Reduce what is complete, from the layout's last group on: in this order, whatever comes first."""
        while self.reduces and (group := self.gradients.next) is not None and self.gradients.is_complete(group.number):
            yield from self._reduce_next()

    def _reduce_next(self) -> Iterator[Event]:
        yield from self._begin_to_send()
        yield from self.gradients.reduce_next(last=self.last is True)

    def end_pass(self) -> Iterator[Event]:
        """Autograd is done: reduce the rest."""
        while self.reduces and self.gradients.next is not None:
            yield from self._reduce_next()
        yield from self.gradients.finish()
        self._sends = False

    def cancel_pass(self) -> Iterator[Event]:
        """The pass was that of ``torch.autograd.grad``: no parameter has a gradient of it."""
        yield from self.gradients.cancel_pass()

    def empty_pass(self) -> Iterator[Event]:
        """Take part in what other ranks' passes do, up to their end, where a loss reached no parameter."""
        yield from self.gradients.begin_pass()

    def take_part(self, *, reduces: bool) -> Iterator[Event]:
        """Reduce what is left of a pass that an error ended, whatever it holds: it is forgotten here, and nobody waits for it elsewhere.

        Args:
            reduces: Whether the other ranks reduce it.
        """
        while reduces and self.gradients.next is not None:
            yield from self._begin_to_send()
            yield Event("drain")
            yield from self.gradients.reduce_next(last=self.last is True)
        yield from self.gradients.finish()

    # -- a step -----------------------------------------------------------------------------------------------------------------------

    def finish_gradients(self, phases: Sequence[Phase]) -> Iterator[Event]:
        """The cycle's gradients are to be final; see :meth:`.gradients.GradientSchedule.finish_cycle`."""
        yield from self.gradients.finish_cycle(phases)

    def agree(self) -> Iterator[Event]:
        """Ranks agree on a step, with final gradients."""
        yield Event("agree")

    def update(self) -> Iterator[Event]:
        """Step, and hand out the weights."""
        yield Event("step")
        yield from self.hand_out([group.number for group in self.trained])

    def hand_out(self, groups: Sequence[int]) -> Iterator[Event]:
        """Hand out weights of these groups of the layout, which have changed, to the ranks that keep copies."""
        spread = groups if self._settings.sharding.state else ()
        for number in spread:
            yield Event("spread", number)
        for number in spread:
            yield Event("settle", number)
        for number in groups:
            yield Event("stepped", number)


# -- the cycle that is planned --------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A part of a cycle, with the events in it.

    Attributes:
        name: ``"backward"`` or ``"step"``.
        microbatch: The number of the microbatch; of a step, of the last one.
        events: In order.
    """

    name: Literal["backward", "step"]
    microbatch: int
    events: list[Event]


def cycle(layout: Layout, settings: Settings, microbatches: int = 1) -> list[Stage]:
    """The events of a cycle in which every unit runs once in each microbatch, in the layout's order, and every gradient arrives.

    Of each of a unit's groups one gradient arrives when the backward pass comes to what the unit returned, and the others when it has left
    the units that lie in it.

    Args:
        layout: Of the model.
        settings: See there.
        microbatches: Backward passes in the cycle, each inside ``microbatch()``.
    """
    schedule = Schedule(layout, settings)
    stages: list[Stage] = []
    for number in range(microbatches):
        schedule.last = number == microbatches - 1
        stages.append(Stage("backward", number, list(_backward(schedule, layout.units))))
    phases: list[Phase] = ["final" for _ in schedule.trained]
    step = [*schedule.begin_step(), *schedule.finish_gradients(phases), *schedule.agree(), *schedule.update()]
    stages.append(Stage("step", microbatches - 1, [*step, *schedule.gradients.clear()]))
    return stages


def _in_order(units: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """The units, as their forward passes begin (True) and end (False)."""
    running: list[int] = []
    for unit, name in enumerate(units):
        while len(running) > 1 and not name.startswith(f"{units[running[-1]]}."):
            yield running.pop(), False
        yield unit, True
        running.append(unit)
    while running:
        yield running.pop(), False


def _backward(schedule: Schedule, units: Sequence[str]) -> Iterator[Event]:
    groups: list[list[TrainedGroup]] = [[] for _ in units]
    for group in reversed(schedule.trained):
        groups[group.unit].append(group)
    yield from schedule.begin_pass([group.members for group in schedule.trained])
    for unit, begins in reversed(list(_in_order(units))):
        if not begins:
            # One of each group first: all are open before one is complete, and reduced.
            for group in sorted(groups[unit], key=lambda group: group.members == 1):  # which are complete at once
                yield from schedule.arrive(group.number, group.members - 1)
        else:
            for group in groups[unit]:
                for place in reversed(range(group.members - 1)):
                    yield from schedule.arrive(group.number, place)
    yield from schedule.end_pass()
