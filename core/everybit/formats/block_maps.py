"""Maps of block formats: which numbers in [-1, 1] a code of 8 or 4 bits stands for.

A map is a rising sequence of *levels*. Maps by formula have levels from 0 to 1, and the code of a negative number is that of its
magnitude, with a sign. Maps by table list their levels, negative levels too. The expanded map has roots of the floating-point map's levels,
and each block the power that they are roots of. Every map is used in one way: a number lies between two
neighbouring levels, and is rounded to the nearer level, or at random to either. So each map is two functions, the level of an index
and an index near a number, of which the first decides: eager and compiled code agree on the bits however the second is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from everybit.formats.expansion import POWERS, root
from everybit.formats.protocol import SLOT_KINDS, SlotKind

MapName = Literal["dynamic", "linear", "root", "power", "float", "expanded"]
MAP_NAMES: tuple[MapName, ...] = get_args(MapName)

Bits = Literal[8, 4]


class _Float(NamedTuple):
    """A floating-point number of few bits.

    Attributes:
        levels: Numbers that are not negative.
        fraction: Bits of the fraction.
        offset: The number to add to such a number's bits for the upper bits of the same float32.
        quantum: Distance of the least numbers, of which there are ``2**fraction``.
        greatest: The greatest number.
    """

    levels: int
    fraction: int
    offset: int
    quantum: float
    greatest: float


# In the place of a sign a number that is not negative has one more bit of the exponent.
_FLOATS: Mapping[tuple[Bits, SlotKind], _Float] = MappingProxyType(
    {
        (8, "signed"): _Float(127, 3, 120 << 3, 2.0**-9, 448.0),  # e4m3
        (8, "non-negative"): _Float(256, 3, 112 << 3, 2.0**-17, 122880.0),  # e5m3
        (4, "signed"): _Float(8, 0, 120, 2.0**-6, 1.0),  # e3m0
        (4, "non-negative"): _Float(16, 0, 112, 2.0**-14, 1.0),  # e4m0
    }
)


_FLOATING = ("float", "expanded")

# Levels of "power" are fourth powers, and eighth powers where numbers are not negative: steps divide by the root of a second moment.
# Neighbouring levels are 3 % apart near a block's greatest number, and 10 % at a hundredth of it (a ten-thousandth of a square). In 4 bits
# there are too few levels for that range.
_SQUARINGS: Mapping[tuple[Bits, SlotKind], int] = MappingProxyType(
    {(8, "signed"): 2, (8, "non-negative"): 3, (4, "signed"): 1, (4, "non-negative"): 2}
)


def is_table(name: MapName) -> bool:
    """Whether the map lists its levels, negative levels included."""
    return name == "dynamic"


def is_expanded(name: MapName) -> bool:
    """Whether each block has a power, of which its levels are roots."""
    return name == "expanded"


def has_zero(name: MapName, bits: Bits, kind: SlotKind) -> bool:
    """Whether zero is a level: of all maps except the 4-bit map with equal distances for non-negative numbers."""
    return not (name == "linear" and bits == 4 and kind == "non-negative")


def greatest_index(name: MapName, bits: Bits, kind: SlotKind) -> int:
    """The index of the last level, which is 1."""
    if name in _FLOATING:
        return _FLOATS[bits, kind].levels - 1
    whole = (1 << bits) - 1
    return whole if kind == "non-negative" or is_table(name) else whole >> 1


def level(name: MapName, bits: Bits, kind: SlotKind, index: Tensor) -> Tensor:
    """The number in [-1, 1] that an index stands for.

    Args:
        name: The map's name.
        bits: The bits of a code.
        kind: The kind of the numbers.
        index: Integers from 0 to :func:`greatest_index`; int32.

    Returns:
        float32, of the same shape.
    """
    if is_table(name):
        return look_up(beside(table(bits, kind), index), index)
    # Products with reciprocals, rounded to float32: a GPU divides by a number so, and a CPU does not.
    top = greatest_index(name, bits, kind)
    if name in _FLOATING:
        _, fraction, offset, quantum, greatest = _FLOATS[bits, kind]
        normal = ((index + offset) << (23 - fraction)).view(torch.float32)
        return torch.where(index < 1 << fraction, index.float() * quantum, normal) * (1.0 / greatest)
    number = index.float()
    if name == "root":
        return number * number * (1.0 / (top * top))
    if name == "power":
        number = number * (1.0 / top)
        for _ in range(_SQUARINGS[bits, kind]):
            number = number * number
        return number
    return number * (1.0 / top) if has_zero(name, bits, kind) else (number + 1.0) * (1.0 / (top + 1.0))


def index_near(name: MapName, bits: Bits, kind: SlotKind, x: Tensor) -> Tensor:
    """The index of the last level that is not above a number, or the index after it.

    Args:
        name: The map's name.
        bits: The bits of a code.
        kind: The kind of the numbers.
        x: float32 numbers in [0, 1], or in [-1, 1] for maps by table.

    Returns:
        int32, of the same shape; it may be out of range by one.
    """
    if is_table(name):
        return _search(table(bits, kind), x)
    # More than the errors of the operations below, and less than the distance of two levels: no index is too low or too high by two.
    x = x * (1.0 + 2.0**-20)
    top = greatest_index(name, bits, kind)
    if name in _FLOATING:
        _, fraction, offset, quantum, greatest = _FLOATS[bits, kind]
        wide = x * greatest
        normal = (wide.view(torch.int32) >> (23 - fraction)) - offset
        return torch.where(wide < 2.0**fraction * quantum, (wide / quantum).to(torch.int32), normal)
    if name == "root":
        return (x.sqrt() * float(top)).to(torch.int32)
    if name == "power":
        for _ in range(_SQUARINGS[bits, kind]):
            x = x.sqrt()
        return (x * float(top)).to(torch.int32)
    return (x * top).to(torch.int32) if has_zero(name, bits, kind) else (x * (top + 1.0)).to(torch.int32) - 1


def _search(levels: tuple[float, ...], x: Tensor) -> Tensor:
    """The index of the last level that is not above ``x``, at least 0, by halving."""
    known = beside(levels, x)
    found = torch.zeros_like(x, dtype=torch.int32)
    step = len(levels) >> 1
    while step:
        tried = found + step
        found = torch.where(look_up(known, tried) <= x, tried, found)
        step >>= 1
    return found


def beside(levels: tuple[float, ...], like: Tensor) -> Tensor:
    """Levels as a float32 vector on the device of a tensor.

    An accelerator keeps them: a copy from the host at every step would wait, and a CUDA graph cannot capture it.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor or like.device.type in ("cpu", "meta"):
        return like.new_tensor(levels, dtype=torch.float32)
    return _kept(levels, like.device)


@cache
def _kept(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def look_up(known: Tensor, index: Tensor) -> Tensor:
    """The numbers of a vector at indices, in their shape."""
    if torch.compiler.is_compiling():
        return known[index.long()]
    return known.index_select(0, index.reshape(-1)).view(index.shape)  # several times as fast as indexing


def levels(name: MapName, bits: Bits, kind: SlotKind) -> tuple[float, ...]:
    """The levels of all indices, rising; of an expanded map those of every power, one power after the other."""
    return _LEVELS[name, bits, kind]


def least_scale(name: MapName, bits: Bits) -> float:
    """A power of two, by which the least level above zero of non-negative numbers is 2**-126 at least."""
    return _LEAST_SCALES[name, bits]


def _all_levels(name: MapName, bits: Bits, kind: SlotKind) -> tuple[float, ...]:
    found = level(name, bits, kind, torch.arange(greatest_index(name, bits, kind) + 1, dtype=torch.int32, device="cpu"))
    powers = POWERS if is_expanded(name) else 1
    return tuple(torch.cat([root(found, power) for power in range(powers)]).tolist())


def table(bits: Bits, kind: SlotKind) -> tuple[float, ...]:
    """The levels of the dynamic map, rising."""
    return _TABLES[bits, kind]


def _decades(bits: Bits, kind: SlotKind) -> tuple[float, ...]:
    """Return the levels of the dynamic map: decades, each with twice as many levels as the decade below it.

    The greatest is 1. There is no -1: the most negative level of the signed map lies below it by half a distance.

    Reference:
        Dettmers et al. 2021, https://arxiv.org/abs/2110.02861, section 2.1 (dynamic tree quantization); the levels are those of
        bitsandbytes' ``create_dynamic_map`` with 7 decades for 8 bits and 3 for 4 bits, and of torchao's maps, bit for bit.
    """
    decades, signed = (7 if bits == 8 else 3), kind == "signed"
    levels = [0.0, 1.0]
    for decade in range(decades):
        intervals = 1 << (decade if signed else decade + 1) << (bits - 1 - decades)
        edges = torch.linspace(0.1, 1, intervals + 1, dtype=torch.float32, device="cpu")
        means = 10.0 ** (decade - decades + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += means.tolist()
        levels += (-means).tolist() if signed else []
    assert len(levels) == 1 << bits, (bits, kind, len(levels))
    return tuple(sorted(levels))


# Made when the module is loaded: a compiler traces a look into a dict, and not this.
_TABLES: Mapping[tuple[Bits, SlotKind], tuple[float, ...]] = MappingProxyType(
    {(bits, kind): _decades(bits, kind) for bits in get_args(Bits) for kind in SLOT_KINDS}
)

_LEVELS: Mapping[tuple[MapName, Bits, SlotKind], tuple[float, ...]] = MappingProxyType(
    {
        (name, bits, kind): _all_levels(name, bits, kind)
        for name in MAP_NAMES
        for bits in get_args(Bits)
        for kind in SLOT_KINDS
    }
)

_LEAST_SCALES: Mapping[tuple[MapName, Bits], float] = MappingProxyType(
    {
        (name, bits): math.ldexp(1.0, -125 - math.frexp(min(number for number in found if number > 0))[1])
        for (name, bits, kind), found in _LEVELS.items()
        if kind == "non-negative"
    }
)
