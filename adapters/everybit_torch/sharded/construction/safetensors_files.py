"""Files in the safetensors format, read a range of elements at a time.

The format is a length, a table in JSON, and the tensors' bytes in row-major order (https://github.com/huggingface/safetensors#format), so
that a range of a tensor's elements is a range of bytes. The library maps a whole file into memory instead, as memory that the process may
write to: it counts against limits on the process's data, and a slice keeps all of it mapped.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from everybit_torch.checkpoint_file import with_message
from everybit_torch.sharded import safetensors_files
from everybit_torch.sharded.construction.reading import Entry, Request, chunks, require_same

INDEX = ".safetensors.index.json"
LARGEST_TABLE = 100_000_000
"""Bytes of a file's table; the format allows no more."""

DTYPES = {name: dtype for dtype, name in safetensors_files.DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    start: int  # of its bytes in the file
    entry: Entry


class SafetensorsFiles:
    """The tensors of a file, or of the files of an index.

    Args:
        path: A file, an index, or a folder with one of the two.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It cannot be read.
        ValueError: It is none, or damaged; the message names the file and the tensor.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        found = _find(Path(path))
        self.where = str(found)
        self._places: dict[str, _Place] = {}
        if found.name.endswith(INDEX):
            files = _read_index(found)
            for file in sorted(set(files.values())):
                self._add(found.parent / file)
            for name, file in files.items():
                if name not in self._places or self._places[name].file.name != file:
                    raise ValueError(f"{found}: says that {name!r} is in {file}, and it is not there.")
        else:
            self._add(found)

    def _add(self, file: Path) -> None:
        for name, place in _read_table(file).items():
            if name in self._places:
                raise ValueError(f"{self.where}: {name!r} is in {self._places[name].file.name} and in {file.name}.")
            self._places[name] = place

    @property
    def table(self) -> Mapping[str, Entry]:
        """All tensors, by name."""
        return {name: place.entry for name, place in self._places.items()}

    def deliver(self, requests: Sequence[Request]) -> None:
        """Read what is asked for."""
        for request in requests:
            if request.low < request.high:
                self._read(request)

    def _read(self, request: Request) -> None:
        names = [name for name in request.names if name in self._places]
        first = self._places[names[0]]
        for start, stop, place in request.runs(first.entry.shape):
            for low, high in chunks(start, stop, first.entry.dtype.itemsize):
                part = _elements(first, low, high)
                for name in names[1:]:
                    require_same(part, _elements(self._places[name], low, high), (names[0], name), self.where)
                request.into[place + low - start : place + high - start].copy_(part)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: does not exist; accepted is a .safetensors file, an index ({INDEX}), or a folder with one."
        )
    for ending in (INDEX, ".safetensors"):
        found = sorted(one for one in path.iterdir() if one.name.endswith(ending) and one.is_file())
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{path}: has {len(found)} files that end in {ending}: {', '.join(one.name for one in found[:5])}; accepted is a folder"
                " with one, or the path of the file itself."
            )
    raise FileNotFoundError(f"{path}: has no .safetensors file and no index of any ({INDEX}).")


def _read_index(path: Path) -> dict[str, str]:
    files = _json(path, path.read_bytes()).get("weight_map")
    if not isinstance(files, dict) or not all(
        isinstance(file, str) and PurePath(file).name == file and file not in ("", ".", "..") for file in files.values()
    ):
        raise ValueError(f"{path}: is no index of safetensors files: its 'weight_map' has to name files beside it.")
    return files


def _read_table(path: Path) -> dict[str, _Place]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_TABLE):
                raise ValueError(f"{path}: is no safetensors file, or was cut off.")
            table = _json(path, file.read(length))
    except OSError as error:
        raise _unreadable(path, error) from error
    table.pop("__metadata__", None)
    return {name: _place(path, name, record, 8 + length, size) for name, record in table.items()}


def _place(path: Path, name: str, record: Any, start: int, size: int) -> _Place:
    described = None
    with suppress(KeyError, TypeError, ValueError):
        dtype, shape = DTYPES[record["dtype"]], tuple(record["shape"])
        low, high = record["data_offsets"]
        counts = all(type(number) is int and number >= 0 for number in (*shape, low, high))
        if counts and high - low == math.prod(shape) * dtype.itemsize:
            described = low, high, Entry(dtype, shape)
    if described is None:
        shown = json.dumps(record)[:200]
        raise ValueError(f"{path}: {name!r} is described by {shown}, which is no tensor of a safetensors file.")
    low, high, entry = described
    if start + high > size:
        raise ValueError(f"{path}: was cut off: {name!r} ends at byte {start + high}, and the file has {size}.")
    return _Place(path, start + low, entry)


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no safetensors file or index, or bits have changed ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is no safetensors file or index: its table is a {type(found).__name__}.")
    return found


def _elements(place: _Place, low: int, high: int) -> Tensor:
    size = place.entry.dtype.itemsize
    data = bytearray((high - low) * size)
    try:
        with open(place.file, "rb", buffering=0) as file:
            file.seek(place.start + low * size)
            assert isinstance(file, io.RawIOBase)
            _fill(file, memoryview(data))
    except OSError as error:
        raise _unreadable(place.file, error) from error
    except EOFError:
        raise ValueError(f"{place.file}: was cut off while it was read.") from None
    return torch.frombuffer(data, dtype=place.entry.dtype)


def _fill(file: io.RawIOBase, into: memoryview) -> None:
    while into:
        count = file.readinto(into)
        if not count:
            raise EOFError
        into = into[count:]


def _unreadable(path: Path, error: OSError) -> OSError:
    why = os.strerror(error.errno) if error.errno is not None else str(error)
    return with_message(error, f"{path}: cannot be read: {why}.")
