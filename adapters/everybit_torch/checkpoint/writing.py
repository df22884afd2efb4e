"""Writing through ``torch.distributed.checkpoint``: plain files as DCP lays them out, and a checksum for each piece."""

from __future__ import annotations

import os
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from everybit_torch.checkpoint import dcp_metadata
from everybit_torch.checkpoint.atomic_files import FailingStream, replace_file, with_message
from everybit_torch.checkpoint.inventory import Inventory, Piece, SavedTensor, write_inventory


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
