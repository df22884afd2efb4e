"""The global indices of the elements of flat buffers.

A buffer of parameters that are neighbours in the model needs one index, that of its first element. Two kinds need more. A vector that is
gathered from several places of a model is :class:`Scattered`. And in :class:`Blocks` parameters begin at multiples of a block, with gaps
before them:

    elements   |a a a a|a a . .|b b b b|b . . .|      . is a gap
    first       0       4       6       10            a has the indices 0 to 5, b those from 6 on
    count       4       2       4       1

Formats with one number for each block count blocks from a parameter's first element. With gaps each parameter begins with a block of its
own, and all of them are stepped as one buffer. A part of a matrix that ranks cut by columns is such a buffer, too: its rows are blocks,
without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import tree

P = TypeVar("P")


@tree.state
class Blocks:
    """The elements of a flat buffer with gaps, for the ``first_element`` of a :class:`~everybit.Context`.

    Attributes:
        first: Global index of the first element of each block: int64, 1-d.
        count: Number of elements of each block that belong to a parameter; those after them are a gap: int32, 1-d. None: there are no gaps.
        size: Number of elements of a block.
    """

    first: Tensor
    count: Tensor | None
    size: int

    def indices(self) -> Tensor:
        """Return the global indices of all elements, those of gaps as well: int64, 1-d."""
        return (self.first[:, None] + torch.arange(self.size, device=self.first.device)).reshape(-1)

    def cut(self, start: int, stop: int) -> Blocks:
        """Return those of the elements ``start`` to ``stop``, multiples of ``size``."""
        blocks = slice(start // self.size, stop // self.size)
        return Blocks(self.first[blocks], None if self.count is None else self.count[blocks], self.size)

    def filled(self, x: Tensor) -> Tensor:
        """Return a vector of the buffer's length with zeros in its gaps, whatever is there.

        A vector without elements has no gaps: a mask that leaves a buffer out makes its requests of such vectors.
        """
        if self.count is None or not x.numel():
            return x
        return torch.where(self.places(x) < self.spread(self.count), x, 0)

    def places(self, like: Tensor) -> Tensor:
        """Return the place of each element in its block: int32, 1-d."""
        number = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
        # Compilers have vector instructions for a bitwise and, and not for a remainder.
        last = self.size - 1
        return number % self.size if self.size & last else number & last

    def spread(self, numbers: Tensor) -> Tensor:
        """Return the number of its block for each element."""
        return numbers[:, None].expand(-1, self.size).reshape(-1)


@tree.state
class Scattered:
    """The elements of a vector that is gathered from several places of a model, for the ``first_element`` of a :class:`~everybit.Context`.

    They draw the random bits that they draw in any other layout. Words of 32 bits are vectorised, which int64 indices are not.

    Attributes:
        low: Lower word of the global index of each element: int32, 1-d.
        high: Upper word, which all of them share: int32, 0-d.
    """

    low: Tensor
    high: Tensor

    @staticmethod
    def of(firsts: Sequence[int | Blocks], lengths: Sequence[int], device: torch.device) -> Scattered:
        """Return the indices of the elements of several parameters, one after the other.

        Args:
            firsts: Global index of the first element of each, or the indices of all, on the host.
            lengths: Number of elements of each.
            device: Device of the vector.

        Raises:
            ValueError: The indices have different upper words.
        """
        parts, highs = [torch.empty(0, dtype=torch.int64)], set[int]()
        for first, n in zip(firsts, lengths, strict=True):
            if n:
                parts.append(first.indices() if isinstance(first, Blocks) else torch.arange(first, first + n))
                ends = [first, first + n - 1] if isinstance(first, int) else parts[-1][[0, -1]].tolist()
                highs.update(end >> 32 for end in ends)
        if len(highs) > 1:
            raise ValueError(
                f"firsts: got indices with the upper words {sorted(highs)}; accepted are elements that share one."
            )
        high = torch.tensor(min(highs, default=0), dtype=torch.int32, device=device)
        return Scattered(torch.cat(parts).to(torch.int32).to(device), high)

    def cut(self, start: int, stop: int) -> Scattered:
        """Return those of the elements ``start`` to ``stop``."""
        return Scattered(self.low[start:stop], self.high)


FirstElement = int | Tensor | Blocks | Scattered
"""Global index of a buffer's first element, which the others follow; or those of a buffer whose elements are no neighbours."""


def without_gaps(first: FirstElement, values: P) -> P:
    """Return a tree of one vector with zeros in its gaps, or any other tree as it is."""
    return tree.map(first.filled, values) if isinstance(first, Blocks) else values


def first_of_whole(first: FirstElement) -> int | Tensor:
    """Return the index of the first element of a whole tensor, which lies in no buffer with others."""
    assert not isinstance(first, (Blocks, Scattered))
    return first
