"""The storage of ``torch.distributed.checkpoint`` for sharded checkpoints: plain files, and a checksum for each piece that is written.

A rank that loads reads whole pieces, as DCP does, however little of one it needs; so it compares the checksum of everything that it takes
over, and no rank has to read anything that it would not have read without. The files are laid out as DCP lays them out, and its own reader
reads them.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from everybit_torch.checkpoint import dcp_metadata
from everybit_torch.checkpoint.inventory import Inventory, Piece, SavedTensor, write_inventory
from everybit_torch.checkpoint.single_file import FailingStream, replace_file, with_message
from everybit_torch.dtensors import fits_in


class _Written(NamedTuple):
    """A piece that was written, as a rank reports it to the first rank."""

    file: str
    start: int
    length: int
    checksum: int


class _Checksum(FailingStream):
    """Counts the bytes written, and their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.checksum = self.length = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += written
        return written


class CheckedWriter(StorageWriter):
    """Writes each rank's pieces into a file of its own, and in the end an inventory with their checksums.

    Args:
        folder: Made already.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A no-op: a writer keeps no state between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A no-op: files are made when data is written."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add to each rank's plan the name of its file."""
        return [replace(plan, storage_data=f"__{rank}_0{DEFAULT_SUFFIX}") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces, and bring them to the disk.

        Raises:
            OSError: They cannot be written; the message names the file and says why.
            TypeError: Something that is no tensor.
        """
        results: list[WriteResult] = []
        if plan.items:
            path = self.folder / plan.storage_data
            try:
                with open(path, "wb") as file:
                    for item in plan.items:
                        if item.type is WriteItemType.BYTE_IO:
                            raise TypeError(f"{item.index.fqn}: got something that is no tensor; accepted are tensors.")
                        tensor = planner.resolve_data(item)
                        assert isinstance(tensor, Tensor)
                        start = file.tell()
                        length, checksum = _save(tensor, file)
                        written = _Written(path.name, start, length, checksum)
                        results.append(WriteResult(item.index, length, written))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                why = os.strerror(error.errno) if error.errno is not None else str(error)
                raise with_message(error, f"{path}: writing it failed: {why}.") from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the inventory, and DCP's own metadata. It runs on the first rank when all have written."""
        written: dict[Any, _Written] = {one.index: one.storage_data for ranks in results for one in ranks}
        tensors: dict[str, SavedTensor] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            pieces = [
                Piece(tuple(chunk.offsets), tuple(chunk.sizes), *written[MetadataIndex(name, chunk.offsets)])
                for chunk in entry.chunks
            ]
            tensors[name] = SavedTensor(entry.properties.dtype, tuple(entry.size), tuple(pieces))
        write_inventory(Inventory(self.folder, tensors))
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {index: _StorageInfo(one.file, one.start, one.length) for index, one in written.items()}
        replace_file(self.folder / dcp_metadata.FILE, lambda partial: _pickle(metadata, partial))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 (torch's)
        """DCP is given a writer, and does not look for one."""
        return False


def _save(tensor: Tensor, file: BinaryIO) -> tuple[int, int]:
    """Write a tensor as DCP does; how many bytes these were, and their checksum."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes all of a storage
    stream = _Checksum(file)
    try:
        torch.save(tensor, cast(BinaryIO, stream))
    except Exception as error:
        if stream.error is not None:
            raise stream.error from error
        raise
    return stream.length, stream.checksum


def _pickle(metadata: Metadata, path: Path) -> None:
    with open(path, "r+b") as file:
        pickle.dump(metadata, file)


class CheckedReader(StorageReader):
    """Reads the pieces that this rank needs, and compares their checksums.

    Args:
        inventory: The checkpoint's inventory.
    """

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self._memory = bytearray()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A no-op: a reader keeps no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Return the metadata of the inventory, which was read and checked already."""
        return self.inventory.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A no-op: files are opened when data is read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file after file, each piece once, however many parts of it are needed.

        Raises:
            OSError: A file that cannot be read.
            ValueError: A piece that was damaged, or cut off; the message names the file and the tensor.
        """
        known = self.inventory.by_index()
        wanted = [(known[item.storage_index], item) for item in plan.items]
        wanted.sort(key=lambda one: (one[0][1].file, one[0][1].start))
        for (name, piece), items in groupby(wanted, key=itemgetter(0)):
            self._read(name, piece, [item for _, item in items], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _room(self, length: int) -> bytearray:
        """The same memory for one piece after the other: the system's work for fresh memory costs more than the checksum."""
        if len(self._memory) < length:
            self._memory = bytearray(length)
        return self._memory

    def _read(self, name: str, piece: Piece, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        tensor = read_piece(self.inventory, name, piece, self._room)
        for item in items:
            part = tensor
            for dimension, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, low, size)
            into = planner.resolve_tensor(item).detach()
            if not fits_in(part, into.dtype):
                raise ValueError(f"{item.storage_index.fqn}: holds numbers beyond {into.dtype}; nothing is cast.")
            into.copy_(part)
            planner.commit_tensor(item, into)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 (torch's)
        """DCP is given a reader, and does not look for one."""
        return False


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
