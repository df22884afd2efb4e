"""Where parameters lie in flat buffers: every element once, in one share of its own kind."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everybit_torch.flat.places import Buffer, Spec, lay_out, pack

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = [torch.float32, torch.bfloat16]


def specs_of(shapes: list[tuple[int, ...]], block: int, is_whole: bool) -> list[Spec]:
    first, specs = 0, []
    for number, shape in enumerate(shapes):
        unit, dtype = str(number % 3 or ""), DTYPES[number % 2]
        specs.append(Spec(str(number), shape, dtype, unit, f"label {dtype}", first, block, is_whole))
        first += specs[-1].numel
    return specs


def laid_out(shapes: list[tuple[int, ...]], shares: int, copies: int, block: int, is_whole: bool) -> tuple[Buffer, ...]:
    return lay_out(specs_of(shapes, block, is_whole), shares, copies)


@settings(max_examples=200, deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 3), st.sampled_from([1, 4]), st.booleans())
def test_every_element_lies_in_one_share(
    shapes: list[tuple[int, ...]], shares: int, copies: int, block: int, is_whole: bool
) -> None:
    found: Counter[tuple[str, int]] = Counter()
    for buffer in laid_out(shapes, shares, copies, block, is_whole):
        assert len(buffer.lengths) == shares
        assert all(length % copies == 0 and length % block == 0 for length in buffer.lengths)
        assert len({(p.spec.unit, p.spec.dtype, p.spec.label) for p in buffer.places}) == 1
        ends = [0, *(place.stop for place in buffer.places)]
        assert all(
            place.start >= end for place, end in zip(buffer.places, ends, strict=False)
        )  # in order, none on another
        assert all(place.start % block == 0 for place in buffer.places)
        for rank in range(shares):
            for place in (place.within(buffer.share(rank)) for place in buffer.places):
                assert not is_whole or place.numel in (0, place.spec.numel)
                assert not place.numel or place.offset % block == 0
                found.update((place.spec.name, place.first - place.spec.first + n) for n in range(place.numel))
    numels = {spec.name: spec.numel for spec in specs_of(shapes, block, is_whole)}
    assert found == Counter((name, n) for name, numel in numels.items() for n in range(numel))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 5))
def test_no_owner_was_given_a_tensor_while_another_had_less(costs: list[int], shares: int) -> None:
    """By which the costliest share has at most 4/3 of what it must have (Graham 1969)."""
    specs = [Spec(str(n), (cost,), torch.float32, "", "", 0, is_whole=True) for n, cost in enumerate(costs)]
    owners = pack(specs, shares)
    owned = [[spec.numel for spec in specs if owners[spec.name] == share] for share in range(shares)]
    for one in filter(None, owned):
        last = min(one)  # as the costliest come first
        assert all(sum(one) - last <= sum(other) for other in owned)
