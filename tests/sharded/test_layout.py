"""Layouts are pure data: every element has one place, padding is less than a rank's worth, and any range is a few boxes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everybit_torch.sharded.layout import Group, Layout, ParameterSpec, boxes, build

SHAPES = [(), (0,), (1,), (7,), (3, 5), (5, 1), (2, 3, 4), (3, 1, 5), (4, 3, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_cover_a_range_exactly_with_few_pieces(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    index = torch.arange(numel).view(shape)
    for low, high in itertools.combinations_with_replacement(range(numel + 1), 2):
        found = boxes(shape, low, high)
        assert len(found) <= max(2 * len(shape) - 1, 1)
        elements: list[int] = []
        for box in found:
            assert box.start == len(elements)  # one after the other, in the range's order
            part = index[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            elements += part.reshape(-1).tolist()
        assert elements == list(range(low, high))


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    for dimensions in range(1, 5):
        shape = (4,) * dimensions
        assert len(boxes(shape, 1, 4**dimensions - 1)) == 2 * dimensions - 1


def test_a_range_beyond_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"range 2 to 7: accepted is a range within the 6 elements of \(2, 3\)"):
        boxes((2, 3), 2, 7)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    count = draw(st.integers(1, 8))
    units = draw(st.integers(1, 3))
    specs = [
        ParameterSpec(
            (f"p{number}",),
            tuple(draw(st.lists(st.integers(0, 4), max_size=3))),
            draw(st.sampled_from([torch.float32, torch.bfloat16])),
            draw(st.booleans()),
            draw(st.integers(0, units - 1)),
            draw(st.sampled_from(["", "decay"])),
        )
        for number in range(count)
    ]
    return build(specs, shards=draw(st.integers(1, 9)), units=[f"u{number}" for number in range(units)])


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_every_element_lies_in_exactly_one_rank(layout: Layout) -> None:
    seen: dict[str, list[int]] = {spec.name: [] for spec in layout.specs}
    for group in layout.groups:
        assert group.padded - group.numel < layout.shards
        assert group.padded % layout.shards == 0
        ends = []
        for rank in range(layout.shards):
            low, high = group.shard(rank, layout.shards)
            ends += [low, high]
            for s in group.slices(low, high):
                assert 0 <= s.offset < high - low
                assert (s.placement.spec.dtype, s.placement.spec.label) == (group.dtype, group.label)
                seen[s.placement.spec.name] += range(s.low, s.high)
        assert (ends[0], ends[-1]) == (0, group.padded)
        assert all(a == b for a, b in zip(ends[1:-1:2], ends[2::2], strict=True))
    assert seen == {spec.name: list(range(spec.numel)) for spec in layout.specs}
    assert hash(layout) == hash(
        build(sorted(layout.specs, key=lambda s: s.name), shards=layout.shards, units=layout.units)
    )


@given(layouts(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_whole_tensors_lie_in_one_share_each(given: Layout, cuttable: bool) -> None:
    specs = [
        dataclasses.replace(spec, whole=spec.label == "decay", atoms=spec.shape[0] if cuttable and spec.numel and spec.shape else 1)
        for spec in given.specs
    ]  # fmt: skip
    layout = build(specs, shards=given.shards, units=given.units)
    seen: dict[str, list[int]] = {spec.name: [] for spec in specs}
    loads = [0] * layout.shards
    for group in layout.groups:
        ends = [group.shard(rank, layout.shards) for rank in range(layout.shards)]
        assert [low for low, _ in ends] == [0, *(high for _, high in ends[:-1])]
        assert ends[-1][1] == group.padded
        assert group.sizes(layout.shards) in ((), tuple(high - low for low, high in ends))
        for rank, (low, high) in enumerate(ends):
            for s in group.slices(low, high):
                spec = s.placement.spec
                seen[spec.name] += range(s.low, s.high)
                part = spec.numel // spec.atoms
                assert not spec.whole or (s.low % part, s.high % part) == (0, 0)
                loads[rank] += s.high - s.low if group.label == "decay" else 0
    assert seen == {spec.name: list(range(spec.numel)) for spec in specs}
    whole = [spec.numel for spec in specs if spec.whole]
    if whole and not cuttable:
        # Graham's bound: 4/3 of the best that there is, which is at least the mean and the largest tensor; over all groups together.
        least = max(-(-sum(whole) // layout.shards), *whole)
        assert 3 * max(loads) <= 4 * max(least, _second(whole, layout.shards))


def _second(numels: list[int], shards: int) -> int:
    """With more tensors than shares, one share holds two of the ``shards + 1`` largest: another bound of the best there is."""
    sizes = sorted(numels, reverse=True)
    return sizes[shards - 1] + sizes[shards] if len(sizes) > shards else 0


def _share_of(group: Group, shards: int) -> list[int]:
    """The shares that have something of a group."""
    return [rank for rank in range(shards) if any(group.slices(*group.shard(rank, shards)))]


def test_groups_with_fewer_tensors_than_ranks_lie_on_different_ranks_without_padding() -> None:
    specs = [ParameterSpec((f"p{n}",), (5,), torch.float32, unit=n, whole=True) for n in range(4)]
    layout = build(specs, shards=4, units=[f"u{n}" for n in range(4)])
    assert [_share_of(group, 4) for group in layout.groups] == [[0], [1], [2], [3]]
    assert layout.padding == 0


def test_whole_tensors_are_not_apart_where_ranks_step_the_same() -> None:
    specs = [ParameterSpec((f"p{n}",), (4, 4), torch.float32, whole=True) for n in range(5)]
    found = [build(specs, shards=4, shares=n).groups[0] for n in (1, 2, 4)]
    assert [group.lengths for group in found] == [(), (48, 32), (32, 16, 16, 16)]
    assert [group.padded for group in found] == [80, 80, 80]


def test_shares_of_almost_the_same_length_are_padded_to_the_same() -> None:
    specs = [ParameterSpec((f"p{n}",), (size,), torch.float32, whole=True) for n, size in enumerate((100, 96))]
    (group,) = build(specs, shards=2).groups
    assert (group.lengths, group.padded) == ((), 200)
    assert [(low, high) for low, high in group.gaps] == [(196, 200)] or group.placements[1].start == 100


def test_lengths_are_multiples_of_the_blocks_and_of_the_ranks_that_keep_copies() -> None:
    specs = [ParameterSpec((f"p{n}",), (n + 3,), torch.float32, whole=True, block=4) for n in range(5)]
    (group,) = build(specs, shards=6, shares=3).groups
    assert group.lengths
    assert all(length % 8 == 0 for length in group.lengths)
    assert all(place.start % 4 == 0 for place in group.placements)


def test_parts_that_do_not_fit_the_multiples_are_cut_together_or_not_at_all() -> None:
    def shares(atoms: int, block: int) -> list[int]:
        spec = ParameterSpec(("p",), (atoms, 3), torch.float32, whole=True, atoms=atoms, block=block)
        return _share_of(build([spec], shards=4).groups[0], 4)

    assert shares(8, 1) == [0, 1, 2, 3]
    assert shares(8, 4) == [0, 1]  # four parts of three elements at a time, two of them
    assert shares(6, 4) == [0]  # which do not divide six


def test_padding_is_small_where_whole_rows_would_multiply_memory() -> None:
    """100x97, 211x100 and 7x13x11: padding each to the least common multiple of its rows takes 292,678,100 elements on two ranks."""
    specs = [
        ParameterSpec((f"p{i}",), shape, torch.float32) for i, shape in enumerate([(100, 97), (211, 100), (7, 13, 11)])
    ]
    assert build(specs, shards=2).padding <= 1
    assert build(specs, shards=64).padding <= 63


def test_bad_layouts_are_refused_by_name() -> None:
    spec = ParameterSpec(("w",), (2,), torch.float32)
    with pytest.raises(ValueError, match="shards: got 0"):
        build([spec], shards=0)
    with pytest.raises(ValueError, match="shares: got 2; accepted is a number by which shards, 3, can be divided"):
        build([spec], shards=3, shares=2)
    with pytest.raises(ValueError, match="specs: w named twice"):
        build([spec, ParameterSpec(("v", "w"), (2,), torch.float32)])
    with pytest.raises(ValueError, match="w: in unit 1; there are units 0 to 0"):
        build([ParameterSpec(("w",), (2,), torch.float32, unit=1)])
