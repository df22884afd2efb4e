"""Distributes what has to stay whole over shares: evenly by the work of a step, with a bound on the elements of a share.

All buffers are considered together: what one share has more of one unit it has less of the others, so that shares of one unit may differ
much in length, and all their lengths together differ little. Pure arithmetic on sizes; the result is the same on every rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST = 1.25
"""The most elements of a share, in shares of equal length."""

HALVINGS = 6
"""How often the level is halved up to which shares are filled."""


class Piece(NamedTuple):
    """A tensor that is to be distributed.

    Attributes:
        elements: Of the tensor.
        cost: Of a step on it.
        parts: Into how many equal parts it may be cut; 1: it stays whole.
    """

    elements: int
    cost: float
    parts: int = 1


class Cut(NamedTuple):
    """Parts ``low`` to ``high`` of the tensor ``number``."""

    number: int
    low: int
    high: int


@dataclass(slots=True)
class Loads:
    """What the shares have so far: the cost of a step, and elements; and the most elements that one may have."""

    costs: list[float]
    elements: list[int]
    most: float

    @classmethod
    def of(cls, shares: int, groups: Sequence[Sequence[Piece]], most: float) -> Loads:
        """Nothing yet; a share may have ``most`` times what it had of these tensors if all had equally many, or the largest one."""
        pieces = [piece for group in groups for piece in group]
        mean = sum(piece.elements for piece in pieces) / shares
        largest = max((-(-piece.elements // piece.parts) for piece in pieces), default=0)
        return cls([0.0] * shares, [0] * shares, max(most * mean, largest))

    def add(self, share: int, piece: Piece, parts: int) -> None:
        """A share has got so many parts of a tensor."""
        self.costs[share] += piece.cost * parts / piece.parts
        self.elements[share] += piece.elements * parts // piece.parts


def pack(groups: Sequence[Sequence[Piece]], loads: Loads, within: int = 1) -> list[list[list[int]]]:
    """Distribute whole tensors: the one that costs most first, each to the share with the least to do (Graham 1969).

    Args:
        groups: Tensors by buffer.
        loads: Of the shares; the tensors are added.
        within: So many shares, one after the other, are parts of one larger share. Tensors are distributed over these first.

    Returns:
        For each group and share the numbers of its tensors, in order.
    """
    if within == 1:
        return _pack(groups, loads)
    shares = len(loads.costs)
    outer = Loads([0.0] * (shares // within), [0] * (shares // within), loads.most * within)
    found: list[list[list[int]]] = [[] for _ in groups]
    for number, numbers in enumerate(zip(*_pack(groups, outer), strict=True)):
        here = slice(number * within, (number + 1) * within)
        own = Loads(loads.costs[here], loads.elements[here], loads.most)
        parts = [[group[n] for n in mine] for group, mine in zip(groups, numbers, strict=True)]
        for of_group, mine, by_share in zip(found, numbers, _pack(parts, own), strict=True):
            of_group += [[mine[n] for n in share] for share in by_share]
        loads.costs[here], loads.elements[here] = own.costs, own.elements
    return found


def _pack(groups: Sequence[Sequence[Piece]], loads: Loads) -> list[list[list[int]]]:
    found: list[list[list[int]]] = [[[] for _ in loads.costs] for _ in groups]
    waiting = [(loads.costs[share], loads.elements[share], share) for share in range(len(loads.costs))]
    heapq.heapify(waiting)
    order = [(-piece.cost, -piece.elements, g, n) for g, group in enumerate(groups) for n, piece in enumerate(group)]
    for *_, group, number in sorted(order):
        piece = groups[group][number]
        full = []
        while waiting and waiting[0][1] + piece.elements > loads.most:
            full.append(heapq.heappop(waiting))
        if not waiting:
            # None has room for it: the one that has the fewest elements.
            full.sort(key=lambda one: (one[1], one[0], one[2]))
            heapq.heappush(waiting, full.pop(0))
        *_, share = heapq.heappop(waiting)
        loads.add(share, piece, piece.parts)
        found[group][share].append(number)
        for one in (*full, (loads.costs[share], loads.elements[share], share)):
            heapq.heappush(waiting, one)
    for shares in found:
        for numbers in shares:
            numbers.sort()
    return found


def cut(pieces: Sequence[Piece], loads: Loads) -> list[list[Cut]]:
    """Cut tensors that lie one after the other between their parts, so that all shares have about the same to do afterwards.

    Args:
        pieces: In the order of the buffer.
        loads: Of the shares; the parts are added.

    Returns:
        For each share what it has, in the order of the buffer.
    """
    low = _water_level(loads.costs, math.fsum(piece.cost for piece in pieces))
    # Rounded to whole parts, half of the largest more is enough; with a bound on the elements it may not be.
    most, step = loads.most, max((piece.cost / piece.parts for piece in pieces), default=0.0) / 2
    high = low + step
    while _filled(pieces, loads, high, most)[1]:
        step *= 2
        high += step
        if high > 4 * low:
            most = math.inf
    for _ in range(HALVINGS):
        level = (low + high) / 2
        low, high = (level, high) if _filled(pieces, loads, level, most)[1] else (low, level)
    found, _ = _filled(pieces, loads, high, most)
    for share, cuts in enumerate(found):
        for one in cuts:
            loads.add(share, pieces[one.number], one.high - one.low)
    return found


def _water_level(costs: Sequence[float], total: float) -> float:
    """How much all shares that now have less have, once ``total`` is distributed over them."""
    ordered = sorted(costs)
    below, count = 0.0, 0
    for count, cost in enumerate(ordered, start=1):
        below += cost
        if count == len(ordered) or (below + total) / count <= ordered[count]:
            break
    return (below + total) / len(ordered[:count])


def _filled(pieces: Sequence[Piece], loads: Loads, level: float, most: float) -> tuple[list[list[Cut]], float]:
    """Fill share after share up to a level; and the cost of what is left."""
    found: list[list[Cut]] = []
    number, at = 0, 0
    for share in range(len(loads.costs)):
        cuts: list[Cut] = []
        room, free = level - loads.costs[share], most - loads.elements[share]
        while number < len(pieces):
            piece = pieces[number]
            cost, elements = piece.cost / piece.parts, piece.elements // piece.parts
            # Up to the nearest boundary between two parts.
            taken = piece.parts - at
            if cost:
                taken = min(taken, max(int(room / cost + 0.5), 0))
            if elements and math.isfinite(free):
                taken = min(taken, max(int(free // elements), 0))
            if taken:
                cuts.append(Cut(number, at, at + taken))
            at, room, free = at + taken, room - taken * cost, free - taken * elements
            if at < piece.parts:
                break
            number, at = number + 1, 0
        found.append(cuts)
    left = sum(piece.cost for piece in pieces[number:])
    return found, left - (pieces[number].cost * at / pieces[number].parts if number < len(pieces) else 0.0)
