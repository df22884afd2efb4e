"""A value of 16 bits and the low bits that it left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from everybit.base import (
    DTYPES,
    LOW_DTYPES,
    ComputeDType,
    FloatDType,
    Key,
    LowDType,
    require_member,
    rounding,
    settle_dtype,
    straight_through,
)
from everybit.formats.protocol import (
    HALF_UNITS,
    SPLITS_FLOAT32,
    ParamFormat,
    Parts,
    PartSpec,
    Rounding,
    SlotKind,
    StateFormat,
    low,
    unnamed,
)


@dataclass(frozen=True, slots=True)
class Split(StateFormat, ParamFormat):
    """A 16-bit value and the low bits that it left out, as an integer.

    The float32 bits are rounded to the value's (nearest, ties away from zero); the remainder is the signed difference of the two bit
    patterns. ``Split(16)`` keeps float32 exactly, in 4 bytes, where the value is bfloat16, or float16 in its normal range; rounding
    ties to even would need one remainder more than an int16 has. ``Split(8)`` first rounds float32 to 24 bits, in 3 bytes.

    Args:
        bits: The number of bits of the remainder, 16 or 8.
        rounding: How ``Split(8)`` rounds to 24 bits; ``"stochastic"`` loses no update on average that float32 keeps.
        value: dtype of the value. None: the model's own for parameters, bfloat16 for state.
    """

    bits: Literal[8, 16] = 16
    rounding: Rounding = "nearest"
    value: LowDType | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (8, 16):
            raise ValueError(f"Split.bits: got {self.bits!r}; accepted are 8 and 16.")
        require_member(self.rounding, ("nearest", "stochastic"), field="Split.rounding")
        if self.value is not None:
            settle_dtype(self, "value", LOW_DTYPES, field="Split.value")

    def for_params(self, model: FloatDType) -> Split:
        """Return the format with ``value`` filled in: the model's dtype, unless it was chosen."""
        return self if self.value is not None else replace(self, value=low(model, "Split"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Split:
        """Return the format with ``value`` filled in: bfloat16, unless it was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """Whether the digits that do not fit are rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, with 6e-8 as its smallest number."""
        return self.value == "float16"

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """The value and the remainder."""
        value = PartSpec("value", DTYPES[self.value or unnamed(self)])
        return value, PartSpec("remainder", torch.int16 if self.bits == 16 else torch.int8)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Cut the bits in two."""
        value, remainder = self._cut(x.detach(), key)
        return straight_through(value, x), remainder

    def _cut(self, x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        if (self.value or unnamed(self)) == "float16":
            return self._cut_float16(x, key)
        kept = self._drop(x.view(torch.int32), 16 - self.bits, key)
        # The upper half, half-way cases away from zero: then the difference always fits, and is the lower half, read as a signed number.
        remainder = self._as_integer(kept if self.bits == 16 else kept >> 8)
        # Infinity leaves no remainder. That of NaN is arbitrary, and does not turn the quiet NaN into a number.
        return rounding.upper_half(rounding.with_nan_of(x, kept + 0x8000)), remainder

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Put the bits together; where that gives NaN and the value is not, the remainder belongs to another value."""
        value = rounding.widen(parts[0])
        return straight_through(self._whole(value.detach(), parts[1].to(torch.int32)), value)

    def _whole(self, value: Tensor, remainder: Tensor) -> Tensor:
        if (self.value or unnamed(self)) == "float16":
            return self._whole_float16(value, remainder)
        remainder = remainder if self.bits == 16 else remainder << 8
        whole = value.view(torch.int32) + remainder
        if not rounding.may_have_nan(whole.view(torch.float32)):
            return whole.view(torch.float32)
        return whole.sub_(rounding.nan_mask(whole.view(torch.float32)).bitwise_and_(remainder)).view(torch.float32)

    def resolution(self, compute: ComputeDType) -> float:
        """0 for ``Split(16)``, which is exact, and for stochastic rounding; else half a unit in the last of 24 bits."""
        exact = self.bits == 16 or self.rounding == "stochastic"
        return 0.0 if exact else HALF_UNITS[low(self.value or unnamed(self), "Split")] * 2.0**-8

    def _drop(self, bits: Tensor, count: int, key: Key) -> Tensor:
        """Round a bit pattern to a multiple of ``2**count``; a carry into the exponent is the next binade, as it should be."""
        if count == 0:
            return bits
        if self.rounding == "stochastic":
            return (bits + (key.bits16(bits) & ((1 << count) - 1))) & -(1 << count)
        return (bits + (1 << (count - 1))) & -(1 << count)

    def _as_integer(self, remainder: Tensor) -> Tensor:
        return remainder.to(torch.int16 if self.bits == 16 else torch.int8)

    def _cut_float16(self, x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """Above 2**-14 as for bfloat16, with 13 bits cut; below, in fixed point: quanta of 2**-24, remainder in 2**-(24 + bits)."""
        unit = max(0, 13 - self.bits)
        kept = self._drop(x.view(torch.int32), unit, key)
        upper = (kept + 0x1000) & -0x2000
        quanta = x.abs().clamp(max=1.0) * 2.0**24
        whole = torch.floor(quanta)
        whole = whole + (quanta - whole >= 0.5).float()  # adding a half first would round the number below it up
        scale = float(1 << self.bits)
        left = (quanta - whole) * scale
        if self.bits == 8 and self.rounding == "stochastic":
            left = rounding.floor_stochastic(left, key.bits(x))
        # Only the half-way case rounds out of range.
        left = torch.round(left).clamp(-scale / 2, scale / 2 - 1)
        # Up to and including 2**-14, since its neighbours above are one quantum apart too.
        small = whole <= 2.0**10
        value = torch.where(small, torch.copysign(whole * 2.0**-24, x), upper.view(torch.float32))
        remainder = torch.where(small, left.to(torch.int32), (kept - upper) >> unit)
        beyond = ~torch.isfinite(x) | (value.abs() > rounding.FLOAT16_MAX)
        infinite = torch.copysign(torch.full_like(x, torch.inf), x)
        value = torch.where(beyond, torch.where(x != x, x, infinite), value)
        return rounding.narrow(value, "float16"), self._as_integer(torch.where(beyond, 0, remainder))

    def _whole_float16(self, value: Tensor, remainder: Tensor) -> Tensor:
        fixed = value.abs() + remainder.float() * 2.0 ** -(24 + self.bits)
        # A zero that somebody wrote may come with a negative remainder: a magnitude is never below zero.
        fixed = torch.copysign(fixed.clamp(min=0.0), value)
        # Up there a remainder spans 13 bits; a wider one was left by a number in fixed point.
        fits = (remainder >= -0x1000) & (remainder < 0x1000)
        cut = torch.where(fits, remainder, 0) << max(0, 13 - self.bits)
        pattern = (value.view(torch.int32) + cut).view(torch.float32)
        whole = torch.where(value.abs() <= rounding.FLOAT16_SMALLEST_NORMAL, fixed, pattern)
        return torch.where(torch.isfinite(value), whole, value)
