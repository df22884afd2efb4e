"""What a source of values offers a stepper: a table of its tensors, and any range of their elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Bytes that are read, or sent, at a time."""


class Entry(NamedTuple):
    """A tensor of a source."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Request(NamedTuple):
    """A range of a tensor's elements that this rank needs.

    Attributes:
        names: Under which the source may have the tensor; if it has several of them, their values have to be the same.
        low: The first element.
        high: The element after the last; ``low`` if this rank needs none of the tensor.
        into: Where they are to be: 1-d, of any dtype that holds their values.
    """

    names: tuple[str, ...]
    low: int
    high: int
    into: Tensor


class Source(Protocol):
    """Values by name."""

    @property
    def where(self) -> str:
        """What it is, as the beginning of a message."""
        ...

    @property
    def table(self) -> Mapping[str, Entry]:
        """All tensors, by the model's names."""
        ...

    def deliver(self, requests: Sequence[Request]) -> None:
        """Write what is asked for. Every rank calls it for the same tensors in the same order, with the ranges that it needs.

        Raises:
            OSError: A file cannot be read.
            ValueError: Names of one tensor have different values, or what is read is damaged.
        """
        ...


def chunks(low: int, high: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut a range of elements into parts of at most :data:`CHUNK` bytes."""
    step = max(CHUNK // itemsize, 1)
    for start in range(low, high, step):
        yield start, min(start + step, high)


def require_same(one: Tensor, other: Tensor, names: Sequence[str], where: str) -> None:
    """Refuse values that differ between two names of one tensor.

    Raises:
        ValueError: They do.
    """
    if one.dtype is not other.dtype or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        raise ValueError(
            f"{where}: {names[0]} and {names[1]} are one tensor in the model, and their values differ here."
        )
