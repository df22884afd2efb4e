"""Units: the tensors that an optimizer steps at once, and their place in memory.

A *unit* is a list of tensors with one state and one count of steps. Under the flat layout the parameters of a group with one dtype and
device become views of one buffer, and a unit is a run of it: at first the whole. A parameter without a gradient is skipped, as torch
does, so its count falls behind; the run is then cut, for good, and what was one unit is two. Under the tree layout every parameter is
a unit, except for optimizers that must see the whole tree, where a group is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.entries import Entry, cut, entries, map_parts
from everybit.formats import PartSpec
from everybit.optimizer import OptimizerState
from everybit.parts import needs_whole_tensors
from everybit.policy import Resolved
from everybit_torch.choosing import Decision
from everybit_torch.dtensors import is_dtensor, like, local
from everybit_torch.gradients import UnitGradients, piece

# Elements whose state is initialised at a time, so that a first step needs no float32 copy of everything.
CHUNK = 1 << 22

_shape = attrgetter("shape")


Places = tuple[list[int], list[tuple[int, ...]], list[int] | list[torch.Size]]
"""Addresses and strides of a unit's parameters; and their shapes, or where those follow from the strides, numbers of elements."""


@dataclass(slots=True)
class Member:
    """A parameter's place in a unit: elements ``start`` to ``stop`` of the unit's tensor number ``position``."""

    parameter: Tensor
    position: int
    start: int
    stop: int


@dataclass(slots=True)
class Unit:
    """Tensors that are stepped together.

    Attributes:
        group: Number of the param group.
        tensors: What the optimizer sees; changed in place.
        members: The parameters in them, in order.
        state: The optimizer's state for ``tensors``, changed in place.
        first: Global index of the first element, counted over all parameters of one dtype.
        flat: Whether the parameters are views of ``tensors[0]``.
        gradients: Where autograd accumulates their gradients; None if it does as it likes.
        decision: What the optimizer's masks and labels said of the parameters; None if it has none.
        stored: How each of the tensors and its state are stored; None: in the compute dtype.
        whole: The parameters that its elements belong to, where it takes part in reductions.
        table: The table by which they are numbered.
        block: The least number of elements at whose multiples a flat unit may be cut.
    """

    group: int
    tensors: list[Tensor]
    members: list[Member]
    state: OptimizerState[Any]
    first: int
    flat: bool
    gradients: UnitGradients | None = None
    decision: Decision | None = None
    stored: list[Resolved] | None = None
    whole: eb.Members | None = None
    table: object = None
    block: int = field(init=False)
    parameters: list[Tensor] = field(init=False)
    first_tensor: Tensor = field(init=False)
    _places: Places = field(init=False)
    _shapes: list[torch.Size] = field(init=False)
    _sharded: bool = field(init=False)

    def __post_init__(self) -> None:
        self.block = math.lcm(*(one.policy.block for one in self.stored or ()))
        self.parameters = [member.parameter for member in self.members]
        self.first_tensor = torch.full((), self.first, dtype=torch.int64, device=self.tensors[0].device)
        self._sharded = any(map(is_dtensor, self.parameters))
        self.note_places()

    def note_places(self) -> None:
        """Parameters are where they belong now."""
        self._places = self._find()
        self._shapes = [local(parameter).shape for parameter in self.parameters]

    def in_place(self) -> bool:
        """Whether every parameter has the memory, shape and strides it had when it was placed. Fast: it is asked at every step."""
        return self._find() == self._places

    def moved(self) -> list[int]:
        """The numbers of the members that have not."""
        found = zip(zip(*self._find(), strict=True), zip(*self._places, strict=True), strict=True)
        return [index for index, (now, before) in enumerate(found) if now != before]

    def placed_shape(self, index: int) -> torch.Size:
        """The shape that member number ``index`` had when it was placed."""
        return self._shapes[index]

    def _find(self) -> Places:
        tensors = [local(parameter) for parameter in self.parameters] if self._sharded else self.parameters
        # Unbound methods: this is the fastest way through a list of tensors. Shapes cost twice what numbers of elements do, and the strides
        # of parameters in a buffer, which are dense, tell all sizes but the outermost.
        extents = list(map(Tensor.numel, tensors)) if self.flat else list(map(_shape, tensors))
        return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors)), extents

    def collect(self) -> list[Tensor | None]:
        """The members' gradients; None for one without."""
        if self.gradients is None:
            grads = [parameter.grad for parameter in self.parameters]
            return [None if grad is None else local(grad) for grad in grads] if self._sharded else grads
        return self.gradients.collect(self.parameters)

    def split(self, boundaries: list[int]) -> Iterator[Unit]:
        """Cut a flat unit before the members with these numbers; states become views, counts become copies."""
        assert self.flat
        edges = [0, *boundaries, len(self.members)]
        for low, high in pairwise(edges):
            members = self.members[low:high]
            start, stop = members[0].start, members[-1].stop
            yield Unit(
                self.group,
                [self.tensors[0][start:stop]],
                [Member(m.parameter, 0, m.start - start, m.stop - start) for m in members],
                self.cut_state(start, stop, torch.clone),
                self.first + start,
                flat=True,
                gradients=None if self.gradients is None else self.gradients.part(low, high, start, stop),
                decision=self.decision,
                stored=self.stored,
            )

    def cut_state(self, start: int, stop: int, on_shared: Callable[[Tensor], Tensor]) -> OptimizerState[Any]:
        """The state of a flat unit's elements ``start`` to ``stop``, as views; ``on_shared`` makes what is not cut."""
        return cut(self.state, self.tensors, self.stored, start, stop, on_shared)

    def piece_size(self, elements: int) -> int:
        """The most elements, of so many at a time, at whose multiples a flat unit may be cut."""
        return max(elements // self.block, 1) * self.block

    def entries(self, member: Member) -> list[tuple[Entry, Tensor]]:
        """List the entries of one parameter: views, in its shape where there is one number for each element; shared entries as they are."""
        found = entries(
            self.state, self.tensors, member.position, None if self.stored is None else self.stored[member.position]
        )
        flat = self.tensors[member.position].ndim == 1
        return [(entry, self._shaped(entry, x, member) if flat else x) for entry, x in found]

    def named_state(self, member: Member) -> dict[str, Tensor]:
        """Return the tensors of :meth:`entries` by name."""
        return {entry.name: value for entry, value in self.entries(member)}

    def published(self, member: Member) -> dict[str, Tensor]:
        """Return the tensors of :meth:`entries` by name; of a sharded parameter those that are cut as it is are sharded as it is.

        Raises:
            ValueError: An entry of a sharded parameter that is neither cut as it is nor the same on all ranks; the message names it.
        """
        found: dict[str, Tensor] = {}
        for entry, value in self.entries(member):
            if is_dtensor(member.parameter) and entry.cut not in ("element", "copy"):
                raise ValueError(
                    f"{entry.name}: is cut by the rule {entry.cut!r}, and its parameter is sharded along its elements; accepted for sharded"
                    " parameters is state with a number for each element."
                )
            found[entry.name] = like(member.parameter, value) if entry.cut == "element" else value
        return found

    @staticmethod
    def _shaped(entry: Entry, x: Tensor, member: Member) -> Tensor:
        if entry.cut in ("copy", "tensor") or x.ndim != 1:
            return x
        low, high = entry.range(member.start, member.stop)
        shape = local(member.parameter).shape
        return piece(x, low, high, shape if entry.cut == "element" else torch.Size([high - low]))


def map_state(
    state: OptimizerState[Any], on_slot: Callable[[Tensor], Tensor], on_counter: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """A state with every per-element tensor and every counter replaced."""
    held: list[Any] = []

    def slot(name: str, subtree: Any) -> Any:
        held.append(eb.tree.map(on_slot, subtree))
        return None

    # Slots out, counters mapped, slots back in, in the same order.
    counters = eb.tree.map(on_counter, eb.tree.map_slots(slot, state.inner))
    slots = iter(held)
    inner = eb.tree.map_slots(lambda name, _: next(slots), counters)
    return OptimizerState(on_counter(state.step), eb.tree.map(on_slot, state.extra), inner)


def init_state(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    first: int,
    *,
    allocate: Callable[[Tensor, int], Tensor] | None = None,
) -> OptimizerState[Any]:
    """The state of a unit; for one long buffer computed piece by piece into place.

    ``allocate`` makes memory for elements like those of a tensor, for the state of one buffer that is to lie elsewhere.
    """
    if allocate is None and (
        len(tensors) != 1
        or tensors[0].ndim != 1
        or tensors[0].numel() <= CHUNK
        or needs_whole_tensors(optimizer.transform)
    ):
        return optimizer.init(tensors, eb.Context(first_element=first))
    (buffer,) = tensors
    stored = optimizer.formats(tensors)
    block = stored[0].policy.block
    size = max(CHUNK // block, 1) * block
    make = allocate or (lambda x, numel: x.new_empty(numel))

    def room(x: Tensor, part: PartSpec | None) -> Tensor:
        return make(x, buffer.numel() if part is None else part.count(buffer.numel()))

    whole: OptimizerState[Any] | None = None
    for start in range(0, max(buffer.numel(), 1), size):
        here = [buffer[start : start + size]]
        piece = optimizer.init(here, eb.Context(first_element=first + start))
        if whole is None:
            whole = map_parts(piece, here, stored, room, torch.clone)
        part = cut(whole, tensors, stored, start, start + here[0].numel(), lambda x: x)
        for into, value in zip(eb.tree.leaves(part), eb.tree.leaves(piece), strict=True):
            into.copy_(value)
    assert whole is not None
    return whole


def flatten(parameters: list[Tensor]) -> Tensor:
    """One buffer with the parameters' values, of which they become pieces."""
    buffer = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.data = piece(buffer, start, stop, parameter.shape)
        start = stop
    return buffer


def can_be_flat(parameter: Tensor) -> bool:
    """Whether a parameter may become a piece of a buffer: a plain, dense tensor in the usual order, which no other process sees."""
    return (
        type(parameter.data) is Tensor
        and not is_shared(parameter)
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and parameter.device.type != "meta"
    )


def is_shared(parameter: Tensor) -> bool:
    """Whether other processes share a parameter's memory; False on accelerators, where torch answers True for every tensor."""
    return parameter.device.type == "cpu" and bool(parameter.is_shared())  # type: ignore[no-untyped-call]
