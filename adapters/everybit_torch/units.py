"""What an optimizer steps at once, and where it lies in memory.

A *unit* is a list of tensors with one state and one count of steps. Under the flat layout the parameters of a group with one dtype and
device become views of one buffer, and a unit is a run of it: at first the whole. A parameter without a gradient is skipped, as torch
does, so its count falls behind; the run is then cut, for good, and what was one unit is two. Under the tree layout every parameter is
a unit, except for optimizers that must see the whole tree, where a group is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.optimizer import OptimizerState
from everybit_torch.choosing import Decision
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.gradients import UnitGradients, piece
from everybit_torch.transform_parts import needs_whole_tensors

# Elements whose state is initialised at a time, so that a first step needs no float32 copy of everything.
CHUNK = 1 << 22

STEP, WEIGHTS, INNER = "step", "param", "inner"
"""Names of entries that are no slots: the optimizer's count, what the model does not hold of the weights, a transform's counts."""

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
    """

    group: int
    tensors: list[Tensor]
    members: list[Member]
    state: OptimizerState[Any]
    first: int
    flat: bool
    gradients: UnitGradients | None = None
    decision: Decision | None = None
    parameters: list[Tensor] = field(init=False)
    first_tensor: Tensor = field(init=False)
    _places: Places = field(init=False)
    _shapes: list[torch.Size] = field(init=False)
    _sharded: bool = field(init=False)

    def __post_init__(self) -> None:
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
                map_state(self.state, lambda x, a=start, b=stop: x[a:b], torch.clone),  # type: ignore[misc]
                self.first + start,
                flat=True,
                gradients=None if self.gradients is None else self.gradients.part(low, high, start, stop),
                decision=self.decision,
            )

    def named_state(self, member: Member) -> dict[str, Tensor]:
        """Views of one parameter's state, in its shape, by name; counters are shared by the unit's members."""
        named: dict[str, Tensor] = {}

        def shaped(x: Tensor) -> Tensor:
            flat_views = x.ndim == 1 and self.tensors[member.position].ndim == 1
            return piece(x, member.start, member.stop, local(member.parameter).shape) if flat_views else x

        for name, value, is_slot in named_fields(self.state):
            if is_slot:
                stored = value[member.position]
                parts = stored if isinstance(stored, tuple) else (stored,)
                for number, part in enumerate(part for part in parts if part is not None):
                    named[name if number == 0 else f"{name}.{number}"] = shaped(part)
            else:
                named[name] = value
        return named


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


def named_fields(state: OptimizerState[Any]) -> list[tuple[str, Any, bool]]:
    """(name, value, whether it holds one tensor per parameter) for everything in a state, names unique.

    Slots go by their own names, ``param`` by that of the parts of parameters that the model does not hold; counters by their path. A slot
    whose name is taken, by a slot before it or by what is no slot, is numbered: ``momentum#2``, ``param#2``. Whether ``param`` is taken
    does not depend on whether this policy has such parts, so that a slot's name is the same under every policy.
    """
    fields: list[tuple[str, Any, bool]] = [(STEP, state.step, False)]
    if eb.tree.leaves(state.extra):
        fields.append((WEIGHTS, state.extra, True))
    seen: dict[str, int] = dict.fromkeys((STEP, WEIGHTS, INNER), 1)

    def slot(name: str, subtree: Any) -> Any:
        count = seen[name] = seen.get(name, 0) + 1
        if eb.tree.leaves(subtree):
            fields.append((name if count == 1 else f"{name}#{count}", subtree, True))
        return None

    counters = eb.tree.map_slots(slot, state.inner)
    fields += [
        (f"{INNER}{path}", leaf, False)
        for path, leaf in zip(eb.tree.paths(counters), eb.tree.leaves(counters), strict=True)
    ]
    return fields


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
    make = allocate or (lambda x, numel: x.new_empty(numel))
    whole: OptimizerState[Any] | None = None
    for start in range(0, max(buffer.numel(), 1), CHUNK):
        piece = optimizer.init([buffer[start : start + CHUNK]], eb.Context(first_element=first + start))
        if whole is None:
            whole = map_state(piece, lambda x: make(x, buffer.numel()), torch.clone)
        part = map_state(whole, lambda x, a=start: x[a : a + CHUNK], lambda x: x)  # type: ignore[misc]
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
    """Whether other processes see a parameter's memory; torch says so of every tensor on an accelerator."""
    return parameter.device.type == "cpu" and bool(parameter.is_shared())  # type: ignore[no-untyped-call]
