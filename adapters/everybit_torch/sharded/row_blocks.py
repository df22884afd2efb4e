"""Parts of a parameter, of different numbers of rows, that its optimizer must see whole: queries, keys and values in one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from everybit_torch.sharded.packing import Piece


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """The blocks of a parameter's rows, one after the other.

    Attributes:
        sizes: The elements of each.
        costs: What a step on each costs, next to others.
    """

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each."""
        return tuple(itertools.accumulate(self.sizes[:-1], initial=0))

    def before(self, element: int) -> int:
        """How many begin before an element."""
        return sum(start < element for start in self.starts)

    def cost_of(self, low: int, high: int) -> float:
        """What a step on elements ``low`` to ``high`` costs, which are whole blocks."""
        return sum(cost for start, cost in zip(self.starts, self.costs, strict=True) if low <= start < high)

    def pieces(self, multiple: int) -> list[Piece]:
        """What may lie in shares of its own: blocks, joined where a share's length, a multiple of so many elements, cannot end."""
        ends = [end for end in itertools.accumulate(self.sizes) if end % multiple == 0]
        total = sum(self.sizes)
        ends += [total] if total % multiple else []
        return [Piece(high - low, self.cost_of(low, high)) for low, high in itertools.pairwise([0, *ends])]
