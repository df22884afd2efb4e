"""The places of parameters in flat buffers, and the ranks' shares of these: pure data, the same on every rank without a collective.

A buffer has the parameters of one unit, dtype and label, one after the other. Where a transform may be cut anywhere, all shares have one
length, and a share's edge may lie inside a parameter::

    parameters  | a a a a a a a b b b | b b c c c c . . . . |
    shares      | rank 0              | rank 1              |

If a format stores one number for a block of elements, each parameter begins at a multiple of a block, and so does each share. Where a
transform must see whole tensors, each tensor lies in the share of one rank, and shares are as long as their tensors::

    parameters  | b b b b b | a a a a a a a c c c c . |
    shares      | rank 0    | rank 1                  |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_BufferKind = tuple[str, torch.dtype, str]
"""What the parameters of a buffer have in common: the unit, the dtype and the label."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter that is trained.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        dtype: Its dtype.
        unit: The unit. Its gradients are sent together.
        label: The label of its transform and policy.
        first: Global index of its first element in the model, from which random bits are drawn.
        block: Elements for which a format stores one number; 1: each has its own.
        is_whole: Whether its transform must see the whole tensor.
        cost: The relative cost of a step on it; for tensors that stay whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    label: str
    first: int
    block: int = 1
    is_whole: bool = False
    cost: float = 0.0

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Elements of a parameter in some memory.

    Attributes:
        spec: The parameter.
        start: Position of the first of the elements in the memory.
        stop: Position after the last.
        offset: Position of the first of them in the parameter.
    """

    spec: Spec
    start: int
    stop: int
    offset: int = 0

    @property
    def numel(self) -> int:
        """How many elements there are."""
        return self.stop - self.start

    @property
    def first(self) -> int:
        """Global index of the first of them in the model."""
        return self.spec.first + self.offset

    def within(self, part: slice) -> Place:
        """Return the places in a part of the memory, with positions in that part; maybe an empty list."""
        start = max(self.start, part.start)
        stop = max(min(self.stop, part.stop), start)
        offset = min(self.offset + start - self.start, self.offset + self.numel)
        return Place(self.spec, start - part.start, stop - part.start, offset)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The parameters of one unit, dtype and label.

    Attributes:
        places: The parameters, in the order of the memory.
        lengths: The number of elements of each share, padding included.
    """

    places: tuple[Place, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of all shares."""
        return sum(self.lengths)

    @property
    def uneven(self) -> tuple[int, ...]:
        """The lengths of the shares, if they differ; else an empty tuple."""
        return self.lengths if len(set(self.lengths)) > 1 else ()

    def gaps(self, filled: Iterable[int]) -> list[slice]:
        """Return what lies between the parameters of these numbers, and after them."""
        edges = [(place.start, place.stop) for place in (self.places[number] for number in sorted(filled))]
        ends = [0, *(stop for _, stop in edges)]
        return [slice(a, b) for a, b in zip(ends, [*(start for start, _ in edges), self.numel], strict=True) if a < b]

    def share(self, rank: int) -> slice:
        """Return the elements of a rank's share."""
        start = sum(self.lengths[:rank])
        return slice(start, start + self.lengths[rank])

    def __str__(self) -> str:
        first = self.places[0].spec
        unit = f"unit {first.unit!r}" if first.unit else "the model's own unit"
        return f"{unit}, label {first.label!r}" if first.label else unit


def lay_out(specs: Sequence[Spec], shares: int, multiple: int) -> tuple[Buffer, ...]:
    """Lay parameters out in buffers, unit after unit, the model's own unit first.

    Args:
        specs: The parameters, in the model's order.
        shares: The number of ranks that share buffers out.
        multiple: A divisor of the length of each share: ranks that hold copies of one cut it for a sum.
    """
    members: dict[_BufferKind, list[Spec]] = {}
    for spec in sorted(specs, key=lambda spec: spec.unit != ""):
        members.setdefault((spec.unit, spec.dtype, spec.label), []).append(spec)
    owners = pack([spec for spec in specs if spec.is_whole], shares)
    return tuple(_buffer(own, owners, shares, multiple) for own in members.values())


def _buffer(specs: Sequence[Spec], owners: dict[str, int], shares: int, multiple: int) -> Buffer:
    block = specs[0].block
    unit = math.lcm(block, multiple)
    if not specs[0].is_whole:
        places, end = _one_after_another(specs, 0, block)
        return Buffer(tuple(places), (-(-end // (shares * unit)) * unit,) * shares)
    packed: list[Place] = []
    lengths: list[int] = []
    for rank in range(shares):
        start = sum(lengths)
        places, end = _one_after_another([spec for spec in specs if owners[spec.name] == rank], start, block)
        packed += places
        lengths.append(-(-(end - start) // unit) * unit)
    return Buffer(tuple(packed), tuple(lengths))


def _one_after_another(specs: Sequence[Spec], start: int, block: int) -> tuple[list[Place], int]:
    places: list[Place] = []
    end = start
    for spec in specs:
        begin = start + -(-(end - start) // block) * block
        end = begin + spec.numel
        places.append(Place(spec, begin, end))
    return places, end


def pack(specs: Sequence[Spec], shares: int) -> dict[str, int]:
    """Return the owner of each tensor: the costliest first, each to the share with the least cost so far (Graham 1969).

    Args:
        specs: Tensors that stay whole.
        shares: The number of owners.
    """
    loads: list[Any] = [0.0] * shares
    owners: dict[str, int] = {}
    for spec in sorted(specs, key=lambda spec: -(spec.cost or spec.numel)):
        owner = owners[spec.name] = loads.index(min(loads))
        loads[owner] += spec.cost or spec.numel
    return owners
