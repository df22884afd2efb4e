"""The interface of sources of values: a table of their tensors, and reading any range of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from everybit_torch.sharded.layout import Box, Part, boxes

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
        part: The part of the tensor through which the elements are counted, in a model with tensor parallelism; None: all of it.
    """

    names: tuple[str, ...]
    low: int
    high: int
    into: Tensor
    part: Part | None = None

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The elements as rectangles of the tensor, which has this shape."""
        if self.part is None:
            return boxes(shape, self.low, self.high)
        return self.part.boxes(self.low, self.high)

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The elements as ranges of the tensor's: for each the first, the one after the last, and the place of the first in ``into``."""
        if self.part is None:
            yield self.low, self.high, 0
            return
        for box in self.part.boxes(self.low, self.high):
            yield from _runs(box, shape)


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The ranges of a tensor's elements that a rectangle is made of, in order."""
    # Below this dimension the rectangle has all of every dimension.
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    length = math.prod(box.sizes[inner:])
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for number, place in enumerate(product(*(range(size) for size in box.sizes[:inner]))):
        low = first + sum(index * stride for index, stride in zip(place, strides, strict=False))
        yield low, low + length, box.start + number * length


def common(one: Box, offsets: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """The rectangle that is in two; None if there is none. It starts nowhere."""
    start, extent = [], []
    for a, n, b, m in zip(one.offsets, one.sizes, offsets, sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        start.append(low)
        extent.append(high - low)
    return Box(tuple(start), tuple(extent), 0)


def within(values: Tensor, corner: Sequence[int], box: Box) -> Tensor:
    """A rectangle of a tensor, of which ``values`` are the elements from ``corner`` on, as a view."""
    for dimension, (at, first, size) in enumerate(zip(box.offsets, corner, box.sizes, strict=True)):
        values = values.narrow(dimension, at - first, size)
    return values


class Source(Protocol):
    """Values by name."""

    @property
    def where(self) -> str:
        """Name of the source, as the beginning of a message."""
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
