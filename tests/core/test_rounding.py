"""Rounding is held to torch's own casts, to the grid of all values that a format has, and to the compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everybit.base import DTYPES, LOW_DTYPES, LowDType, sqrt
from everybit.base.rounding import DROPPED_BITS, floor_stochastic, half_ulp, narrow, nearest, stochastic, widen
from tests.support.float_patterns import (
    EVERY_PATTERN,
    assert_same_bits,
    assert_same_numbers,
    borders,
    every,
    float32s,
    from_bits,
    grid,
    key,
    neighbours,
    spread,
)

# Consecutive values of a format are 2**16 (bfloat16) or, among float16's normals, 2**13 float32 patterns apart. On a value, just above
# it, just below the tie, on the tie, just above the tie, just below the next value:
OFFSETS: dict[LowDType, tuple[int, ...]] = {
    "bfloat16": (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF),
    "float16": (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF),
}


def around(dtype: LowDType) -> Tensor:
    """float32 around every value of ``dtype``: by patterns, and around the middle between it and the next."""
    values = every(dtype).float()
    by_pattern = [(values.view(torch.int32) | offset).view(torch.float32) for offset in OFFSETS[dtype]]
    finite = grid(dtype)[1:-1].float()
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()  # 9 or 12 bits: float32 holds it exactly
    infinity = torch.full_like(middle, torch.inf)
    return torch.cat([*by_pattern, middle, middle.nextafter(infinity), middle.nextafter(-infinity), borders()])


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_nearest_is_torchs_cast_around_every_value(dtype: LowDType) -> None:
    x = around(dtype)
    cast = x.to(DTYPES[dtype])
    assert_same_numbers(nearest(x, dtype), cast.float())
    assert_same_numbers(narrow(nearest(x, dtype), dtype), cast)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@given(x=float32s)
def test_nearest_is_torchs_cast_of_any_number(dtype: LowDType, x: Tensor) -> None:
    assert_same_numbers(nearest(x, dtype), x.to(DTYPES[dtype]).float())


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_nearest_picks_the_nearer_neighbour_of_the_whole_grid(dtype: LowDType) -> None:
    x = torch.cat([around(dtype), spread(2**16)])
    # Infinity is judged by IEEE 754 as if it were the next power of two.
    x = x[x.abs() < float(grid(dtype)[-2])]
    below, above = neighbours(x, dtype)
    rounded = nearest(x, dtype).double()
    assert ((rounded == below) | (rounded == above)).all()
    assert ((rounded - x.double()).abs() <= torch.minimum(x.double() - below, above - x.double())).all()


@pytest.mark.parametrize(
    ("number", "rounded"),
    [
        (65519.99609375, 65504.0),  # the last float32 before the tie between 65504 and 65536
        (65520.0, math.inf),  # the tie goes to the even significand, which is 65536's, which float16 does not have
        (-65520.0, -math.inf),
        (2.0**-25, 0.0),  # tie between zero and the smallest subnormal: to even
        (1.5 * 2.0**-24, 2.0**-23),  # tie between the first two subnormals: to even
        (2.0**-14 - 2.0**-25, 2.0**-14),  # tie between the last subnormal and the first normal
        (-(2.0**-26), -0.0),
    ],
)
def test_float16_rounds_its_borders_as_ieee_says(number: float, rounded: float) -> None:
    assert_same_numbers(nearest(torch.tensor([number]), "float16"), torch.tensor([rounded]))


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@pytest.mark.parametrize("bits", [0, -1, 0x1234567, -(2**31), 2**31 - 1])
def test_stochastic_never_moves_a_value_that_the_format_has(dtype: LowDType, bits: int) -> None:
    values = every(dtype).float()
    drawn = torch.full_like(values, bits, dtype=torch.int32)
    assert_same_numbers(stochastic(values, dtype, drawn), values)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@given(x=float32s, seed=st.integers(0, 2**16))
def test_stochastic_lands_on_one_of_the_two_neighbours(dtype: LowDType, x: Tensor, seed: int) -> None:
    rounded = stochastic(x, dtype, key(seed=seed).bits(x))
    below, above = neighbours(x, dtype)
    nan = x.isnan()
    assert rounded.isnan().equal(nan)
    assert ((rounded.double() == below) | (rounded.double() == above) | nan).all()
    # What rounds to zero keeps its sign.
    assert (rounded.signbit() == x.signbit())[~nan].all()


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_stochastic_is_exactly_right_on_average_over_all_dithers(dtype: LowDType) -> None:
    """Each of the 2**n patterns of the n bits it looks at once: for normals the mean is the number itself, nothing to estimate."""
    dithers = torch.arange(2 ** DROPPED_BITS[dtype], dtype=torch.int32)
    numbers = [1.0 + 2.0**-23, -1.7320508, 3.14159265, 2.0 - 2.0**-23, 0.1, -60000.1, 6.2e-5, 1.0 + 2.0**-8]
    for x in torch.tensor(numbers):
        rounded = stochastic(x.expand_as(dithers), dtype, dithers)
        # At most 2**16 terms of 11 bits within one binade or its border: the float64 sum is exact, and so is the division by 2**n.
        assert rounded.double().mean() == x.double()


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("bfloat16", 1.0039), ("bfloat16", -7.3e12), ("bfloat16", 1.1e-38), ("bfloat16", -5e-41), ("bfloat16", 3.2e-42),
        ("float16", 1.0003), ("float16", -301.07), ("float16", 6.09e-5), ("float16", 5.1e-5), ("float16", -1.3e-7), ("float16", 2e-8),
    ],
)  # fmt: skip
def test_stochastic_goes_up_as_often_as_it_should(dtype: LowDType, number: float) -> None:
    """The number of ups among n draws is binomial: within 5 sqrt(n f (1 - f)) of n f, but for one case in 1.7 million."""
    x = torch.full((2**16,), number)
    below, above = (float(side[0]) for side in neighbours(x[:1], dtype))
    fraction = (float(x[0]) - below) / (above - below)
    ups = int((stochastic(x, dtype, key().bits(x)).double() == above).sum())
    assert abs(ups - len(x) * fraction) <= 5 * math.sqrt(len(x) * fraction * (1 - fraction))


def test_a_stochastic_floor_compares_the_fraction_with_24_bits() -> None:
    """Up if the fraction is above a multiple of 2**-24: for fractions with at most 24 bits the probability is the fraction, exactly."""
    x = torch.tensor([0.25, 0.75, 5.5, 1023.0, 0.0, 2.0**-24])
    draws = torch.tensor([0, 1, 2**22 - 1, 2**22, 2**23 - 1, 2**23, 3 * 2**22 - 1, 3 * 2**22, 2**24 - 1])
    bits = (draws << 8).to(torch.int32)
    ups = torch.stack([floor_stochastic(x, drawn.expand_as(x)) - x.floor() for drawn in bits])
    expected = torch.stack([(x - x.floor()) * 2**24 > drawn for drawn in draws]).float()
    assert_same_bits(ups, expected)


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_widen_and_narrow_are_exact_on_every_pattern(dtype: LowDType) -> None:
    stored = every(dtype)
    wide = widen(stored)
    assert_same_numbers(wide, stored.float())
    number = ~stored.isnan()
    assert_same_bits(narrow(wide, dtype)[number], stored[number])
    assert narrow(wide, dtype)[~number].isnan().all()


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_nan_stays_nan_whatever_its_payload(dtype: LowDType) -> None:
    """A NaN whose payload is all in the bits that are dropped must not become infinity."""
    x = from_bits([0x7F800001, 0xFF800001, 0x7F80FFFF, 0x7F801000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
    assert narrow(nearest(x, dtype), dtype).isnan().all()
    for bits in (0, -1):
        assert narrow(stochastic(x, dtype, torch.full((7,), bits, dtype=torch.int32)), dtype).isnan().all()


def test_wide_dtypes_are_stored_as_they_are() -> None:
    x = spread(1000)
    assert narrow(x, "float32") is x
    assert widen(x) is x
    assert widen(x.double()).dtype is torch.float64


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_half_ulp_is_half_the_distance_to_the_next_value_away_from_zero(dtype: LowDType) -> None:
    magnitudes = [Fraction(float(value)) for value in grid(dtype)[:-1] if value >= 0]
    # The last one's next would be a power of two, as far away as the value before.
    distances = [after - value for value, after in pairwise(magnitudes)]
    distances.append(distances[-1])
    for sign in (1, -1):
        reaches = half_ulp(torch.tensor([sign * float(value) for value in magnitudes]), dtype).tolist()
        assert [Fraction(reach) for reach in reaches] == [distance / 2 for distance in distances]
    assert half_ulp(torch.tensor([math.inf, -math.inf]), dtype).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("dtype", LOW_DTYPES)
@given(x=float32s)
def test_half_ulp_bounds_what_nearest_leaves_over(dtype: LowDType, x: Tensor) -> None:
    value = nearest(x, dtype)
    left = (x - value).abs()
    assert (left <= half_ulp(value, dtype))[value.isfinite()].all()


def everything(x: Tensor, bits: Tensor, stored: list[Tensor]) -> list[Tensor]:
    """All functions of the module on all that they take."""
    found = []
    for dtype in LOW_DTYPES:
        near, up_or_down = nearest(x, dtype), stochastic(x, dtype, bits)
        found += [near, up_or_down, narrow(near, dtype), narrow(up_or_down, dtype), half_ulp(near, dtype), x - near]
    return [*found, *(widen(part) for part in stored), floor_stochastic(x.clamp(-1e6, 1e6), bits)]


@pytest.mark.exhaustive  # tests/core/test_formats.py and the battery hold it for what formats do with them
def test_compiled_code_gives_the_same_bits() -> None:
    """257, 1 and 0-d: in vectors, in the scalar tail behind them, and without a loop."""
    torch._dynamo.reset()
    x = torch.cat([borders(), spread(128), torch.rand(257)])[:257]
    patterns = EVERY_PATTERN[::255][:257]
    cases = []
    for take in (slice(None), slice(256, 257), 3, 97):
        part = x[take].clone()
        stored = [patterns[take].clone().view(DTYPES[dtype]) for dtype in LOW_DTYPES]
        cases.append((part, key().bits(part), stored))

    def run(cases: list[tuple[Tensor, Tensor, list[Tensor]]]) -> list[list[Tensor]]:
        return [everything(*case) for case in cases]

    for eager, compiled in zip(run(cases), torch.compile(run, fullgraph=True)(cases), strict=True):
        for expected, actual in zip(eager, compiled, strict=True):
            assert_same_numbers(actual, expected)
    torch._dynamo.reset()


def test_a_square_root_is_the_nearest_to_the_exact_one() -> None:
    """A float64 has more than twice the digits of a float32, so that rounding its root once more changes nothing (Figueroa 1995)."""
    x = spread(1 << 18).abs()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert_same_numbers(sqrt(x), x.double().sqrt().float())


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_root_of_one_number_is_the_nearest_in_float64(compile: bool) -> None:
    """As Python's, which takes the processor's. Eager torch may take a library's, which is wrong for a percent of these numbers."""
    numbers = [0.0, math.inf, math.nan, -1.0, 5e-324, *(spread(1 << 9).abs().double() * math.pi).tolist()]
    expected = [math.nan if x < 0 else math.sqrt(x) for x in numbers]
    root: Callable[[Tensor], Tensor] = torch.compile(lambda x: sqrt(x) + 0) if compile else sqrt
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            found = [float(root(torch.tensor(x, dtype=torch.float64))) for x in numbers]
        assert [*map(float.hex, found)] == [*map(float.hex, expected)]
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sqrt, [x], check_forward_ad=True)
