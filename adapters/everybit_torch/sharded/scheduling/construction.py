"""The events by which a model is given to a stepper: its memory, and if it has none yet, its values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.strategies import Sharding

ConstructionKind = Literal[
    # Allocate what is kept of a group's weights.
    "lay out",
    # A tensor gets memory of its own; or its place in its group's buffer, which allocates nothing.
    "materialize",
    "place",
    # A plain tensor of the whole's shape stands for one of which tensor parallelism gives this rank a part.
    "stand in",
    # Call a module's initializer.
    "initialize",
    # A tensor has its values: keep what is to be kept, and give its own memory up; or look at the values where they stay.
    "take",
    "settle",
    # The same of what stands for another: keep this rank's part of it, and give the whole up.
    "cut",
    # Read what this rank keeps of a group, in the dtype of its weights; or of the tensors that are in no buffer.
    "read",
    "read others",
]


class ConstructionEvent(NamedTuple):
    """One thing that happens while a model is given to a stepper.

    Attributes:
        kind: What happens.
        number: Of the layout's group, the initializer's call or the model's tensor that it happens to.
    """

    kind: ConstructionKind
    number: int = 0


class Call(NamedTuple):
    """An initializer's call.

    Attributes:
        begins: The numbers of the tensors that have to have memory from this call on.
        ends: Of those that no later call uses.
    """

    begins: Sequence[int]
    ends: Sequence[int]


class Tensors:
    """Which tensors are whose: parameters in the order of the model, and after them buffers.

    Args:
        layout: Of the model.
        sharding: What is sharded.
        names: Of the parameters, in the order of the model.
        buffers: How many buffers there are.
        in_parts: The names of those of which tensor parallelism gives each rank a part, or a copy.
    """

    def __init__(
        self,
        layout: Layout,
        sharding: Sharding,
        names: Sequence[str],
        buffers: int,
        in_parts: Collection[str] = (),
    ) -> None:
        numbers = {name: number for number, name in enumerate(names)}
        self.members = [[numbers[place.spec.name] for place in group.placements] for group in layout.groups]
        self.group_of = {member: number for number, members in enumerate(self.members) for member in members}
        self.in_buffers = [group.requires_grad or sharding.params for group in layout.groups]
        self.sharded = sharding.params
        self.count = len(names) + buffers
        self.in_parts = {numbers[name] for name in in_parts}

    def is_in_buffer(self, number: int) -> bool:
        """Whether a tensor is a parameter that lies in a group's buffer."""
        return number in self.group_of and self.in_buffers[self.group_of[number]]

    @property
    def laid_out(self) -> list[int]:
        """The groups that have buffers."""
        return [number for number, has in enumerate(self.in_buffers) if has]


def of_values(tensors: Tensors) -> Iterator[ConstructionEvent]:
    """A model that has its values: each tensor's memory is given up as soon as its values are where they are kept."""
    for group in tensors.laid_out:
        yield ConstructionEvent("lay out", group)
        for number in tensors.members[group]:
            yield ConstructionEvent("take", number)


def of_calls(tensors: Tensors, calls: Sequence[Call]) -> Iterator[ConstructionEvent]:
    """A model without values, whose initializers are called one after the other."""
    for group in tensors.laid_out:
        yield ConstructionEvent("lay out", group)
    for call, (begins, ends) in enumerate(calls):
        for number in begins:
            has_place = tensors.is_in_buffer(number) and not tensors.sharded
            plain: ConstructionKind = "place" if has_place else "materialize"
            yield ConstructionEvent("stand in" if number in tensors.in_parts else plain, number)
        yield ConstructionEvent("initialize", call)
        for number in ends:
            moves = tensors.is_in_buffer(number) and tensors.sharded
            plain = "take" if moves else "settle"
            yield ConstructionEvent("cut" if number in tensors.in_parts else plain, number)


def of_reading(tensors: Tensors, later: Sequence[int], calls: Sequence[Call]) -> Iterator[ConstructionEvent]:
    """A model without values, which are read: each rank's own, group after group.

    Args:
        tensors: Of the model.
        later: Groups that are read when the optimizer has its state, with more bits than their weights have.
        calls: Of initializers of buffers that are not read.
    """
    for group in tensors.laid_out:
        yield ConstructionEvent("lay out", group)
        for number in tensors.members[group]:
            yield ConstructionEvent("place", number)
        if group not in later:
            yield ConstructionEvent("read", group)
    called = {number for begins, _ in calls for number in begins}
    for number in range(tensors.count):
        if not tensors.is_in_buffer(number) and number not in called:
            yield ConstructionEvent("materialize", number)
    yield ConstructionEvent("read others")
    for call, (begins, ends) in enumerate(calls):
        for number in begins:
            yield ConstructionEvent("materialize", number)
        yield ConstructionEvent("initialize", call)
        for number in ends:
            yield ConstructionEvent("settle", number)
