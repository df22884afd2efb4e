"""Units: the segments of memory that an optimizer steps at once.

A *unit* is a tensor with one state and one count of steps: a flat piece of a buffer with the parameters that lie in it one after the
other, or a whole tensor with the one parameter that it is. A parameter without a gradient is skipped, as torch does, so its count falls
behind; a flat unit is then cut, for good, and what was one unit is two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.combinators import needs_whole_tensors
from everybit.formats import PartSpec
from everybit.policies import Resolved
from everybit.stepping import OptimizerState, entries
from everybit.stepping.entries import Entry, cut, map_parts
from everybit_torch.choosing import Decision
from everybit_torch.dtensors import is_dtensor, like, local
from everybit_torch.gradients import (
    Gathered,
    MemberGradients,
    UnitGradients,
    gather,
    gather_with_gaps,
    gathered_at_once,
    piece,
)
from everybit_torch.host_counts import HostCount

# Elements whose state is initialised at a time, so that a first step needs no float32 copy of everything.
CHUNK = 1 << 22

_shape = attrgetter("shape")


Places = tuple[list[int], list[tuple[int, ...]], list[int] | list[torch.Size]]
"""Addresses and strides of a unit's parameters; and their shapes, or where those follow from the strides, numbers of elements."""


@dataclass(slots=True)
class Member:
    """A parameter's place in a unit.

    Attributes:
        name: What messages call it.
        parameter: The parameter.
        start: Its first element is this element of the unit's tensor.
        stop: Its last element is the one before this.
        first: Global index of its first element, counted over all parameters of one dtype.
    """

    name: str
    parameter: Tensor
    start: int
    stop: int
    first: int


def laid_out(lengths: Iterable[int], block: int) -> tuple[list[int], int]:
    """Where parameters of these lengths begin in a buffer, at multiples of a block, and its length: with gaps a multiple, too."""
    starts, stop, gaps = [], 0, False
    for length in lengths:
        start = -(-stop // block) * block
        gaps = gaps or length % block > 0
        starts.append(start)
        stop = start + length
    return starts, -(-stop // block) * block if gaps else stop


def numbered_by_block(lengths: Sequence[int], firsts: Sequence[int], numel: int, block: int) -> bool:
    """Whether each block of a buffer has an index of its own: there are gaps, or parameters that are no neighbours in the model."""
    ends = [first + length for first, length in zip(firsts, lengths, strict=True)]
    return block > 1 and (numel != sum(lengths) or list(firsts[1:]) != ends[:-1])


def numbered(
    lengths: Sequence[int], firsts: Sequence[int], starts: Sequence[int], numel: int, block: int, device: torch.device
) -> int | Blocks:
    """The global indices of the elements of a buffer.

    Args:
        lengths: Of the parameters in it.
        firsts: Global index of the first element of each.
        starts: Where they begin in it.
        numel: Its length.
        block: At whose multiples they begin.
        device: Where it lies.

    Returns:
        That of the first, which the others follow; or of each block, where there are gaps, or parameters that are no neighbours. Without
        blocks, whose bits depend on indices, parameters are neighbours.
    """
    if not numbered_by_block(lengths, firsts, numel, block):
        return firsts[0] if firsts else 0
    parts = list(zip(lengths, firsts, starts, strict=True))
    every = [torch.arange(0, length, block) for length in lengths]
    blocks = [(first + at, (length - at).clamp(max=block)) for at, (length, first, _) in zip(every, parts, strict=True)]
    first, count = (torch.cat(found) for found in zip(*blocks, strict=True))
    return Blocks(first.to(device), count.to(device, torch.int32), block)


@dataclass(slots=True)
class Unit:
    """A tensor that is stepped at once.

    Attributes:
        group: Number of the group.
        tensor: What the optimizer sees; changed in place.
        members: The parameters in it, in order.
        state: The optimizer's state for ``tensor``, changed in place.
        first: Global index of the first element, which the others follow; or those of each block.
        flat: Whether the members are pieces of ``tensor``, and it may be cut between them.
        gradients: Where autograd accumulates their gradients; None if it does as it likes.
        decision: What the optimizer's masks and labels said of the parameters; None if it has none.
        stored: How the tensor and its state are stored; None: in the compute dtype.
        whole: The parameters that its elements belong to, where its transform asks for numbers of each.
        table: The table by which they are numbered.
        block: The least number of elements at whose multiples a flat unit may be cut.
        first_tensor: ``first`` on the device: int64, 0-d; or the same blocks.
        host_count: What the host knows of ``state.step``.
    """

    group: int
    tensor: Tensor
    members: list[Member]
    state: OptimizerState[Any]
    first: int | Blocks
    flat: bool
    gradients: UnitGradients | None = None
    decision: Decision | None = None
    stored: Resolved | None = None
    whole: eb.Members | None = None
    table: object = None
    block: int = field(init=False)
    parameters: list[Tensor] = field(init=False)
    first_tensor: Tensor | Blocks = field(init=False)
    host_count: HostCount = field(init=False, default_factory=HostCount)
    _places: Places = field(init=False)
    _shapes: list[torch.Size] = field(init=False)
    _sharded: bool = field(init=False)

    @classmethod
    def of(
        cls,
        group: int,
        optimizer: eb.Optimizer[Any],
        tensor: Tensor,
        named: Sequence[tuple[str, Tensor, int]],
        state: OptimizerState[Any],
        *,
        flat: bool,
        gradients: UnitGradients | None = None,
        decision: Decision | None = None,
    ) -> Unit:
        """The unit of parameters that lie in a tensor one after the other, as an optimizer stores it.

        Args:
            group: Number of the group.
            optimizer: That steps it.
            tensor: With the parameters, as :func:`laid_out` lays them out.
            named: The parameters with their names, and the global index of the first element of each.
            state: Of the optimizer.
            flat: Whether it may be cut.
            gradients: Where gradients are accumulated.
            decision: What masks and labels said of the parameters.
        """
        (stored,) = optimizer.formats([tensor])
        lengths = [local(p).numel() for _, p, _ in named]
        starts, numel = laid_out(lengths, stored.policy.block) if flat else ([0] * len(lengths), tensor.numel())
        firsts = [first for *_, first in named]
        first = numbered(lengths, firsts, starts, numel, stored.policy.block, tensor.device)
        members = [
            Member(name, p, start, start + length, first)
            for (name, p, first), start, length in zip(named, starts, lengths, strict=True)
        ]
        return cls(group, tensor, members, state, first, flat, gradients, decision, stored)

    def __post_init__(self) -> None:
        self.block = 1 if self.stored is None else self.stored.policy.block
        self.parameters = [member.parameter for member in self.members]
        self.first_tensor = self.first_on(self.tensor.device)
        self._sharded = any(map(is_dtensor, self.parameters))
        self.note_places()

    def first_on(self, device: torch.device) -> Tensor | Blocks:
        """``first`` on a device: int64, 0-d; or the blocks."""
        if isinstance(self.first, Blocks):
            return eb.tree.map(lambda x: x.to(device), self.first)
        return torch.full((), self.first, dtype=torch.int64, device=device)

    def _first_of(self, start: int, stop: int) -> int | Blocks:
        """The global indices of the elements ``start`` to ``stop``."""
        return self.first.cut(start, stop) if isinstance(self.first, Blocks) else self.first + start

    # -- where parameters lie -------------------------------------------------------------------------------------------------

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

    # -- gradients ------------------------------------------------------------------------------------------------------------

    def collect(self) -> list[Tensor | None]:
        """The members' gradients; None for one without."""
        if self.gradients is None:
            grads = [parameter.grad for parameter in self.parameters]
            return [None if grad is None else local(grad) for grad in grads] if self._sharded else grads
        return self.gradients.collect(self.parameters)

    def gathered(self, grads: list[Tensor]) -> Gathered:
        """The gradients of all members as one tensor, of the shape of the unit's; many of them as a vector that is not copied."""
        if self.gradients is not None:
            return self.gradients.buffer
        if self.flat:
            long = len(grads) > 1 and self.block == 1 and self.tensor.numel() > gathered_at_once(self.tensor.device)
            if isinstance(self.first, Blocks):
                return gather_with_gaps(grads, [(m.start, m.stop) for m in self.members], self.tensor.numel())
            return MemberGradients(grads) if long else gather(grads)
        (grad,) = grads
        return grad if grad.shape == self.tensor.shape else grad.reshape(self.tensor.shape)

    # -- cutting --------------------------------------------------------------------------------------------------------------

    def split(self, boundaries: list[int]) -> Iterator[Unit]:
        """Cut a flat unit before the members with these numbers; states become views, counts become copies."""
        assert self.flat
        edges = [0, *boundaries, len(self.members)]
        for low, high in pairwise(edges):
            members = self.members[low:high]
            start = members[0].start
            stop = self.members[high].start if high < len(self.members) else self.tensor.numel()
            part = Unit(
                self.group,
                self.tensor[start:stop],
                [Member(m.name, m.parameter, m.start - start, m.stop - start, m.first) for m in members],
                self._cut_state(start, stop, torch.clone),
                self._first_of(start, stop),
                flat=True,
                gradients=None if self.gradients is None else self.gradients.part(low, high, start, stop),
                decision=self.decision,
                stored=self.stored,
            )
            part.host_count.note(part.state.step, self.host_count.known(self.state.step))
            yield part

    def leave_buffer(self) -> None:
        """Let a flat unit of one member be a tensor by itself, without the gap after it; its state becomes views."""
        (member,) = self.members
        self.state = self._cut_state(0, member.stop, lambda x: x)
        self.tensor, self.flat, self.gradients = self.tensor[: member.stop], False, None
        self.first = member.first
        self.first_tensor = self.first_on(self.tensor.device)

    def pieces(
        self,
        elements: int,
        on_shared: Callable[[Tensor], Tensor] = torch.clone,
        *,
        stops: Iterable[int] | None = None,
    ) -> Iterator[tuple[slice, Unit]]:
        """Cut a flat unit into pieces without members, for work that goes through a long buffer a part at a time.

        One that is not flat is one piece.

        Args:
            elements: Of a piece, or about as many: pieces begin at multiples of a block.
            on_shared: What a piece has in the place of a count, and of other state that is not cut. Copies: every piece counts from the
                same step.
            stops: Where pieces end, in the place of every so many elements.

        Yields:
            Which elements a piece is, and the piece, whose tensor and state are views; one without elements of a unit without.
        """
        if not self.flat:
            yield slice(0, self.tensor.numel()), self
            return
        if stops is None:
            size, numel = max(elements // self.block, 1) * self.block, self.tensor.numel()
            stops = (min(start + size, numel) for start in range(0, max(numel, 1), size))
        start = 0
        for stop in stops:
            state = self._cut_state(start, stop, on_shared)
            part = Unit(self.group, self.tensor[start:stop], [], state, self._first_of(start, stop), flat=True)
            part.decision, part.stored, part.block = self.decision, self.stored, self.block
            part.whole = None if self.whole is None else self.whole.cut(start, stop)
            yield slice(start, stop), part
            start = stop

    def _cut_state(self, start: int, stop: int, on_shared: Callable[[Tensor], Tensor]) -> OptimizerState[Any]:
        """The state of a flat unit's elements ``start`` to ``stop``, as views; ``on_shared`` makes what is not cut."""
        return cut(self.state, [self.tensor], _alone(self.stored), start, stop, on_shared)

    # -- state, entry by entry ------------------------------------------------------------------------------------------------

    def entries(self, member: Member) -> list[tuple[Entry, Tensor]]:
        """List the entries of one parameter: views, in its shape where there is one number for each element; shared entries as they are."""
        flat = self.tensor.ndim == 1
        return [(entry, self._shaped(entry, x, member) if flat else x) for entry, x in self._entries()]

    def named_state(self, member: Member) -> dict[str, Tensor]:
        """Return the tensors of :meth:`entries` by name."""
        return {entry.name: value for entry, value in self.entries(member)}

    def published(self, member: Member) -> dict[str, Tensor]:
        """Return the tensors of :meth:`entries` by name; of a sharded parameter they are sharded as it is, but for what all ranks have."""
        return {
            entry.name: value
            if entry.cut == "copy"
            else like(member.parameter, value, self.whole_shape(entry, member, value))
            for entry, value in self.entries(member)
        }

    def whole_shape(self, entry: Entry, member: Member, value: Tensor) -> tuple[int, ...]:
        """The shape that an entry of a sharded parameter has on all ranks together. Whole factors are of one that all ranks have whole."""
        return entry.shape(member.parameter.shape, value.shape)

    def shared_state(self) -> dict[str, Tensor]:
        """Return by name what all members share: counts, and other numbers that a transform keeps once."""
        return {entry.name: x for entry, x in self._entries() if entry.role == "shared"}

    def kept_entries(self) -> list[Entry]:
        """List what is kept for each member."""
        return [entry for entry, _ in self._entries()]

    def _entries(self) -> list[tuple[Entry, Tensor]]:
        return entries(self.state, [self.tensor], 0, self.stored)

    def _shaped(self, entry: Entry, x: Tensor, member: Member) -> Tensor:
        if entry.cut in ("copy", "tensor") or x.ndim != 1:
            return x
        low, high = entry.range(member.start, member.stop)
        shape = local(member.parameter).shape
        return piece(x, low, high, shape if entry.cut == "element" else torch.Size([high - low]))

    def reshape_state(self, shape: torch.Size) -> None:
        """Give state that has one number for each element the shape of a tensor that is no longer stepped as a vector."""

        def reshaped(x: Tensor, part: PartSpec | None) -> Tensor:
            return piece(x, 0, x.numel(), shape) if part is None or part.block == 1 else x

        self.state = map_parts(self.state, [self.tensor], _alone(self.stored), reshaped, lambda x: x)


def _alone(stored: Resolved | None) -> list[Resolved] | None:
    return None if stored is None else [stored]


def map_state(
    state: OptimizerState[Any], on_slot: Callable[[Tensor], Tensor], on_counter: Callable[[Tensor], Tensor]
) -> OptimizerState[Any]:
    """A state with every per-element tensor and every counter replaced."""
    held: list[Any] = []

    def slot(_: str, subtree: Any) -> Any:
        held.append(eb.tree.map(on_slot, subtree))
        return None

    # Slots out, counters mapped, slots back in, in the same order.
    counters = eb.tree.map(on_counter, eb.tree.map_slots(slot, state.inner))
    slots = iter(held)
    inner = eb.tree.map_slots(lambda *_: next(slots), counters)
    return OptimizerState(on_counter(state.step), eb.tree.map(on_slot, state.extra), inner)


def write(into: object, values: object) -> None:
    """Copy the tensors of one tree over those of another."""
    for old, new in zip(eb.tree.leaves(into), eb.tree.leaves(values), strict=True):
        if not old.ndim and old.is_floating_point() and torch.compiler.is_compiling():
            # Dynamo (torch 2.13) makes a number of a 0-d float64 input, and when it traces anew without one it takes a write for unused
            # (OutputGraph.remove_tensorify_specialized_graphargs). It sees no number in a view.
            old, new = old.view(1), new.reshape(1)
        old.copy_(new)


def new_room(x: Tensor, numel: int) -> Tensor:
    """Memory for ``numel`` elements like those of ``x``, beside it."""
    return x.new_empty(numel)


def init_state(
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    first: int | Blocks,
    *,
    chunk: int = CHUNK,
) -> OptimizerState[Any]:
    """Return the state of a unit; of a long buffer it is computed piece by piece, ``chunk`` elements at a time."""
    if tensor.ndim != 1 or tensor.numel() <= chunk or needs_whole_tensors(optimizer.transform):
        return optimizer.init([tensor], eb.Context(first_element=first))
    (stored,) = optimizer.formats([tensor])

    def room(x: Tensor, part: PartSpec | None) -> Tensor:
        return new_room(x, tensor.numel() if part is None else part.count(tensor.numel()))

    none = tensor[:0]
    state = map_parts(optimizer.init([none]), [none], [stored], room, torch.clone)
    for _, part in Unit(0, tensor, [], state, first, flat=True, stored=stored).pieces(chunk, lambda x: x):
        write(part.state, optimizer.init([part.tensor], eb.Context(first_element=part.first)))
    return state


def is_shared(parameter: Tensor) -> bool:
    """Whether other processes share a parameter's memory; False on accelerators, where torch answers True for every tensor."""
    return parameter.device.type == "cpu" and bool(parameter.is_shared())  # type: ignore[no-untyped-call]
