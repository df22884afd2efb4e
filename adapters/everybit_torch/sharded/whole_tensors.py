"""Puts tensors together of which tensor parallelism has given each rank a part, some megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.sharded.layout import Box, Part
from everybit_torch.sharded.tensor_parallel import parts_of

CHUNK = 1 << 22
"""The most bytes of each rank's part that are sent at a time."""


def is_in_parts(x: Tensor) -> bool:
    """Whether ranks have different parts of a tensor, so that it has to be put together."""
    return is_dtensor(x) and any(placement.is_shard() for placement in x.placements)


class Room:
    """Memory for what is on its way, for one tensor after the other: a backend may hold on to what it sent for a moment.

    Args:
        parts: This rank's parts of the tensors that will be put together, and bytes of an element.
        device: Where.
    """

    def __init__(self, parts: Iterable[tuple[Part, int]], device: torch.device) -> None:
        most = max((gathered_bytes(part, itemsize) for part, itemsize in parts), default=0)
        self._bytes = torch.empty(most, dtype=torch.uint8, device=device)
        self._taken = 0

    def begin(self) -> None:
        """Make the memory that was taken available again."""
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for so many elements, 1-d."""
        start, self._taken = self._taken, self._taken + numel * dtype.itemsize
        return self._bytes[start : self._taken].view(dtype)


def gathered_bytes(part: Part, itemsize: int) -> int:
    """The bytes on their way, at the most, while a tensor is put together of which a rank has this part."""
    if not part.cuts:
        return 0
    length = min(part.largest, max(CHUNK // itemsize, 1))
    total = length if part.numel < part.largest else 0  # padded
    for _, ranks in reversed(part.cuts):
        length *= ranks
        total += length
    return total * itemsize


def put_together(
    parameter: Tensor,
    communicators: Sequence[Communicator],
    into: Tensor | None,
    what: str,
    room: Room,
    own: Tensor | None = None,
) -> None:
    """Gather all parts of a tensor. Every rank that has a part has to call it.

    Args:
        parameter: A DTensor.
        communicators: The ranks along each dimension of its mesh.
        into: Becomes the whole: any tensor of its shape; None: this rank takes part only.
        what: Its name, for errors.
        room: For what is on its way.
        own: What is gathered in the place of the tensor's own values: a number for each element of this rank's part, 1-d.
    """
    assert is_dtensor(parameter)
    parts = list(parts_of(parameter))
    along = [one for one, placement in zip(communicators, parameter.placements, strict=True) if placement.is_shard()]
    values = local(parameter).detach().reshape(-1) if own is None else own
    for low, length in _chunks(max(part.numel for part in parts), values.element_size()):
        room.begin()
        piece = values[low : low + length]
        if piece.numel() < length:  # the last ranks have less where a dimension cannot be divided
            short, piece = piece, room.take(length, values.dtype)
            piece[: short.numel()] = short
            piece[short.numel() :] = 0
        for communicator in reversed(along):
            gathered = room.take(communicator.size * piece.numel(), values.dtype)
            communicator.all_gather(gathered, piece, what).wait()
            piece = gathered
        for number, part in enumerate(parts if into is not None else ()):
            assert into is not None
            here = piece[number * length : (number + 1) * length]
            for box in part.boxes(min(low, part.numel), min(low + length, part.numel)):
                view_of(into, box).copy_(elements_of(here, box))


def _chunks(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    step = max(CHUNK // itemsize, 1)
    for low in range(0, numel, step):
        yield low, min(step, numel - low)


def view_of(whole: Tensor, box: Box) -> Tensor:
    """The rectangle of a tensor, as a view."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole


def elements_of(run: Tensor, box: Box) -> Tensor:
    """The elements of a rectangle, in its shape, in a 1-d tensor of the range that it is of."""
    return run[box.start : box.start + _numel(box)].view(box.sizes)


def cut(whole: Tensor, part: Part | None, low: int, high: int, into: Tensor) -> None:
    """Copy elements of a whole tensor, counted through a part of it: to a 1-d tensor, without a copy of the part between.

    Args:
        whole: Of any strides.
        part: Of it; None: all of it.
        low: The first element.
        high: The element after the last.
        into: 1-d.
    """
    if part is None:
        part = Part(tuple(whole.shape), (0,) * whole.ndim, tuple(whole.shape))
    for box in part.boxes(low, high):
        elements_of(into, box).copy_(view_of(whole, box))


def _numel(box: Box) -> int:
    return torch.Size(box.sizes).numel()
