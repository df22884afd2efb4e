"""Whole tensors are distributed by what a step on them costs, over all buffers together, and no share gets too many elements."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from everybit_torch.sharded.packing import MOST, Cut, Loads, Piece, cut, pack

PIECES = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 9)).map(lambda pair: Piece(pair[0], float(pair[0] * pair[1]))), max_size=12
)  # fmt: skip


def square(side: int) -> Piece:
    return Piece(side * side, float(side**3))


@given(st.lists(PIECES, min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_every_tensor_is_on_one_share_in_order_and_the_loads_are_what_they_have(
    groups: list[list[Piece]], shares: int
) -> None:
    loads = Loads.of(shares, groups, MOST)
    found = pack(groups, loads)
    for pieces, by_share in zip(groups, found, strict=True):
        assert sorted(number for numbers in by_share for number in numbers) == list(range(len(pieces)))
        assert all(numbers == sorted(numbers) for numbers in by_share)
    for share in range(shares):
        mine = [pieces[number] for pieces, by_share in zip(groups, found, strict=True) for number in by_share[share]]
        assert loads.elements[share] == sum(piece.elements for piece in mine)
        assert math.isclose(loads.costs[share], sum(piece.cost for piece in mine), rel_tol=1e-12)
    # Where none has room, the one with the fewest elements takes one more.
    mean = sum(loads.elements) / shares
    largest = max((piece.elements for pieces in groups for piece in pieces), default=0)
    assert max(loads.elements) <= max(MOST * mean, mean + largest)


def test_units_are_balanced_together_and_not_each_for_itself() -> None:
    # Three large and four small matrices in each unit: for itself a unit would have shares of 1 and 0 large ones.
    unit = [square(30), square(30), square(30), *[square(4)] * 4]
    loads = Loads.of(8, [unit] * 8, MOST)
    pack([unit] * 8, loads)
    assert max(loads.costs) <= 1.01 * sum(loads.costs) / 8
    assert max(loads.elements) <= 1.05 * sum(loads.elements) / 8


def test_work_is_balanced_and_the_bound_on_elements_is_kept() -> None:
    # Eight square matrices whose step costs much, and flat ones whose step costs little next to their elements.
    pieces = [square(40)] * 8 + [Piece(1600, 6400.0)] * 24
    for most in (1.01, 1.25, 4.0):
        loads = Loads.of(6, [pieces], most)
        pack([pieces], loads)
        assert max(loads.elements) <= most * sum(loads.elements) / 6 + 1600
    free, tight = Loads.of(6, [pieces], 4.0), Loads.of(6, [pieces], 1.01)
    pack([pieces], free)
    pack([pieces], tight)
    assert max(free.costs) <= max(tight.costs)
    assert max(tight.elements) < max(free.elements)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_a_line_is_cut_between_parts_and_balanced_to_one_part(given: list[tuple[int, int, int]], shares: int) -> None:
    pieces = [Piece(size * parts, float(size * parts * weight), parts) for size, parts, weight in given]
    loads = Loads.of(shares, [pieces], math.inf)
    found = cut(pieces, loads)
    flat = [one for cuts in found for one in cuts]
    reached = dict.fromkeys(range(len(pieces)), 0)
    for one in flat:
        assert one.low == reached[one.number]
        assert one.low < one.high
        reached[one.number] = one.high
    assert reached == {number: piece.parts for number, piece in enumerate(pieces)}
    assert [one.number for one in flat] == sorted(one.number for one in flat)
    largest = max(piece.cost / piece.parts for piece in pieces)
    # Filled to half a part above the mean, rounded to whole parts.
    assert max(loads.costs) <= sum(piece.cost for piece in pieces) / shares + largest * (1 + 1e-9)


def test_a_line_fills_what_other_buffers_have_left_empty() -> None:
    loads = Loads([30.0, 0.0, 10.0, 0.0], [30, 0, 10, 0], math.inf)
    assert cut([Piece(80, 80.0, 80)], loads) == [[], [Cut(0, 0, 30)], [Cut(0, 30, 50)], [Cut(0, 50, 80)]]
    assert loads.elements == [30, 30, 30, 30]


def test_a_line_that_no_share_has_room_for_is_distributed_all_the_same() -> None:
    loads = Loads([0.0, 0.0], [10, 10], 12)
    found = cut([Piece(20, 20.0, 20)], loads)
    assert sum(one.high - one.low for cuts in found for one in cuts) == 20
    assert loads.elements == [20, 20]


def test_shares_that_are_parts_of_larger_ones_balance_these_too() -> None:
    # Ten tensors for four larger shares of four parts each: without looking at these, two would have four, and one none.
    pieces = [square(10)] * 10
    loads = Loads.of(16, [pieces], MOST)
    (found,) = pack([pieces], loads, within=4)
    assert max(map(len, found)) == 1
    assert sorted(sum(map(len, found[n : n + 4])) for n in range(0, 16, 4)) == [2, 2, 3, 3]
    assert sorted(number for share in found for number in share) == list(range(10))
    assert sum(loads.elements) == 1000
