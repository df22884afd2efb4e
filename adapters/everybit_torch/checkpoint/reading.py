"""Reading of a checkpoint's pieces, each compared with its checksum.

A rank reads whole pieces, as ``torch.distributed.checkpoint`` does, however little of one it needs. So it compares the checksum of
everything that it takes over, and reads nothing that it would not have read without checksums.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from everybit_torch.checkpoint.atomic_files import with_message
from everybit_torch.checkpoint.boxes import overlap
from everybit_torch.checkpoint.inventory import Inventory, Piece
from everybit_torch.checkpoint.parts import Room
from everybit_torch.placements import fits_in


def read_into(inventory: Inventory, rooms: Iterable[Room]) -> None:
    """Fill memory with the values of the checkpoint, file after file, each piece read once.

    Args:
        inventory: The checkpoint's inventory, which has all of the tensors, in the shapes that they have here.
        rooms: On the host.

    Raises:
        OSError: A file cannot be read.
        ValueError: A piece was damaged, or cut off, or has numbers that do not fit; the message names the file and the tensor.
    """
    wanted = [
        (piece, name, tensor[both[0]], both[1])
        for name, offsets, tensor in rooms
        for piece in inventory.tensors[name].pieces
        if (both := overlap(offsets, tensor.shape, piece.offsets, piece.sizes)) is not None
    ]
    wanted.sort(key=lambda one: (one[0].file, one[0].start))
    memory = bytearray()

    def room(length: int) -> bytearray:
        """The same memory for one piece after the other: the system's work for fresh memory costs more than the checksum."""
        nonlocal memory
        if len(memory) < length:
            memory = bytearray(length)
        return memory

    for (piece, name), several in groupby(wanted, key=lambda one: one[:2]):
        values = read_piece(inventory, name, piece, room)
        for _, _, part, there in several:
            given = values[there]
            if not fits_in(given, part.dtype):
                raise ValueError(f"{name}: holds numbers beyond {part.dtype}; nothing is cast.")
            part.copy_(given)


class _Bytes(io.RawIOBase):
    """A file in memory that is not copied, as ``BytesIO`` copies a part of a ``bytearray``."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def readinto(self, into: Any) -> int:
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)


def read_piece(inventory: Inventory, name: str, piece: Piece, room: Callable[[int], bytearray] = bytearray) -> Tensor:
    """A piece's values, on the host, after comparing its checksum.

    Args:
        inventory: The checkpoint's inventory.
        name: The tensor's name.
        piece: A piece of the tensor.
        room: Gives memory of at least so many bytes, to read the piece into.

    Raises:
        OSError: Its file cannot be read.
        ValueError: It was damaged, or cut off; the message names the file and the tensor.
    """
    path = inventory.folder / piece.file
    data, read = memoryview(b""), 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if piece.start + piece.length <= size:
                # Only then, for a damaged length may be more than the memory there is.
                data = memoryview(room(piece.length))[: piece.length]
                file.seek(piece.start)
                read = file.readinto(data)
    except FileNotFoundError as error:
        raise with_message(error, f"{path}: does not exist, and holds a part of {name!r}.") from error
    except OSError as error:
        raise with_message(error, f"{path}: {name!r}: cannot be read: {os.strerror(error.errno or 0)}.") from error
    if not read or read != piece.length:
        raise ValueError(
            f"{path}: was cut off: {name!r} takes bytes {piece.start} to {piece.start + piece.length}, and the file has {size}."
        )
    if piece.checksum is not None and zlib.crc32(data) != piece.checksum:
        raise ValueError(f"{path}: bits of {name!r} have changed since it was written: their checksum differs.")
    try:
        tensor = torch.load(cast(BinaryIO, _Bytes(data)), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"{path}: {name!r} cannot be read, bits have changed since it was written ({error})."
        ) from None
    kind = inventory.tensors[name].dtype, piece.sizes
    if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != kind:
        got = (tensor.dtype, tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{path}: {name!r}: holds {got} where {kind} was written; bits have changed since.")
    return tensor


def overlaps(inventory: Inventory) -> Iterator[str]:
    """Yield the names of tensors with overlapping pieces. Some of their elements are in two pieces, and others are missing."""
    for name, tensor in inventory.tensors.items():
        boxes = len(tensor.pieces), len(tensor.shape)
        low = torch.tensor([piece.offsets for piece in tensor.pieces], dtype=torch.int64).reshape(boxes)
        high = low + torch.tensor([piece.sizes for piece in tensor.pieces], dtype=torch.int64).reshape(boxes)
        for number in range(1, len(tensor.pieces)):
            # Boxes meet if they do in every dimension. A box without elements meets no other.
            meets = (torch.maximum(low[number], low[:number]) < torch.minimum(high[number], high[:number])).all(1)
            if bool(meets.any()):
                yield name
                break
