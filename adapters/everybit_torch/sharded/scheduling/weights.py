"""When each unit's weights are gathered and freed, where parameters are sharded too.

Units are gathered in the layout's order, forwards, and backwards in the reverse: one ahead of the one that computes. They are freed as soon
as they have computed: after the forward pass, and in the backward pass when it has left them for good. The order is that of the layout on
every rank, also on one that leaves out units, runs them in another order, or has no pass at all: it takes part in gathering what comes
before. So what one rank holds longer than another depends on its own way through the units (see :mod:`.ways`), and what is sent does not.

Two things all ranks have to do alike: run as many forward passes between two backward passes, and use a unit equally often in each,
because it is gathered again for every further use. That is compared before it is done, and refused by name.

The model itself, the first unit, keeps what is in no other unit from its forward pass to the end of the backward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everybit_torch.sharded.scheduling.events import Event, PassFlags
from everybit_torch.sharded.scheduling.ways import Nesting, UseKey, Ways


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How far ahead weights are gathered. The order is the layout's, whatever it says, so that ranks need not agree on it.

    Attributes:
        forward: For a unit, the last one whose weights are asked for as its forward pass begins; not given: the one after it.
        backward: For a unit, the lowest one whose weights are asked for as the backward pass comes to it; not given: the one before it.
    """

    forward: Mapping[int, int] = field(default_factory=dict)
    backward: Mapping[int, int] = field(default_factory=dict)

    def before(self, number: int, units: Sequence[int]) -> Prefetch:
        """Return this with another list for a unit's forward pass."""
        return replace(self, forward={**self.forward, number: max(units, default=number)})

    def before_backward(self, number: int, units: Sequence[int]) -> Prefetch:
        """Return this with another list for a unit's backward pass."""
        return replace(self, backward={**self.backward, number: min(units, default=number)})


@dataclass(frozen=True, slots=True)
class Retained:
    """Which units' weights stay gathered when others' are freed. All ranks say the same of the same pass.

    Attributes:
        after_forward: After their forward pass, until their backward pass is over: they are not gathered for that. The model's own do so
            whatever this says.
        after_backward: After a backward pass, until the next forward pass or step: they are not gathered for that.
    """

    after_forward: frozenset[int] = frozenset()
    after_backward: frozenset[int] = frozenset()

    @classmethod
    def of(cls, units: int, *, reshard_after_forward: bool = True, reshard_after_backward: bool = True) -> Retained:
        """All of so many units, or none."""
        everything, nothing = frozenset(range(units)), frozenset[int]()
        return cls(nothing if reshard_after_forward else everything, nothing if reshard_after_backward else everything)

    def with_forward(self, units: Iterable[int], *, stay: bool) -> Retained:
        """Return this with other units that stay, or do not, after their forward pass."""
        return replace(self, after_forward=_changed(self.after_forward, units, stay=stay))

    def with_backward(self, units: Iterable[int], *, stay: bool) -> Retained:
        """Return this with other units that stay, or do not, after a backward pass."""
        return replace(self, after_backward=_changed(self.after_backward, units, stay=stay))

    @property
    def digest(self) -> int:
        """The same number, below 2**32, for the same units."""
        return zlib.crc32(repr((sorted(self.after_forward), sorted(self.after_backward))).encode())


def _changed(before: frozenset[int], units: Iterable[int], *, stay: bool) -> frozenset[int]:
    return before.union(units) if stay else before.difference(units)


class WeightSchedule:
    """The events of weights. What a method yields has to be carried out one by one: an event counts when the next one is asked for.

    Args:
        units: Names, in the layout's order, the model first.
        retained: Units that are not freed after their forward pass, or after a backward pass.
        compares_first: Whether ranks compare that they begin a microbatch, before the first gather of it.

    Attributes:
        gathered: Units that are gathered, or being gathered.
        held: Nothing is freed.
        kept: Units that are not freed, until :meth:`release`.
        keeps_for_graph: Nothing is freed, for a graph of a backward pass that another one will come to: nothing tells which weights it
            needs, and when.
        in_forward: Whether the model's forward pass is going on, or has failed.
        in_backward: Whether a backward pass is going on.
        forward_over: Whether the model's forward pass has ended in this microbatch.
        entered: Units that the backward pass has come to by their outputs, whose weights it may read.
        ran: Units that had a forward pass in this cycle.
        ways: How units were used.
        prefetch: How far ahead weights are gathered. May be set at any time.
        retained: As given. May be set before a forward pass; what it says of backward passes, before one of these.
    """

    def __init__(
        self,
        units: Sequence[str],
        *,
        retained: Retained | None = None,
        prefetch: Prefetch | None = None,
        compares_first: bool = False,
    ) -> None:
        self.prefetch, self.retained = prefetch or Prefetch(), retained or Retained()
        self._compares_first = compares_first
        self._begun = False  # gathering by hand, for the forward pass that comes next
        self._count = len(units)
        self.ways = Ways(Nesting(units))
        self.gathered = set(range(len(units)))
        self.entered: set[int] = set()
        self.ran: set[int] = set()
        self.kept: set[int] = set()
        self.held = self.keeps_for_graph = False
        self.in_forward = self.in_backward = self.forward_over = False
        # Whether the model's forward pass that is going on, or none, is for a backward pass.
        self._records = False
        self._graph_pending = self._creates_graph = False
        self._forwards = self._next_forward = 0
        self._next_backward = len(units) - 1
        self._running_again: set[int] = set()

    # -- all units ----------------------------------------------------------------------------------------------------------------

    def gather_all(self) -> Iterator[Event]:
        """Gather the weights of all units at once."""
        for number in range(self._count):
            yield from self._gather(number)
        for number in range(self._count):
            yield Event("wait", number)

    def free_all(self) -> list[Event]:
        """Free everything, and begin anew: after a step all weights are others. The events count at once."""
        return self._begin_anew(self.kept)

    def free_after_backward(self) -> list[Event]:
        """Free what does not stay for the next forward pass, and begin anew. The events count at once."""
        return self._begin_anew(self.kept | self.retained.after_backward)

    def _begin_anew(self, stay: Collection[int]) -> list[Event]:
        self._graph_pending = self.keeps_for_graph = False
        self._forwards, self._begun = 0, False
        self._begin_at_the_first()
        if self.held:
            return []
        freed = sorted(self.gathered.difference(stay))
        self.gathered.intersection_update(stay)
        return [Event("free", number) for number in freed]

    def stop_holding(self, *, held: bool) -> list[Event]:
        """Free everything after it was held, if it was not before; a graph that waits for its backward pass still does."""
        self.held = held
        if self.keeps_for_graph:
            return []
        pending, forwards = self._graph_pending, self._forwards
        events = self.free_all()
        self._graph_pending, self._forwards = pending, forwards
        return events

    def keep(self, numbers: Iterable[int]) -> Iterator[Event]:
        """Gather these units, and free none of them, whatever passes come, until they are released."""
        units = sorted(numbers)
        for number in units:
            yield from self._gather(number)
        for number in units:
            yield Event("wait", number)
        self.kept.update(units)

    def release(self, numbers: Iterable[int]) -> list[Event]:
        """Free units that were kept, and what was gathered ahead of them; not what a pass that goes on or is still to come has use for."""
        released = sorted(self.kept.intersection(numbers))
        self.kept.difference_update(released)
        if self.keeps_all or self.in_forward or self.in_backward:
            return []
        if self._graph_pending:
            freed = [number for number in released if number > 0 and self._frees_after_forward(number)]
            self.gathered.difference_update(freed)
            return [Event("free", number) for number in freed]
        forwards = self._forwards
        events = self.free_all()
        self._forwards = forwards
        return events

    def copy_out(self, numbers: Iterable[int]) -> Iterator[Event]:
        """Gather one unit after the other for a copy of it, and free each again; those that are gathered stay so."""
        for number in numbers:
            frees = number not in self.gathered
            yield from self._gather(number)
            yield Event("wait", number)
            yield Event("copy out", number)
            if frees:
                yield from self._free(number)

    def begin_cycle(self) -> None:
        """Begin a new cycle after a step, and forget the ways of the last one."""
        self.ran = set()
        self.ways.forget()

    def _begin_at_the_first(self) -> None:
        self._next_forward, self._next_backward = 0, self._count - 1

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def before_forward(self, number: int, *, recording: bool) -> Iterator[Event]:
        """A unit's forward pass begins, out of a backward pass; ``recording`` if autograd records it."""
        yield from self._begin_microbatch()
        if number == 0:
            yield from self._begin_model(recording=recording)
        elif not self.in_forward:
            self._begun = False  # a unit by itself
        if recording or self._records:
            self.ran.add(number)
        self._forwards = max(self._forwards, 1)
        yield from self._gather_up_to(self.prefetch.forward.get(number, number + 1))
        yield from self.need(number)

    def _gather_up_to(self, number: int) -> Iterator[Event]:
        while self._next_forward <= min(number, self._count - 1):
            yield from self._gather(self._next_forward)
            self._next_forward += 1

    def _begin_model(self, *, recording: bool) -> Iterator[Event]:
        """The model's own forward pass begins; if it is not the first since the last backward pass, on all ranks or on none."""
        self.in_forward, self._records = True, recording
        if not self._begun:
            yield from self._begin_forward()
        self._begun = False

    def _begin_forward(self) -> Iterator[Event]:
        if self._forwards and not self.keeps_all:
            yield from self._free_units()
            yield Event("compare forward", zlib.crc32(bytes(n in self.gathered for n in range(self._count))))
        self._forwards += 1
        self._begin_at_the_first()

    def _begin_microbatch(self) -> Iterator[Event]:
        """The first gather of a microbatch comes next. Where nothing is to be gathered, a rank may run the model by itself."""
        if self._compares_first and not (self._forwards or self.keeps_all) and len(self.gathered) < self._count:
            yield Event("compare microbatch")

    def unshard(self, number: int) -> Iterator[Event]:
        """Begin to gather by hand what the next forward pass would gather, up to a unit."""
        if self.held:
            return
        if not self._begun:
            yield from self._begin_microbatch()
            yield from self._begin_forward()
            self._begun = True
        yield from self._gather_up_to(number)

    def wait_for(self, number: int) -> Iterator[Event]:
        """Wait for the weights of a unit that were gathered by hand."""
        if number in self.gathered:
            yield Event("wait", number)

    def reshard(self, number: int) -> Iterator[Event]:
        """Free what was gathered by hand, from a unit on; all ranks do. The next forward pass gathers it again."""
        if self.keeps_all:
            return
        # Ranks that have gathered to different units would gather the rest unalike.
        yield Event(
            "compare reshard", number * self._count + min(self._next_forward, self._count - 1) if self._begun else -1
        )
        if not self._begun:
            return
        for one in range(self._next_forward - 1, number - 1, -1):
            yield from self._free(one)
        self._next_forward = min(self._next_forward, number)

    @property
    def before_a_forward(self) -> bool:
        """Whether a forward pass may begin next, and no backward pass waits for one that is over."""
        return not (self.in_forward or self.in_backward or self.forward_over)

    def after_forward(self, number: int, *, recording: bool) -> Iterator[Event]:
        """A unit's forward pass has ended, out of a backward pass."""
        if number == 0:
            yield from self._end_forward(recording=recording)
        elif self._frees_after_forward(number) or not (recording or self._records):
            yield from self._free(number)

    def _frees_after_forward(self, number: int) -> bool:
        return number not in self.retained.after_forward

    def is_used(self, number: int, *, differentiable: bool, checkpoint: int, recorded: bool = True) -> UseKey:
        """A unit's forward pass has returned something; ``differentiable`` if a backward pass may come to it. Returns the use."""
        self._graph_pending = self._graph_pending or differentiable
        return self.ways.ran(number, differentiable=differentiable, checkpoint=checkpoint, recorded=recorded)

    @property
    def records(self) -> bool:
        """Whether the forward pass that is going on is for a backward pass, whatever a part of it records."""
        return self._records

    def _end_forward(self, *, recording: bool) -> Iterator[Event]:
        """The model's forward pass is over: take part in gathering the rest, and free what is not needed until the backward pass."""
        yield from self._gather_the_rest(recording=recording)
        self.in_forward = self._records = self._begun = False
        if recording:
            self.forward_over = True
        yield from self._free_units() if not recording else self._free_for_backward()
        if not recording and not self._graph_pending:
            yield from self._free(0)

    def _gather_the_rest(self, *, recording: bool) -> Iterator[Event]:
        while self._next_forward < self._count:
            number = self._next_forward
            yield from self._gather(number)
            self._next_forward += 1
            if number > 1 and (self._frees_after_forward(number - 1) or not recording):
                yield from self._free(number - 1)

    def skip_forward(self) -> Iterator[Event]:
        """Take part in the forward pass of ranks that have one, where this one has not, or has not finished it."""
        yield from self._begin_microbatch()
        self._forwards = max(self._forwards, 1)
        yield from self._end_forward(recording=True)

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def begin_backward(self, flags: PassFlags) -> Iterator[Event]:
        """A backward pass begins: compare its flags, and the way that this rank took, with the other ranks'."""
        if not self.forward_over:
            yield from self._gather_the_rest(recording=True)
        yield from self._free_for_backward()
        self.ways.begin_backward()
        yield Event("compare backward", self.ways.digest, flags)
        self._creates_graph = PassFlags.CREATES_GRAPH in flags
        self.keeps_for_graph = self.keeps_for_graph or self._creates_graph

    def _free_for_backward(self) -> Iterator[Event]:
        """All ranks gather every unit in the backward pass but those that stay on all of them, so none keeps another from before."""
        for number in sorted(self.gathered - {0}):
            if self._frees_after_forward(number):
                yield from self._free(number)

    def enter(self, number: int, use: UseKey) -> None:
        """The backward pass has come to what a use of a unit returned."""
        self.in_backward = True
        self.entered.add(number)
        self.ways.came_to(number, use)

    def run_again(self, number: int, *, recording: bool) -> bool:
        """A checkpoint runs a unit again inside the backward pass; return whether the pass has come to a use of it by that."""
        comes = recording and self.ways.may_run_again(number)
        if comes:
            self._running_again.add(number)
            self.ways.runs_again(number)
        return comes and number > 0

    def has_run_again(self, number: int, *, recording: bool) -> bool:
        """That forward pass has ended; return whether the unit is to be followed to its backward pass."""
        if not (recording and number in self._running_again):
            return False
        self._running_again.discard(number)
        return True

    def free_what_is_over(self) -> Iterator[Event]:
        """Free what the backward pass has left, or will never come to."""
        for number in sorted(self.gathered - {0}, reverse=True):
            if self.ways.is_over(number) and number not in self.retained.after_backward:
                yield from self._free(number)

    def ahead_of(self, number: int) -> Iterator[Event]:
        """Gather what is to be gathered as the backward pass comes to a unit."""
        yield from self.take_part(self.prefetch.backward.get(number, number - 1) + 1)

    def take_part(self, number: int) -> Iterator[Event]:
        """Gather all units down to the one before ``number``: what a rank does as its backward pass comes to that unit."""
        while self._next_backward >= max(number - 1, 1):
            if not self._frees_after_forward(self._next_backward):
                self._next_backward -= 1
                continue
            yield from self._gather(self._next_backward)
            self._next_backward -= 1
            if self._next_backward >= max(number - 1, 1):
                yield from self.free_what_is_over()

    def before_reduction(self, number: int) -> Iterator[Event]:
        """Join the gathers up to this unit before its gradients are sent, so that no other rank waits for this one."""
        yield from self.take_part(self.ways.lowest_beside(number))

    def end_backward(self) -> Iterator[Event]:
        """Take part in gathering what other ranks may have needed. Everything is to be freed then, by :meth:`free_all`."""
        yield from self.take_part(1)
        yield Event("require compared")
        self.end_pass()
        self.forward_over = False
        self.keeps_for_graph = self._creates_graph
        self.ways.end_backward()

    def cancel_backward(self) -> Iterator[Event]:
        """The pass computed gradients that no parameter receives (``torch.autograd.grad``): there is still one to come."""
        yield from self.take_part(1)
        yield Event("require compared")
        self.end_pass()
        yield from self._free_for_backward()
        self._next_backward = self._count - 1

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is freed."""
        return self.held or self.keeps_for_graph

    def end_pass(self) -> None:
        """The backward pass is over, or was given up."""
        self.in_backward = False
        self.entered, self._running_again = set(), set()

    # -- after an error -------------------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether a pass of the model began and did not end."""
        return self.in_forward or self.in_backward

    @property
    def evaluating(self) -> bool:
        """Whether a forward pass that no backward pass follows began and did not end."""
        return self.in_forward and not self._records

    def rejoin(self) -> Iterator[Event]:
        """Continue this rank's gathers after an error, without computing, up to where a backward pass is compared."""
        evaluating = self.evaluating
        yield from self._begin_microbatch()
        if not self.forward_over:
            yield from self._gather_the_rest(recording=not evaluating)
        if evaluating and not self.in_backward:
            return
        if not self.in_backward:
            yield from self._free_for_backward()
        self.ways.forget()
        self.ways.begin_backward()

    def recover(self) -> None:
        """The pass was given up, and all gathers are over; unless units are held, nothing is gathered."""
        self.end_pass()
        self.in_forward = self.forward_over = self._records = self.keeps_for_graph = self._begun = False
        self.ways.forget()
        if not self.held:
            self.gathered = set(self.kept)

    # -- one unit -------------------------------------------------------------------------------------------------------------------

    def need(self, number: int) -> Iterator[Event]:
        """A unit is about to compute.

        Where its turn is over, and it was freed, it is gathered once more if all ranks do so.
        """
        if number > 0 and number not in self.gathered:
            yield Event("require alike" if self.in_backward else "compare again", number)
        yield from self._gather(number)
        yield Event("wait", number)

    def _gather(self, number: int) -> Iterator[Event]:
        if number not in self.gathered:
            yield Event("gather", number)
            self.gathered.add(number)

    def _free(self, number: int) -> Iterator[Event]:
        if number in self.gathered and not self.keeps_all and number not in self.kept:
            yield Event("free", number)
            self.gathered.discard(number)

    def _free_units(self) -> Iterator[Event]:
        for number in sorted(self.gathered - {0}):
            yield from self._free(number)
