"""Boxes: rectangles of a tensor's elements, in which checkpoints are written and read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a tensor's elements that are consecutive in memory.

    Attributes:
        offsets: The first corner, by dimension.
        sizes: The extent, by dimension.
        start: Position of its first element in the requested range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Elements ``low`` to ``high`` of a tensor, counted in memory order, as rectangles: at most ``2 * len(shape) - 1``.

    Raises:
        ValueError: The range is not within the tensor.
    """
    if not 0 <= low <= high <= math.prod(shape):
        raise ValueError(
            f"range {low} to {high}: accepted is a range within the {math.prod(shape)} elements of {tuple(shape)}."
        )
    return list(_boxes(tuple(shape), low, high, 0)) if low < high else []


def _boxes(shape: tuple[int, ...], low: int, high: int, start: int) -> Iterator[Box]:
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if first == last and high - low < row:
        for box in _boxes(shape[1:], low - first * row, high - first * row, start):
            yield Box((first, *box.offsets), (1, *box.sizes), box.start)
        return
    whole_from, whole_to = -(-low // row), high // row
    if low < whole_from * row:
        yield from _boxes(shape, low, whole_from * row, start)
    if whole_from < whole_to:
        rest = shape[1:]
        yield Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest), start + whole_from * row - low)
    if whole_to * row < high:
        yield from _boxes(shape, whole_to * row, high, start + whole_to * row - low)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of a tensor have the same elements, counted in each of them; None if they have none in common."""
    here, there = [], []
    for low, size, other_low, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        start, stop = max(low, other_low), min(low + size, other_low + other_size)
        if start >= stop:
            return None
        here.append(slice(start - low, stop - low))
        there.append(slice(start - other_low, stop - other_low))
    return tuple(here), tuple(there)
