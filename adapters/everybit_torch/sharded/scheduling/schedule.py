"""The schedule of a stepper: the events that follow each signal; and the cycle of a model whose units run once each, in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.scheduling.events import Event, PassFlags
from everybit_torch.sharded.scheduling.gradients import GradientSchedule, Phase, TrainedGroup
from everybit_torch.sharded.scheduling.ways import Nesting, UseKey
from everybit_torch.sharded.scheduling.weights import Prefetch, Retained, WeightSchedule
from everybit_torch.sharded.strategies import Sharding


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, besides the layout, that determine a schedule.

    Attributes:
        sharding: What is sharded.
        reshard_after_forward: Whether a unit's weights are freed after its forward pass, where they are sharded.
        keep_gradients: Whether main gradients are kept from one step to the next.
        defer_reduction: Whether sharded gradients are summed over the ranks in the last backward pass of a cycle only.
        prefetch: How far ahead weights are gathered, where they are sharded.
        retained: Which units' weights stay gathered, where they are sharded; None: as ``reshard_after_forward`` says.
        overlap_param_gather: Whether a step's weights are waited for when the next forward pass comes to them, where every rank keeps all
            weights and a part of the state.
        overlap_reductions: Whether the reduction of a unit's gradients goes on while those of the next arrive, where they are sharded.
    """

    sharding: Sharding
    reshard_after_forward: bool = True
    keep_gradients: bool = True
    defer_reduction: bool = False
    prefetch: Prefetch = field(default_factory=Prefetch)
    retained: Retained | None = None
    overlap_param_gather: bool = False
    overlap_reductions: bool = True

    @property
    def overlaps(self) -> bool:
        """Whether weights of a step are still under way when it returns."""
        return self.overlap_param_gather and self.sharding.state and not self.sharding.params

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
        bounded: Tells whether a rank may wait for a reduction inside a backward pass, which depends on the ways of all ranks (see
            :mod:`.ways`). Asked where parameters are sharded.
        weights: Of units; None where parameters are not sharded.
        gradients: Of groups.
        last: Whether the backward pass that goes on, or comes next, is the last of its cycle; None if nobody has said.
        defers: Whether a backward pass that is not known to be the last is not reduced, where gradients are sharded. Set between passes.
        accumulates: Whether the pass that goes on accumulates a parameter's gradient, as far as its graph tells.
        arrived: Whether one has arrived.
        late: Groups whose weights of the last step may still be under way.
    """

    def __init__(self, layout: Layout, settings: Settings) -> None:
        self._settings = settings
        self.bounded: Callable[[], bool] = lambda: True
        self.trained = [
            TrainedGroup(number, group.unit, len(group.placements))
            for number, group in enumerate(layout.groups)
            if group.requires_grad
        ]
        self._unit_of = [group.unit for group in layout.groups]
        sharding = settings.sharding
        self.gradients = GradientSchedule(
            self.trained, sharded=sharding.grads, kept=settings.keep_gradients, overlaps=settings.overlap_reductions
        )
        retained = settings.retained or Retained.of(
            len(layout.units), reshard_after_forward=settings.reshard_after_forward
        )
        self.weights = (
            WeightSchedule(
                layout.units, retained=retained, prefetch=settings.prefetch, compares_first=settings.compares_phases
            )
            if sharding.params
            else None
        )
        self.last: bool | None = None
        self.defers = settings.defer_reduction
        self.accumulates = self.arrived = self._sends = False
        self.late: set[int] = set()

    # -- phases that all ranks begin together -----------------------------------------------------------------------------------------

    def begin_reductions(self) -> None:
        """The next backward pass has not sent anything."""
        self._sends = False
        self.gradients.begin_reductions()

    def _begin_to_send(self) -> Iterator[Event]:
        """The first sum of a backward pass is about to be sent; not earlier, since a pass may turn out to have none."""
        if self.weights is None and self._settings.compares_phases and not self._sends:
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
        return self.last is True or (self._settings.sharding.grads and not self.defers)

    def flags(self, *, creates_graph: bool = False) -> PassFlags:
        """Return the flags of a backward pass that begins now."""
        return PassFlags(PassFlags.REDUCES * self.reduces | PassFlags.CREATES_GRAPH * creates_graph)

    def begin_pass(
        self, expected: Sequence[int], *, accumulates: bool = True, creates_graph: bool = False
    ) -> Iterator[Event]:
        """A backward pass begins; see :meth:`.gradients.GradientSchedule.begin_pass`. ``creates_graph`` if autograd records it."""
        # Torch refuses torch.autograd.grad through a reentrant checkpoint. A rank all of whose gradients come from inside of one would
        # otherwise send none of them in time, and the others wait for it.
        reentrant = self.weights is not None and self.weights.ways.have_reentrant_checkpoint
        self.accumulates, self.arrived = accumulates or reentrant, False
        yield from self.gradients.begin_pass(expected, defers=not self.reduces)
        if self.weights is not None:
            yield from self.weights.begin_backward(self.flags(creates_graph=creates_graph))

    def come_to(self, number: int, use: UseKey) -> Iterator[Event]:
        """The backward pass comes to what a use of a unit returned; parameters are sharded."""
        assert self.weights is not None
        self.weights.enter(number, use)
        if number > 0:
            yield from self.advance()
            yield from self.weights.free_what_is_over()
            yield from self.weights.ahead_of(number)
        yield from self.weights.need(number)

    def run_again(self, number: int, *, recording: bool) -> Iterator[Event]:
        """A checkpoint runs a unit again inside the backward pass; parameters are sharded."""
        assert self.weights is not None
        if self.weights.run_again(number, recording=recording):
            yield from self.advance()
            yield from self.weights.free_what_is_over()
        yield from self.weights.take_part(number + 1)
        yield from self.weights.need(number)

    def arrive(self, number: int, place: int) -> Iterator[Event]:
        """The gradient of a parameter arrives: the one at a place of a group."""
        yield from self.gradients.arrive(number, place)
        self.arrived = True
        if self.gradients.is_complete(number):
            yield from self.advance()

    def advance(self) -> Iterator[Event]:
        """Reduce what is complete, and what will not be, from the layout's last group on: in this order, whatever comes first."""
        if not (self.accumulates or self.arrived):
            return  # torch.autograd.grad, after which there is still a backward pass to come
        while self.reduces and (group := self.gradients.next) is not None:
            over = self.weights is not None and self.weights.ways.is_over(group.unit)
            if not (over or self.gradients.is_complete(group.number)):
                break
            yield from self._reduce_next(group.unit)

    def _reduce_next(self, unit: int) -> Iterator[Event]:
        yield from self._begin_to_send()
        closes_unit, bounded = self.gradients.closes_unit, True
        if self.weights is not None:
            yield from self.weights.before_reduction(unit)
            bounded = self.bounded()
        yield from self.gradients.reduce_next(last=self.last is True, bounded=bounded)
        if self.weights is not None and closes_unit:
            yield from self.weights.free_what_is_over()

    def end_pass(self) -> Iterator[Event]:
        """Autograd is done: reduce the rest."""
        while self.reduces and (group := self.gradients.next) is not None:
            yield from self._reduce_next(group.unit)
        yield from self.gradients.finish()
        self.gradients.end_pass()
        self._sends = False
        if self.weights is not None:
            yield from self.weights.end_backward()

    def cancel_pass(self) -> Iterator[Event]:
        """The pass was that of ``torch.autograd.grad``: no parameter has a gradient of it."""
        yield from self.gradients.cancel_pass()
        if self.weights is not None:
            yield from self.weights.cancel_backward()

    def empty_pass(self) -> Iterator[Event]:
        """Take part in what other ranks' passes do, up to their end, where a loss reached no parameter."""
        if self.weights is not None:
            if not self.weights.forward_over:
                yield from self.weights.skip_forward()
            yield from self.weights.begin_backward(self.flags())
        yield from self.gradients.begin_pass(defers=not self.reduces)

    def take_part(self, *, reduces: bool) -> Iterator[Event]:
        """Reduce what is left of a pass that an error ended, whatever it holds: it is forgotten here, and nobody waits for it elsewhere.

        Args:
            reduces: Whether the other ranks reduce it.
        """
        while reduces and (group := self.gradients.next) is not None:
            if self.weights is not None:
                yield from self.weights.before_reduction(group.unit)
            yield from self._begin_to_send()
            yield Event("drain")
            yield from self.gradients.reduce_next(last=self.last is True, bounded=True)
            if self.weights is not None:
                yield from self.weights.free_what_is_over()
        yield from self.gradients.finish()
        if self.weights is not None:
            yield from self.weights.take_part(1)

    # -- a step -----------------------------------------------------------------------------------------------------------------------

    def finish_gradients(self, phases: Sequence[Phase]) -> Iterator[Event]:
        """The cycle's gradients are to be final; see :meth:`.gradients.GradientSchedule.finish_cycle`."""
        yield from self.gradients.finish_cycle(phases)

    def agree(self) -> Iterator[Event]:
        """Ranks agree on a step, with final gradients."""
        yield Event("agree")

    def update(self) -> Iterator[Event]:
        """Step, and hand out the weights."""
        yield from self.settle()  # no forward pass came to them
        yield Event("step")
        yield from self.hand_out([group.number for group in self.trained], waits=not self._settings.overlaps)

    def hand_out(self, groups: Sequence[int], *, waits: bool = True) -> Iterator[Event]:
        """Hand out weights of these groups, which have changed, to the ranks that keep copies.

        Args:
            groups: Of the layout.
            waits: Until they are there. False: :meth:`settle` does.
        """
        sharding = self._settings.sharding
        spreads = sharding.outer == "optim" or (sharding.state and not sharding.params)
        for number in groups if spreads else ():
            yield Event("spread", number)
            self.late.add(number)
        if waits:
            yield from self.settle()
        for number in groups:
            yield Event("stepped", number)

    def settle(self, units: Collection[int] | None = None) -> Iterator[Event]:
        """Wait for weights of these units that are under way; None: of all units."""
        for number in sorted(self.late):
            if units is None or self._unit_of[number] in units:
                yield Event("settle", number)
                self.late.discard(number)


# -- the cycle that is planned --------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A part of a cycle, with the events in it.

    Attributes:
        name: ``"forward"``, ``"backward"`` or ``"step"``.
        microbatch: The number of the microbatch; of a step, of the last one.
        events: In order.
    """

    name: Literal["forward", "backward", "step"]
    microbatch: int
    events: list[Event]


def cycle(layout: Layout, settings: Settings, microbatches: int = 1, *, second_order: bool = False) -> list[Stage]:
    """The events of a cycle in which every unit runs once in each microbatch, in the layout's order, and every gradient arrives.

    Of each of a unit's groups one gradient arrives when the backward pass comes to what the unit returned, and the others when it has left
    the units that lie in it.

    Args:
        layout: Of the model.
        settings: See there.
        microbatches: Backward passes in the cycle, each inside ``microbatch()``.
        second_order: In each of them ``torch.autograd.grad(create_graph=True)`` of the input comes before the backward pass.
    """
    schedule = Schedule(layout, settings)
    if schedule.weights is not None:
        schedule.weights.free_all()
    if settings.overlaps:  # as the cycle before has left them
        schedule.late = {group.number for group in schedule.trained}
    stages: list[Stage] = []
    for number in range(microbatches):
        schedule.last = number == microbatches - 1
        uses: dict[int, UseKey] = {}
        stages.append(Stage("forward", number, list(_forward(schedule, layout.units, uses))))
        if second_order:
            stages.append(Stage("backward", number, list(_slope(schedule, layout.units, uses))))
        stages.append(Stage("backward", number, list(_backward(schedule, layout.units, uses))))
    phases: list[Phase] = ["final" for _ in schedule.trained]
    step = [*schedule.begin_step(), *schedule.finish_gradients(phases), *schedule.agree(), *schedule.update()]
    step += [] if schedule.weights is None else schedule.weights.free_all()
    step += schedule.gradients.clear()
    stages.append(Stage("step", microbatches - 1, step))
    return stages


def _in_order(units: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """The units, as their forward passes begin (True) and end (False)."""
    nesting = Nesting(units)
    running: list[int] = []
    for unit in range(len(units)):
        while len(running) > 1 and not nesting.is_inside(unit, running[-1]):
            yield running.pop(), False
        yield unit, True
        running.append(unit)
    while running:
        yield running.pop(), False


def _forward(schedule: Schedule, units: Sequence[str], uses: dict[int, UseKey]) -> Iterator[Event]:
    for unit, begins in _in_order(units):
        if begins:
            yield from schedule.settle([unit])
        if schedule.weights is None:
            continue
        if begins:
            yield from schedule.weights.before_forward(unit, recording=True)
        else:
            yield from schedule.weights.after_forward(unit, recording=True)
            uses[unit] = schedule.weights.is_used(unit, differentiable=True, checkpoint=0)


def _slope(schedule: Schedule, units: Sequence[str], uses: Mapping[int, UseKey]) -> Iterator[Event]:
    yield from schedule.begin_pass([group.members for group in schedule.trained], accumulates=False, creates_graph=True)
    for unit, begins in reversed(list(_in_order(units))):
        if not begins and schedule.weights is not None:
            yield from schedule.come_to(unit, uses[unit])
    yield from schedule.cancel_pass()


def _backward(schedule: Schedule, units: Sequence[str], uses: Mapping[int, UseKey]) -> Iterator[Event]:
    groups: list[list[TrainedGroup]] = [[] for _ in units]
    for group in reversed(schedule.trained):
        groups[group.unit].append(group)
    yield from schedule.begin_pass([group.members for group in schedule.trained])
    for unit, begins in reversed(list(_in_order(units))):
        if not begins:
            # One of each group first: all are open before one is complete, and reduced.
            if schedule.weights is not None:
                yield from schedule.come_to(unit, uses[unit])
            for group in sorted(groups[unit], key=lambda group: group.members == 1):  # which are complete at once
                yield from schedule.arrive(group.number, group.members - 1)
        else:
            for group in groups[unit]:
                for place in reversed(range(group.members - 1)):
                    yield from schedule.arrive(group.number, place)
    yield from schedule.end_pass()
    if schedule.weights is not None:
        yield from schedule.weights.free_after_backward()
