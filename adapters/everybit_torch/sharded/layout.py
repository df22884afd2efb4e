"""The place of every parameter in the flat buffers of a sharded model: pure data, the same on every rank without a collective.

A layout is made of names, shapes and dtypes alone, so it can be built from a model on the meta device. Parameters that are gathered and
reduced together (one unit's), with one dtype, one ``requires_grad`` and one label, form a *group*, and lie one after the other in its
buffer, element by element: tensors are cut wherever a rank's share ends, and the only padding is at a group's end, at most
``shards - 1`` elements. (Padding each tensor to whole rows instead, as row-sharding does, can multiply small odd shapes by thousands.)
Parameters whose optimizer must see whole tensors lie whole in one rank's share each, or are cut between parts that it must see whole
(heads, experts), which then form groups of their own. Shares of such a group are as long as what they have, and :mod:`.packing` says what
that is.
Where a policy stores one number for a block of elements, each parameter begins at a multiple of the block, and so does each rank's share:
then no share ends inside a block, whose elements are counted from their parameter's first.

What is cut anywhere can still be named as boxes: a range of the elements of an n-dimensional tensor is a union of at most ``2n - 1``
rectangles, which is what distributed checkpoints are made of (:func:`boxes`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from everybit_torch.sharded.packing import MOST, Loads, Piece, cut, pack
from everybit_torch.sharded.row_blocks import RowBlocks


class Box(NamedTuple):
    """A rectangle of a tensor's elements that are consecutive in memory.

    Attributes:
        offsets: Of its first corner, by dimension.
        sizes: By dimension.
        start: Position of its first element in the range that was asked for.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, as a layout describes it.

    Attributes:
        names: All of its names in the model; more than one if it is tied.
        shape: Of the whole tensor.
        dtype: Of the model's tensor.
        requires_grad: Whether it is trained.
        unit: Number of the unit that it is gathered and reduced with.
        label: Parameters of different labels have optimizers or policies of their own.
        index: Global index of its first element, counted through all parameters of its dtype in the model's order. Stochastic rounding
            draws bits by it, which is why they do not depend on units or on the number of ranks.
        block: The least number of elements at whose multiples, counted from the first, it may be cut, because its state has one number
            for so many.
        whole: Whether it lies in one rank's share as a whole, because its optimizer must see whole tensors.
        atoms: Of such a one, into how many equal parts it may be cut all the same.
        cost: What a step on it costs, next to others; 0: its number of elements.
        row_blocks: Of such a one, the parts of different sizes between which it may be cut; None: it may not be cut so.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    unit: int = 0
    label: str = ""
    index: int = 0
    block: int = 1
    whole: bool = False
    atoms: int = 1
    cost: float = 0.0
    row_blocks: RowBlocks | None = None

    def stepped_as(self, low: int, high: int) -> tuple[int, ...]:
        """The shape in which elements ``low`` to ``high`` are stepped: a whole tensor's, or that of a batch of its parts.

        Neighbouring row blocks have a dimension of 1 for each block before them.
        """
        if not self.whole:
            return (high - low,)
        if self.row_blocks:
            return (*(1,) * self.row_blocks.before(low), (high - low) // math.prod(self.shape[1:]), *self.shape[1:])
        if self.atoms == 1:
            return self.shape
        rows = self.shape[0] // self.atoms
        return ((high - low) * self.atoms // self.numel, rows, *self.shape[1:])

    @property
    def parts(self) -> int:
        """Into how many parts that stay whole it may be cut."""
        return self.atoms if self.row_blocks is None else len(self.row_blocks.sizes)

    def cost_of(self, low: int, high: int) -> float:
        """What a step on elements ``low`` to ``high`` costs, which are whole parts."""
        if self.row_blocks:
            return self.row_blocks.cost_of(low, high)
        return (self.cost or float(self.numel)) * (high - low) / self.numel

    def pieces(self, multiple: int) -> list[Piece]:
        """What may lie in shares of its own, one after the other, where a share's length is a multiple of so many elements."""
        if self.row_blocks:
            return self.row_blocks.pieces(multiple)
        together = multiple // math.gcd(multiple, max(self.numel, 1) // self.atoms)
        parts = self.atoms // together if self.numel and self.atoms % together == 0 else 1
        return [Piece(self.numel, self.cost or float(self.numel), parts)]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """A parameter's place in its group's buffer: elements ``start`` to ``stop``."""

    spec: ParameterSpec
    start: int
    stop: int


class Slice(NamedTuple):
    """The part of a parameter that lies in some range of its group's buffer.

    Attributes:
        placement: The parameter.
        low: First element of the parameter that is in the range.
        high: One past the last.
        offset: Where ``low`` is, counted from the range's start.
    """

    placement: Placement
    low: int
    high: int
    offset: int


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that share a buffer.

    Attributes:
        unit: Number of their unit.
        dtype: Of the model's tensors.
        requires_grad: Whether they are trained.
        label: Theirs.
        placements: In the order of the buffer, which is the model's, or with whole tensors the model's in each share.
        numel: Elements without padding.
        padded: Elements with padding, a multiple of the layout's ``shards`` and of the parameters' ``block``.
        lengths: Of the shares in order, where they differ; empty: all are equally long.
    """

    unit: int
    dtype: torch.dtype
    requires_grad: bool
    label: str
    placements: tuple[Placement, ...]
    numel: int
    padded: int
    lengths: tuple[int, ...] = ()

    def shard(self, rank: int, shards: int) -> tuple[int, int]:
        """The range of the buffer that belongs to ``rank`` of ``shards``."""
        if not self.lengths:
            size = self.padded // shards
            return rank * size, (rank + 1) * size
        several = len(self.lengths) // shards
        low = sum(self.lengths[: rank * several])
        return low, low + sum(self.lengths[rank * several : (rank + 1) * several])

    def sizes(self, shards: int) -> tuple[int, ...]:
        """The lengths of the parts of so many ranks, where they differ; else empty."""
        if not self.lengths:
            return ()
        several = len(self.lengths) // shards
        found = tuple(sum(self.lengths[n : n + several]) for n in range(0, len(self.lengths), several))
        return found if len(set(found)) > 1 else ()

    @property
    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ranges of the buffer that are no parameter's."""
        end = 0
        for placement in self.placements:
            if end < placement.start:
                yield end, placement.start
            end = placement.stop
        if end < self.padded:
            yield end, self.padded

    def slices(self, low: int, high: int) -> Iterator[Slice]:
        """The parts of parameters in a range of the buffer, in order; parameters without an element in it are left out."""
        for placement in self.placements:
            start, stop = max(placement.start, low), min(placement.stop, high)
            if start < stop:
                yield Slice(placement, start - placement.start, stop - placement.start, start - low)


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of a model, unit after unit.

    Attributes:
        shards: Into how many equal parts each group's buffer can be cut.
        units: Names of the units, in the order of the layout; the first is the model itself.
        groups: In the order of the units.
    """

    shards: int
    units: tuple[str, ...]
    groups: tuple[Group, ...]

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The specs of all parameters, in the order of the buffers."""
        return tuple(placement.spec for group in self.groups for placement in group.placements)

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(group.numel for group in self.groups)

    @property
    def padding(self) -> int:
        """Elements that are no parameter's."""
        return sum(group.padded - group.numel for group in self.groups)


def build(
    specs: Sequence[ParameterSpec],
    *,
    shards: int = 1,
    units: Sequence[str] = ("",),
    shares: int | None = None,
) -> Layout:
    """Lay out parameters.

    Args:
        specs: In the model's order; a tied parameter comes once, with all of its names.
        shards: Number of ranks that share the buffers.
        units: Names of the units that ``specs`` refer to.
        shares: Number of ranks that step parts of their own, by which ``shards`` can be divided: a whole tensor lies in one of so many
            parts. None: all of them.

    Raises:
        ValueError: ``shards`` below 1 or no multiple of ``shares``, a unit that there is not, or a name that comes twice.
    """
    if shards < 1:
        raise ValueError(f"shards: got {shards}; accepted is 1 or more.")
    if shares is not None and (shares < 1 or shards % shares):
        raise ValueError(f"shares: got {shares}; accepted is a number by which shards, {shards}, can be divided.")
    seen: set[str] = set()
    for spec in specs:
        if twice := seen.intersection(spec.names):
            raise ValueError(
                f"specs: {', '.join(sorted(twice))} named twice; accepted is each parameter once, with all of its names."
            )
        if not 0 <= spec.unit < len(units):
            raise ValueError(f"{spec.name}: in unit {spec.unit}; there are units 0 to {len(units) - 1}.")
        seen.update(spec.names)
    count = shards if shares is None else shares
    members: dict[_Key, list[ParameterSpec]] = {}
    for spec in specs:
        pieces = spec.pieces(shards // count * spec.block) if spec.whole and count > 1 else []
        apart = len(pieces) > 1 or any(piece.parts > 1 for piece in pieces)
        members.setdefault(_Key(spec.unit, spec.dtype, spec.requires_grad, spec.label, apart), []).append(spec)
    keys = sorted(members, key=lambda key: key.unit)
    shared = {
        key: _shared(members[key], shards // count, key.apart)
        for key in keys
        if any(spec.whole for spec in members[key])
    }
    loads = Loads.of(count, list(shared.values()), MOST)
    packed = [key for key in keys if key in shared and not key.apart]
    places = dict(zip(packed, pack([shared[key] for key in packed], loads), strict=True))
    groups = []
    for key in keys:
        own = members[key]
        numel, block = sum(spec.numel for spec in own), math.lcm(*(spec.block for spec in own))
        multiple = shards // count * block
        lengths: list[int] = []
        if key.apart:
            placements, lengths = _in_line(own, loads, shards // count, multiple)
        elif key in places:
            parts = [[own[number] for number in numbers] for numbers in places[key]]
            lengths = _evened([_up(_one_after_another(part, 0)[1], multiple) for part in parts])
            starts = itertools.accumulate(lengths, initial=0)
            placements = [
                place
                for start, part in zip(starts, parts, strict=False)
                for place in _one_after_another(part, start)[0]
            ]
        else:
            placements, end = _one_after_another(own, 0)
            lengths = [_up(end, shards * block) // count] * count
        differ = tuple(lengths) if len(set(lengths)) > 1 else ()
        groups.append(
            Group(key.unit, key.dtype, key.requires_grad, key.label, tuple(placements), numel, sum(lengths), differ)
        )
    return Layout(shards, tuple(units), tuple(groups))


class _Key(NamedTuple):
    unit: int
    dtype: torch.dtype
    requires_grad: bool
    label: str
    apart: bool  # cut between parts, which has a buffer of its own


def _shared(specs: Sequence[ParameterSpec], copies: int, are_cut: bool) -> list[Piece]:
    if are_cut:
        return [piece for spec in specs for piece in spec.pieces(copies * spec.block)]
    return [Piece(spec.numel, spec.cost or float(spec.numel)) for spec in specs]


def _evened(lengths: list[int]) -> list[int]:
    """The same, or if they are almost equal the largest for all: collectives of equal parts are faster."""
    longest, count = max(lengths), len(lengths)
    return [longest] * count if longest * count * 16 <= 17 * sum(lengths) else lengths


def _in_line(
    specs: Sequence[ParameterSpec], loads: Loads, copies: int, multiple: int
) -> tuple[list[Placement], list[int]]:
    """The places of parameters that lie one after the other and are cut into shares, and the lengths of these."""
    placements: list[Placement] = []
    pieces: list[Piece] = []
    starts: list[int] = []
    end = 0
    for spec in specs:
        end = _up(end, multiple)
        placements.append(Placement(spec, end, end + spec.numel))
        for piece in spec.pieces(copies * spec.block):
            starts.append(end)
            end += piece.elements
            pieces.append(piece)
    ends = []
    for cuts in cut(pieces, loads):
        if cuts:
            number, _, high = cuts[-1]
            ends.append(_up(starts[number] + pieces[number].elements * high // pieces[number].parts, multiple))
        else:
            ends.append(ends[-1] if ends else 0)
    return placements, [high - low for low, high in zip([0, *ends], ends, strict=False)]


def _one_after_another(specs: Sequence[ParameterSpec], start: int) -> tuple[list[Placement], int]:
    """The places of parameters from an element of a buffer on, each at a multiple of its block; and the element after the last."""
    end, placements = start, []
    for spec in specs:
        begin = _up(end, spec.block)
        end = begin + spec.numel
        placements.append(Placement(spec, begin, end))
    return placements, end


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Elements ``low`` to ``high`` of a tensor, counted in memory order, as rectangles: at most ``2 * len(shape) - 1``, none if empty.

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
