"""State in the host's memory that is stepped on the device: two pieces of it are there at once.

While a piece is stepped, the state of the next piece is copied to the device, and that of the piece before is copied back. Copies have
streams of their own, and the host's memory is pinned for them. The bits are those of a step without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor

from everybit.formats import PartSpec
from everybit.stepping import Metrics
from everybit.stepping.entries import map_parts
from everybit_torch import streams
from everybit_torch.segments.segment import Segment, write

LENGTH = 1 << 25
"""Elements of a piece. A tensor that must stay whole is one piece, however long it is."""

IN_TESTS = False
"""Whether devices without streams are accepted, where all of this is done with ordinary memory."""

Offload = Literal["state"]
"""What lies in the host's memory."""

Step = Callable[[Segment, Tensor], Metrics | None]
"""Steps a piece, with its gradient."""


@dataclass(slots=True, eq=False)
class _StagingSlot:
    """Memory on the device for the state of one piece.

    Attributes:
        memory: Bytes for each tensor of the state. Compiled code takes no tensors that share memory.
        free: An event after which it may be written to.
    """

    memory: list[Tensor] = field(default_factory=list)
    free: Any = None


@dataclass(slots=True, eq=False)
class StagedPiece:
    """A piece of a segment.

    Attributes:
        where: Its elements.
        part: The piece with its state in the host's memory.
        sizes: Bytes of each tensor of its state that has a number for elements.
        staged: The piece with its state in a slot, by number of the slot; and the memory.
    """

    where: slice
    part: Segment
    sizes: list[int]
    staged: dict[int, tuple[list[Tensor], Segment]] = field(default_factory=dict)


def require_offload(value: object) -> None:
    """Refuse a value that does not name state.

    Raises:
        ValueError: Neither ``"state"`` nor None.
    """
    if value not in (None, "state"):
        raise ValueError(f"offload: got {value!r}; accepted are 'state' and None.")


def require_streams(device: torch.device) -> None:
    """Refuse a device of which state lies in the host's memory anyway, or cannot be copied beside a step.

    Raises:
        ValueError: The device has no streams.
    """
    if not (streams.has_streams(device) or IN_TESTS):
        raise ValueError(
            f"offload: got 'state' for parameters on {device}; accepted are parameters on a CUDA device. State of a model on a CPU lies in"
            " the host's memory anyway."
        )


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory on the host, pinned where copies to and from this device need it."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=streams.has_streams(device))


class HostState:
    """The memory of one optimizer's state on the host, and the two slots on a device.

    Args:
        device: The device that steps.
        length: Elements of a piece; None: :data:`LENGTH`.

    Raises:
        ValueError: The device has no streams.
    """

    def __init__(self, device: torch.device, length: int | None = None) -> None:
        require_streams(device)
        self._device, self._length = device, LENGTH if length is None else length
        self._slots = [_StagingSlot(), _StagingSlot()]
        self._arriving, self._leaving = self._stream(), self._stream()
        self._queue: list[tuple[Segment, StagedPiece]] = []
        self._at = 0  # the next of these that is stepped
        self._sent = 0  # the next whose state is sent to the device
        self._arrived: dict[int, Any] = {}

    def __reduce__(self) -> Any:
        return HostState, (self._device, self._length)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots, on the device."""
        return sum(x.nbytes for slot in self._slots for x in slot.memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory on the host."""
        return empty_on_host(shape, dtype, self._device)

    # -- a step -----------------------------------------------------------------------------------------------------------------

    def begin(self, segments: Sequence[Segment]) -> None:
        """Let the state of the first of these segments be on its way. They are stepped in this order."""
        self._queue = [(segment, piece) for segment in segments for piece in self._pieces_of(segment)]
        self._at = self._sent = 0
        self._arrived = {}
        sizes = _room_for(piece.sizes for _, piece in self._queue)
        for slot in self._slots[: len(self._queue)]:
            self._enlarge(slot, sizes)
        self._send()

    def step(self, segment: Segment, grad: Tensor, step: Step) -> Metrics | None:
        """Step a segment piece by piece, and send the new state back.

        Args:
            segment: The segment: the next of those that were given to :meth:`begin`, or one by itself.
            grad: The gradient, in its tensor's shape.
            step: Steps a piece in place.
        """
        alone = self._at >= len(self._queue) or self._queue[self._at][0] is not segment
        if alone:
            self.begin([segment])
        measured: Metrics | None = None
        staged = segment
        for piece in self._pieces_of(segment):
            number = self._at % 2
            self._send()
            streams.come_after(self._arrived.pop(self._at), self._device)
            staged = self._staged(piece, number, segment)
            write(staged.shared(), segment.shared())
            found = step(staged, grad if piece.part is segment else grad[piece.where])
            self._send_back(piece, staged, number)
            measured = found if measured is None or found is None else measured + found
            self._at += 1
        write(segment.shared(), staged.shared())
        if alone:
            self.finish()
        return measured

    def finish(self) -> None:
        """Wait until the new state is in the host's memory, which other code may read from here on."""
        self._queue = []
        if self._leaving is not None:
            self._leaving.synchronize()

    # -- copies -----------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send the state of the pieces for which there are slots: of the next, while this is stepped."""
        while self._sent < min(self._at + 2, len(self._queue)):
            segment, piece = self._queue[self._sent]
            number = self._sent % 2
            slot = self._slots[number]
            staged = self._staged(piece, number, segment)
            with self._on(self._arriving):
                streams.come_after(slot.free, self._device)
                for into, held in _tensors(staged, piece.part):
                    into.copy_(held, non_blocking=True)
                self._arrived[self._sent] = streams.mark(self._device)
            self._sent += 1

    def _send_back(self, piece: StagedPiece, staged: Segment, number: int) -> None:
        stepped = streams.mark(self._device)
        with self._on(self._leaving):
            streams.come_after(stepped, self._device)
            for held, new in _tensors(piece.part, staged):
                held.copy_(new, non_blocking=True)
            self._slots[number].free = streams.mark(self._device)

    def _staged(self, piece: StagedPiece, number: int, segment: Segment) -> Segment:
        """A piece with its state in a slot."""
        memory = self._slots[number].memory[: len(piece.sizes)]
        known = piece.staged.get(number)
        if known is not None and all(map(is_, known[0], memory)):
            return known[1]
        rooms = iter(memory)

        def view(x: Tensor, _: PartSpec) -> Tensor:
            return next(rooms)[: x.nbytes].view(x.dtype).view(x.shape)

        part = piece.part
        state = map_parts(segment.layout, part.state, view, torch.clone)
        staged = Segment(part.optimizer, part.tensor, state, part.first, part.is_part, part.watched)
        piece.staged[number] = [*memory], staged
        return staged

    def _enlarge(self, slot: _StagingSlot, sizes: Sequence[int]) -> None:
        """Let a slot have at least so many bytes for each tensor. What uses the memory that it replaces is done then."""
        short = [n for n, size in enumerate(sizes) if n >= len(slot.memory) or slot.memory[n].numel() < size]
        if short and self._leaving is not None:
            self._leaving.synchronize()
        for number in short:
            room = torch.empty(sizes[number], dtype=torch.uint8, device=self._device)
            slot.memory[number : number + 1] = [room]
            slot.free = streams.mark(self._device)  # until then a kernel may use what this memory was before

    def _pieces_of(self, segment: Segment) -> list[StagedPiece]:
        """The pieces of a segment, which are found anew when it has other memory or another optimizer."""
        made_of = (segment.state, segment.tensor, segment.optimizer, segment.first)
        if segment.pieces_on_host is None or not all(map(is_, segment.pieces_on_host[0], made_of)):
            pieces = [StagedPiece(where, part, _sizes(part)) for where, part in segment.pieces(self._length)]
            segment.pieces_on_host = made_of, pieces
        return segment.pieces_on_host[1]

    def _stream(self) -> Any:
        return streams.make(self._device) if streams.has_streams(self._device) else None

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else streams.working_on(stream)


def staging_bytes(segments: Iterable[Segment]) -> int:
    """Return the bytes that a device has for two pieces of these segments, of which it needs no memory."""
    sizes = [_sizes(part) for segment in segments for _, part in segment.pieces(LENGTH)]
    return min(2, len(sizes)) * sum(_room_for(sizes))


def _sizes(segment: Segment) -> list[int]:
    return [x.nbytes for _, x in _tensors(segment, segment)]


def _room_for(pieces: Iterable[Sequence[int]]) -> list[int]:
    """The bytes for each tensor with which any of these pieces has room."""
    found: list[int] = []
    for sizes in pieces:
        found = [max(pair) for pair in zip_longest(found, sizes, fillvalue=0)]
    return found


def _tensors(one: Segment, other: Segment) -> list[tuple[Tensor, Tensor]]:
    """The tensors of two segments' states that have a number for elements, side by side."""
    pairs = zip(one.entries(), other.entries(), strict=True)
    return [(x, y) for (entry, x), (_, y) in pairs if entry.role != "shared"]
