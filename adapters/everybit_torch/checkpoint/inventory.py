"""The inventory of a checkpoint's folder: the place and checksum of each piece, in a file beside ``torch.distributed.checkpoint``'s.

DCP's own ``.metadata`` is a pickle, which executes code when it is read, and has no checksums. It is written too, for DCP's own
functions; where there is an inventory, it is not read here. The inventory is JSON, a tensor on each line, each with a checksum of its own,
and one over all of them: damage is told with the name of the tensor that it is about.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from everybit_torch.checkpoint.atomic_files import read_whole, replace_file

FILE = "everybit.json"
"""The inventory of a checkpoint's folder."""

FORMAT = 2
"""The format that is written, and read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the bytes that hold it.

    Attributes:
        offsets: The box's first element.
        sizes: And its extent.
        file: Its name, in the checkpoint's folder.
        start: The first byte in the file.
        length: The number of bytes.
        checksum: CRC-32 of the bytes; None if it is not known.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint: its dtype and shape, and its pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        """Judge it.

        Raises:
            ValueError: Pieces that do not fit, or are not in a file of the folder.
        """
        for piece in self.pieces:
            fits = len(piece.offsets) == len(piece.sizes) == len(self.shape) and all(
                low >= 0 and size >= 0 and low + size <= extent
                for low, size, extent in zip(piece.offsets, piece.sizes, self.shape, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"a piece at {piece.offsets} of extent {piece.sizes} is not within its shape {self.shape}"
                )
            if piece.file in ("", ".", "..") or PurePath(piece.file).name != piece.file:
                raise ValueError(f"a piece lies in {piece.file!r}, which is no file of this folder")
            if piece.start < 0 or piece.length < 0:
                raise ValueError(f"a piece has {piece.length} bytes from byte {piece.start} on")
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"its shape is {self.shape}")
        if sum(math.prod(piece.sizes) for piece in self.pieces) != math.prod(self.shape):
            raise ValueError("its pieces do not make up the whole of it")


@dataclass(frozen=True, slots=True)
class Inventory:
    """The contents of a checkpoint.

    Attributes:
        folder: Where it lies.
        tensors: The tensors by name.
        others: Names of entries that are no tensors.
        checked: Whether there are checksums.
    """

    folder: Path
    tensors: Mapping[str, SavedTensor]
    others: frozenset[str] = frozenset()
    checked: bool = True


# -- writing ------------------------------------------------------------------------------------------------------------------------


def write_inventory(inventory: Inventory) -> None:
    """Write it into its folder, whole or not at all."""
    files = sorted({piece.file for tensor in inventory.tensors.values() for piece in tensor.pieces})
    numbers = {file: number for number, file in enumerate(files)}
    records = {name: _record(tensor, numbers) for name, tensor in inventory.tensors.items()}
    seals = {name: _seal(name, record) for name, record in records.items()}
    lines = [
        f"{json.dumps(name)}: {json.dumps(record | {'checksum': seals[name]}, separators=(',', ':'))}"
        for name, record in records.items()
    ]
    head = json.dumps({"format": FORMAT, "files": files, "checksum": _whole_seal(files, seals)})
    text = head[:-1] + ', "tensors": {\n' + ",\n".join(lines) + "\n}}\n"
    replace_file(inventory.folder / FILE, lambda partial: _write(partial, text))


def _write(path: Path, text: str) -> None:
    with open(path, "r+", encoding="utf-8") as file:
        file.write(text)


def _record(tensor: SavedTensor, numbers: Mapping[str, int]) -> dict[str, Any]:
    pieces = [[list(p.offsets), list(p.sizes), numbers[p.file], p.start, p.length, p.checksum] for p in tensor.pieces]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "pieces": pieces}


def _seal(name: str, record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([name, record], separators=(",", ":"), sort_keys=True).encode())


def _whole_seal(files: Sequence[str], seals: Mapping[str, int]) -> str:
    """Over everything: that no line is missing, comes from another checkpoint, or points to other files."""
    return hashlib.sha256(json.dumps([FORMAT, list(files), list(seals.items())]).encode()).hexdigest()


# -- reading ------------------------------------------------------------------------------------------------------------------------


def read_inventory(folder: Path) -> Inventory:
    """Read it, and compare its checksums.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged; the message names the file, and the tensor if it is about one.
    """
    path = folder / FILE
    data = read_whole(path)
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: bits have changed since it was written: {_where(data, error)}") from None
    if not isinstance(found, dict) or not {"format", "files", "checksum", "tensors"} <= set(found):
        raise ValueError(f"{path}: is no inventory of a checkpoint, or bits have changed since it was written.")
    if found["format"] != FORMAT or isinstance(found["format"], bool):
        raise ValueError(f"{path}: has format {found['format']!r}; accepted by this version is {FORMAT}.")
    files, tensors = found["files"], found["tensors"]
    if not isinstance(files, list) or not all(isinstance(one, str) for one in files) or not isinstance(tensors, dict):
        raise ValueError(f"{path}: bits have changed since it was written: its list of files or tensors is none.")
    damaged = [name for name, record in tensors.items() if not _is_sealed(name, record)]
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise ValueError(
            f"{path}: bits have changed since it was written: the checksum of {damaged[0]!r}{more} differs."
        )
    if found["checksum"] != _whole_seal(files, {name: record["checksum"] for name, record in tensors.items()}):
        raise ValueError(
            f"{path}: bits have changed since it was written: the checksum of all of it differs (names of files, or a tensor that is gone)."
        )
    saved: dict[str, SavedTensor] = {}
    for name, record in tensors.items():
        try:
            saved[name] = _tensor(record, files)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"{path}: {name!r} is no tensor of a checkpoint: {error}.") from None
    return Inventory(folder, saved)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice")
    return table


def _where(data: bytes, error: Exception) -> str:
    """Name the tensor of the damaged line in a file that cannot be parsed."""
    if isinstance(error, UnicodeDecodeError):
        at = error.start
    elif isinstance(error, json.JSONDecodeError):
        at = len(error.doc[: error.pos].encode())
    else:
        return f"it is no JSON ({error})."
    line = data[data.rfind(b"\n", 0, at) + 1 : at + 1].decode("utf-8", "replace")
    name = line.split('": ')[0].strip('" ')[:200]
    return f"it is no JSON from byte {at} on, near {name!r} ({error})."


def _is_sealed(name: str, record: object) -> bool:
    if not isinstance(record, dict):
        return False
    return record.get("checksum") == _seal(name, {key: value for key, value in record.items() if key != "checksum"})


def _tensor(record: Mapping[str, Any], files: Sequence[str]) -> SavedTensor:
    dtype = getattr(torch, str(record["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {record['dtype']!r}")
    pieces = []
    for offsets, sizes, *numbers in record["pieces"]:
        file, start, length, checksum = _counts(numbers)
        pieces.append(Piece(tuple(_counts(offsets)), tuple(_counts(sizes)), files[file], start, length, checksum))
    return SavedTensor(dtype, tuple(_counts(record["shape"])), tuple(pieces))


def _counts(values: object) -> Iterator[int]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is no list of numbers")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no number of elements or bytes")
        yield value
