"""Flat buffers in which parameters begin at multiples of a block, with gaps before them.

    elements   |a a a a|a a . .|b b b b|b . . .|      . is a gap
    first       0       4       6       10            a has the indices 0 to 5, b those from 6 on
    count       4       2       4       1

Formats with one number for each block count blocks from a parameter's first element. With gaps each parameter begins with a block of its
own, and all of them are stepped as one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import tree

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class Blocks:
    """The elements of a flat buffer with gaps, for the ``first_element`` of a :class:`~everybit.Context`.

    Attributes:
        first: Global index of the first element of each block: int64, 1-d.
        count: Number of elements of each block that belong to a parameter; those after them are a gap: int32, 1-d.
        size: Number of elements of a block.
    """

    first: Tensor
    count: Tensor
    size: int

    def cut(self, start: int, stop: int) -> Blocks:
        """Return those of the elements ``start`` to ``stop``, multiples of ``size``."""
        blocks = slice(start // self.size, stop // self.size)
        return Blocks(self.first[blocks], self.count[blocks], self.size)

    def filled(self, x: Tensor) -> Tensor:
        """Return a vector of the buffer's length with zeros in its gaps, whatever is there."""
        return torch.where(self.places(x) < self.spread(self.count), x, 0)

    def places(self, like: Tensor) -> Tensor:
        """For each element its place in its block: int32, 1-d."""
        number = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
        # Compilers have vector instructions for the one, and not for the other.
        return number & (self.size - 1) if self.size.bit_count() == 1 else number % self.size

    def spread(self, numbers: Tensor) -> Tensor:
        """For each element the number of its block."""
        return numbers[:, None].expand(-1, self.size).reshape(-1)


FirstElement = int | Tensor | Blocks
"""Global index of a buffer's first element, which the others follow; or those of a buffer with gaps."""


def without_gaps(first: FirstElement, values: P) -> P:
    """Return a tree of one vector with zeros in its gaps; any tree as it is, if there are none."""
    return tree.map(first.filled, values) if isinstance(first, Blocks) else values


def first_of_whole(first: FirstElement) -> int | Tensor:
    """Return the index of the first element of a whole tensor, which is never in a buffer with gaps."""
    assert not isinstance(first, Blocks)
    return first
