"""Numbers to hold formats to: every 16-bit pattern, float32 by its bits, and the grid of all values that a narrow format has."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch
from hypothesis import strategies as st
from torch import Tensor

from everybit import Key
from everybit.base import DTYPES, FirstElement, LowDType

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)

# Where something changes: zeros, the ends of the subnormals and normals of three formats, ties, overflow, infinities, NaN of both kinds.
BORDER_BITS = (
    0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x00008001, 0x0000FFFF, 0x00010000, 0x00018000, 0x007F8000, 0x007FFFFF, 0x00800000,
    0x33000000, 0x33000001, 0x33800000, 0x33BFFFFF, 0x33C00000, 0x387FDFFF, 0x387FE000, 0x387FFFFF, 0x38800000, 0x38801000, 0x38800FFF,
    0x3F7F8000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F801000, 0x3F803000, 0x3FFFFFFF,
    0x477FDFFF, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x47800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001,
    0x7F80FFFF, 0x7F810000, 0x7FC00000, 0x7FFFFFFF,
)  # fmt: skip


def from_bits(bits: Sequence[int] | Tensor) -> Tensor:
    """float32 with these bit patterns, given as numbers below 2**32."""
    whole = bits.long() if isinstance(bits, Tensor) else torch.tensor(bits, dtype=torch.int64)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32).view(torch.float32)


def borders() -> Tensor:
    """float32 at every border, of both signs."""
    return from_bits([*BORDER_BITS, *(bits + 2**31 for bits in BORDER_BITS)])


def spread(count: int, *, seed: int = 0) -> Tensor:
    """``count`` float32 numbers, all bit patterns equally likely: every exponent, both signs, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def every(dtype: LowDType) -> Tensor:
    """All 2**16 values of ``dtype``."""
    return EVERY_PATTERN.view(DTYPES[dtype])


@cache
def grid(dtype: LowDType) -> Tensor:
    """The values of ``dtype`` from -infinity to infinity, one zero, ascending; float64, which holds them exactly."""
    values = every(dtype).double()
    return torch.tensor(sorted(set(values[~values.isnan()].tolist())), dtype=torch.float64)


def neighbours(x: Tensor, dtype: LowDType) -> tuple[Tensor, Tensor]:
    """For each number the greatest value of ``dtype`` that is not above it, and the least that is not below; float64.

    NaN has none: it gets any two.
    """
    values, exact = grid(dtype), torch.where(x.isnan(), 0.0, x.double())
    return values[torch.searchsorted(values, exact, right=True) - 1], values[torch.searchsorted(values, exact)]


def exponent_of(x: Tensor, smallest: int) -> Tensor:
    """``2**floor(log2(|x|))`` in float64, and no less than ``2**smallest``, zero included: the unit that errors are measured in."""
    magnitude = x.double().abs().clamp(min=2.0**smallest)
    mantissa, _ = torch.frexp(magnitude)  # in [1/2, 1)
    return magnitude / (2 * mantissa)


def assert_same_numbers(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, signs of zeros included; one NaN is as good as another."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    assert_same_bits(torch.where(actual.isnan(), torch.nan, actual), torch.where(expected.isnan(), torch.nan, expected))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit."""
    assert actual.dtype is expected.dtype
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    torch.testing.assert_close(actual.view(integers), expected.view(integers), rtol=0, atol=0)


def key(*, seed: int = 0, step: int = 1, stream: int = 1, first: FirstElement = 0) -> Key:
    """Names some random bits; always the same ones."""
    return Key(seed, torch.tensor(step), stream, first)


# Drawn as bits, so that NaN of every payload, subnormals and both zeros come up; and as values, which hypothesis shrinks well.
float32s = st.lists(
    st.one_of(
        st.integers(0, 2**32 - 1),
        st.floats(width=32).map(lambda number: int.from_bytes(struct.pack(">f", number), "big")),
        st.sampled_from(BORDER_BITS),
    ),
    min_size=1,
    max_size=40,
).map(from_bits)
"""A hypothesis strategy: a handful of float32 numbers of any kind."""
