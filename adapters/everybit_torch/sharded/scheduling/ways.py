"""Records a rank's way through the units, and which units its backward pass may still reach.

Reductions and gatherings have one order, the layout's, whatever way a rank takes (decision 0017). What a way decides is *when* a rank can
take its turn: a reduction of gradients that will not come any more need not wait for the end of the pass, and a reduction may be waited for
inside the pass only if no rank can be waiting for this one then.

Autograd runs what was recorded last first. So when a backward pass has come to one use of a unit, all later uses are over or will never
come.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

UseKey = tuple[int, int]


class _Use(NamedTuple):
    unit: int
    differentiable: bool  # whether its outputs require gradients
    block: int  # uses with the same number, but 0, are run again together by a checkpoint
    recorded: bool  # not so in a reentrant checkpoint, which runs the unit again for its backward pass


class Nesting:
    """Return which units lie in which, by their names; the model's own, the first, is in none and contains none.

    Args:
        names: Of the units, in the layout's order: a unit comes before those that lie in it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._inside: list[list[int]] = [[] for _ in names]  # for each unit those that it lies in, the outermost first
        open_units: list[int] = []
        for number, name in enumerate(names):
            if number == 0:
                continue
            while open_units and not name.startswith(f"{names[open_units[-1]]}."):
                open_units.pop()
            self._inside[number] = list(open_units)
            open_units.append(number)
        last = list(range(len(names)))
        for number, outer in enumerate(self._inside):
            for one in outer:
                last[one] = number
        # The order in which forward passes end if units run in the order of the layout: those inside before what they lie in.
        ends = sorted(range(1, len(names)), key=lambda number: (last[number], -number))
        self._ends = {number: position for position, number in enumerate([*ends, 0])}

    def is_inside(self, number: int, outer: int) -> bool:
        """Whether a unit is another, or lies in it."""
        return number == outer or outer in self._inside[number]

    def outermost(self, number: int) -> int:
        """The unit that a unit lies in and that lies in none; the unit itself if it does not."""
        return self._inside[number][0] if self._inside[number] else number

    def ends_after(self, number: int, other: int) -> bool:
        """Whether, in the layout's order, a unit's forward pass ends after another's."""
        return self._ends[number] > self._ends[other]


class Ways:
    """The uses of units in the forward passes of a microbatch, and how far the backward pass has come back through them.

    Args:
        nesting: Of the units.

    Attributes:
        current: The unit that the backward pass came to last; None before the first.
    """

    def __init__(self, nesting: Nesting) -> None:
        self._nesting = nesting
        self._uses: list[_Use] = []
        self._left: list[int] = []  # the numbers of the uses that may still come, in order
        self._left_of: Counter[int] = Counter()  # how many of them each unit has
        self._lowest: dict[int, int] = {}
        self._forward_uses = self._cycle = 0
        self._over = False
        self.current: int | None = None

    # -- forward ------------------------------------------------------------------------------------------------------------------

    def ran(self, unit: int, *, differentiable: bool, checkpoint: int = 0, recorded: bool = True) -> UseKey:
        """A unit's forward pass has ended, in the checkpoint of this number; 0 for none. Returns what names this use."""
        if self._over:
            self.forget()
        self._uses.append(_Use(unit, differentiable, checkpoint, recorded))
        self._left.append(len(self._uses) - 1)
        self._left_of[unit] += 1
        return self._cycle, len(self._uses) - 1

    @property
    def have_reentrant_checkpoint(self) -> bool:
        """Whether units ran in a reentrant checkpoint: their gradients are accumulated by a pass that is no part of the graph."""
        return any(use.block and not use.recorded for use in self._uses)

    @property
    def in_the_layouts_order(self) -> bool:
        """Whether units ran once each, in the layout's order, and none with another in one checkpoint; some may have been left out."""
        pairs = list(pairwise(self._uses))
        return all(self._nesting.ends_after(b.unit, a.unit) and (not b.block or a.block != b.block) for a, b in pairs)

    @property
    def digest(self) -> int:
        """The same number for the same uses in the same order, in the same checkpoints."""
        blocks = {block: number for number, block in enumerate(dict.fromkeys(use.block for use in self._uses))}
        text = ",".join(f"{use.unit}{'+' if use.differentiable else '-'}{blocks[use.block]}" for use in self._uses)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    # -- backward -----------------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward pass begins: it may come to every use, also to one that another pass came to before."""
        self._keep(range(len(self._uses)))
        self._forward_uses = len(self._uses)
        self.current = None
        # From each use on, the lowest unit that the backward pass may want the weights of while it has not left that use.
        together: dict[int, int] = {}
        for use in self._uses:
            if use.block and use.unit:
                together[use.block] = min(use.unit, together.get(use.block, use.unit))
        self._lowest, lowest = {}, None
        for use in reversed(self._uses):
            if use.unit:
                wanted = together.get(use.block, use.unit)
                self._lowest[use.unit] = lowest = wanted if lowest is None else min(lowest, wanted)

    def came_to(self, unit: int, key: UseKey) -> None:
        """The pass has come to what a use of a unit returned."""
        self.current = unit
        cycle, use = key
        if cycle != self._cycle:
            return  # of a graph from before what is recorded
        while self._left and self._left[-1] >= use:
            self._left_of[self._uses[self._left.pop()].unit] -= 1

    def may_run_again(self, unit: int) -> bool:
        """Whether a unit that runs inside the backward pass runs for its own backward pass, as in a reentrant checkpoint."""
        uses = [use for use in self._uses[: self._forward_uses] if use.unit == unit]
        return not uses or not all(use.recorded for use in uses)

    def runs_again(self, unit: int) -> None:
        """A checkpoint runs a unit again, whose forward pass recorded nothing: the pass has come to that use."""
        self.current = unit
        before = [n for n in self._left if self._uses[n].unit == unit and not self._uses[n].recorded]
        if before:
            use = before[-1]
            block = self._uses[use].block
            # What the checkpoint covers runs again one by one; all else that is later is over, or will never come.
            self._keep([
                n for n in self._left if n < use or n >= self._forward_uses or (n != use and self._uses[n].block == block)
            ])  # fmt: skip

    def _keep(self, uses: Sequence[int]) -> None:
        self._left = list(uses)
        self._left_of = Counter(self._uses[n].unit for n in self._left)

    def lowest_beside(self, unit: int) -> int:
        """The lowest unit that a rank which went this way may want before it has left ``unit``."""
        return min(self._lowest.get(unit, unit), self._nesting.outermost(unit))

    def may_come(self, unit: int) -> bool:
        """Whether the backward pass may still come to a unit."""
        return self._left_of[unit] > 0

    def is_over(self, unit: int) -> bool:
        """Whether the backward pass has left a unit for good, or will never come to it."""
        active = self.current is not None and self._nesting.is_inside(self.current, unit)
        return unit > 0 and not active and not self.may_come(unit)

    def end_backward(self) -> None:
        """The pass is over; what is recorded next belongs to another."""
        self.current, self._over = None, True

    def forget(self) -> None:
        """Forget the units that ran, for the next cycle."""
        self._uses, self._over, self._forward_uses = [], False, 0
        self._cycle += 1
        self._keep(())
        self.current = None
