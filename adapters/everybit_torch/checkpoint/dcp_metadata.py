"""``torch.distributed.checkpoint``'s ``.metadata``, read without running anything: for checkpoints that have no inventory of ours.

The file is a pickle. It may name only a short list of DCP's own plain classes, and the objects that come out are
judged field by field before it is used.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from everybit_torch.checkpoint.atomic_files import read_whole
from everybit_torch.checkpoint.inventory import Inventory, Piece, SavedTensor
from everybit_torch.torch_internals.pickles import StorageInfo, dcp_classes

FILE = ".metadata"

_DCP = "torch.distributed.checkpoint"
_PLAIN: dict[tuple[str, str], Any] = {
    **{
        (f"{_DCP}.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    },
    ("torch", "Size"): torch.Size,
    **dcp_classes(),
    ("collections", "OrderedDict"): dict,
    # Paths of where it was saved. Only pure paths, which access no file system.
    **{(module, kind): PurePosixPath for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath")},
    **{(module, kind): PureWindowsPath for module in ("pathlib", "pathlib._local") for kind in ("WindowsPath", "PureWindowsPath")},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A class of the list, or a dtype."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is none of the classes that DCP's metadata is made of"
        )


def read_dcp_metadata(folder: Path) -> Inventory:
    """Read the inventory of a folder that ``dcp.save`` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file, or damaged; the message names the file, and the entry if it is about one.
    """
    path = folder / FILE
    data = read_whole(path)
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # pickles fail in every way there is
        raise ValueError(
            f"{path}: is no metadata of torch.distributed.checkpoint, or bits have changed since it was written"
            f" ({type(error).__name__}: {error})."
        ) from None
    entries = getattr(found, "state_dict_metadata", None)
    places = getattr(found, "storage_data", None)
    if not isinstance(found, Metadata) or not isinstance(entries, dict) or not isinstance(places, dict):
        raise ValueError(
            f"{path}: is no metadata of torch.distributed.checkpoint, or bits have changed since it was written."
        )
    tensors: dict[str, SavedTensor] = {}
    others: set[str] = set()
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise ValueError(f"{path}: has an entry of the name {name!r}; bits have changed since it was written.")
        if not isinstance(entry, TensorStorageMetadata):
            others.add(name)
            continue
        try:
            tensors[name] = _tensor(name, entry, places)
        except Exception as error:
            raise ValueError(
                f"{path}: {name!r}: is no tensor of a checkpoint, or bits have changed since it was written ({error})."
            ) from None
    return Inventory(folder, tensors, frozenset(others), checked=False)


def _tensor(name: str, entry: TensorStorageMetadata, places: dict[Any, Any]) -> SavedTensor:
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise ValueError(f"its dtype is {entry.properties.dtype!r}")
    pieces = []
    for chunk in entry.chunks:
        place: Any = places.get(MetadataIndex(name, chunk.offsets))
        if not isinstance(place, StorageInfo):
            raise ValueError(f"of its piece at {tuple(chunk.offsets)} it is not said where it lies")
        if getattr(place, "transform_descriptors", None):
            raise ValueError("it was written through an extension of DCP's; accepted are plain files")
        if not isinstance(place.relative_path, str) or not all(type(x) is int for x in (place.offset, place.length)):
            raise ValueError(f"its piece at {tuple(chunk.offsets)} lies at {place!r}")
        pieces.append(
            Piece(_sizes(chunk.offsets), _sizes(chunk.sizes), place.relative_path, place.offset, place.length)
        )
    return SavedTensor(entry.properties.dtype, _sizes(entry.size), tuple(pieces))


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, torch.Size):
        raise ValueError(f"{value!r} is no size")
    return tuple(value)
