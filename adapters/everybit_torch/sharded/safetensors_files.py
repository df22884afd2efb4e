"""The safetensors format, written in parts: which tensor lies where is decided before the first value is known.

A file is the length of its header (8 bytes, little-endian), the header (JSON: dtype, shape and place of each tensor), and the tensors. The
library, which writes what lies in memory as a whole, is not needed for it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from everybit_torch.sharded.host_bytes import bytes_of

INDEX = "model.safetensors.index.json"
"""The file that says in which of several files a tensor is."""

SINGLE = "model.safetensors"
"""The file of a model that fits into one."""

NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

CHUNK = 1 << 22
"""The number of elements that are converted, or copied to the host, at a time."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The format's names of dtypes."""

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: As it is stored.
        shape: Of the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Header:
    """The head of one file, and the places of its tensors.

    Args:
        tensors: In any order.
        metadata: Strings to keep.
    """

    def __init__(self, tensors: Sequence[Stored], metadata: Mapping[str, str]) -> None:
        # The widest first: every tensor begins at a multiple of its element's size.
        ordered = sorted(tensors, key=lambda one: (-one.dtype.itemsize, one.name))
        entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._start: dict[str, int] = {}
        end = 0
        for one in ordered:
            self._start[one.name], begin = end, end
            end += one.nbytes
            entries[one.name] = {"dtype": DTYPES[one.dtype], "shape": list(one.shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.nbytes = len(self._head) + end

    def begin(self, file: BinaryIO) -> None:
        """Write the head, and take the room for everything."""
        file.write(self._head)
        file.truncate(self.nbytes)

    def write(self, file: BinaryIO, one: Stored, value: Tensor) -> None:
        """Write one tensor at its place, a chunk at a time."""
        file.seek(len(self._head) + self._start[one.name])
        flat = value.detach().reshape(-1)
        for low in range(0, flat.numel(), CHUNK):
            part = flat[low : low + CHUNK].to(device="cpu", dtype=one.dtype)
            file.write(bytes_of(part.contiguous()))


def split(tensors: Sequence[Stored], most: int) -> list[list[Stored]]:
    """The tensors of each file, in order: as many as fit, and one that is larger alone."""
    files: list[list[Stored]] = [[]]
    size = 0
    for one in tensors:
        if files[-1] and size + one.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.nbytes
    return files


def parse_size(given: int | str) -> int:
    """A number of bytes: 5_000_000_000, "5GB" (of 10⁹) or "5GiB" (of 2³⁰).

    Raises:
        ValueError: It is none.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([kKmMgGtT]?[iI]?[bB]?)\s*", given) if isinstance(given, str) else None
    unit = match[2].upper() if match else None
    if unit == "B":
        unit = ""
    if match and unit in _UNITS:
        given = int(match[1]) * _UNITS[unit]
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(
            f"max_shard_size: got {given!r}; accepted is a number of bytes above zero, or one with a unit, such as '5GB'."
        )
    return given


def index(files: Mapping[str, Sequence[Stored]], metadata: Mapping[str, str]) -> str:
    """The text of the index of several files."""
    stored = [one for tensors in files.values() for one in tensors]
    found = {
        "metadata": {
            "total_size": sum(one.nbytes for one in stored),
            "total_parameters": sum(math.prod(one.shape) for one in stored),
            **metadata,
        },
        "weight_map": {one.name: file for file, tensors in files.items() for one in tensors},
    }
    return json.dumps(found, indent=2) + "\n"
