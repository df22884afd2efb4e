"""A value of 16 bits and the residual that it could not hold."""

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
class Kahan(StateFormat, ParamFormat):
    """A 16-bit value and the residual it could not hold (Kahan 1965, https://doi.org/10.1145/363707.363723).

    ``value`` is ``x`` rounded to nearest, ``residual`` is ``x - value`` rounded to its own dtype. A bfloat16 residual keeps about 16
    significant bits: updates smaller than about ``2**-17 |x|`` are lost, unless the residual is rounded stochastically.
    A float16 residual keeps three bits more while ``|x|`` is above 2**-5, and fewer below 2**-8, where its step of 2**-24 is the
    coarser step; below 2**-16 (of a float16 value 2**-13) it is zero.

    Args:
        residual: dtype of the residual.
        rounding: How the residual is rounded: ``"stochastic"`` loses no update on average that float32 keeps, and adds a little noise.
        value: dtype of the value. None: the model's own for parameters, bfloat16 for state.
    """

    residual: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    rounding: Rounding = "nearest"
    value: LowDType | None = None

    def __post_init__(self) -> None:
        settle_dtype(self, "residual", ("bfloat16", "float16", "float32"), field="Kahan.residual")
        require_member(self.rounding, ("nearest", "stochastic"), field="Kahan.rounding")
        if self.value is not None:
            settle_dtype(self, "value", LOW_DTYPES, field="Kahan.value")

    def for_params(self, model: FloatDType) -> Kahan:
        """Return the format with ``value`` filled in: the model's dtype, unless it was chosen."""
        return self if self.value is not None else replace(self, value=low(model, "Kahan"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Kahan:
        """Return the format with ``value`` filled in: bfloat16, unless it was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """Whether the residual is rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def loses_small_numbers(self) -> bool:
        """Whether either part is stored in float16, with 6e-8 as its smallest number."""
        return "float16" in (self.value, self.residual)

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the two parts, value and residual."""
        return PartSpec("value", DTYPES[self.value or unnamed(self)]), PartSpec("residual", DTYPES[self.residual])

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Split into the value part and the rest."""
        dtype = low(self.value or unnamed(self), "Kahan")
        whole, x = x, x.detach()  # the value alone has a derivative, or the sum of the two would have it twice
        if dtype == self.residual == "bfloat16" and self.rounding == "nearest":
            value, residual = _encoded_twice(x)
            return straight_through(rounding.upper_half(value), whole), rounding.upper_half(residual)
        value = rounding.nearest(x, dtype)
        # Exact: x and value share their leading bits, so the difference has at most 16 (Sterbenz). The rest is zero if x is not finite,
        # or was rounded to infinity.
        residual = x - value
        residual = torch.where(residual.abs() < torch.inf, residual, 0.0)
        if self.residual == "float16":
            residual = residual.clamp(-rounding.FLOAT16_MAX, rounding.FLOAT16_MAX)
        if self.residual != "float32":
            kept = self._rounded(residual, self.residual, key)
            value, residual = _canonical(value, kept, dtype, self.residual)
        return straight_through(rounding.narrow(value, dtype), whole), rounding.narrow(
            residual, self.residual, finite=True
        )

    def _rounded(self, residual: Tensor, dtype: LowDType, key: Key) -> Tensor:
        """A finite residual in the precision that it is stored in, still float32."""
        if self.rounding == "stochastic":
            return rounding.stochastic(residual, dtype, key.dither(dtype, residual), finite=True)
        return rounding.nearest(residual, dtype, finite=True)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Return the sum; the value alone if the residual is above half a unit in the last place, since the value was overwritten then."""
        value, residual = rounding.widen(parts[0]), rounding.widen(parts[1])
        dtype = low(self.value or unnamed(self), "Kahan")
        if dtype == self.residual == "bfloat16":
            # Without a least reach: half of bfloat16's smallest number is below every residual.
            reach = (value.view(torch.int32) & _EXPONENT).view(torch.float32) * 2.0**-8
        else:
            reach = rounding.half_ulp(value, dtype)
        # An infinite value has an infinite reach, and infinity + residual is infinity. A zero residual, told by its bits because
        # compilers ignore the signs of zeros, is not added: -0 + 0 would be 0.
        some = (residual.view(torch.int32) & 0x7FFFFFFF) != 0
        return torch.where(some & (residual.abs() <= reach), value + residual, value)

    def resolution(self, compute: ComputeDType) -> float:
        """Return the resolution of value and residual together. Float16 ends at 2**-24, so that small numbers have only one of the two."""
        value = low(self.value or unnamed(self), "Kahan")
        if self.residual == "float32":
            return 0.0
        if self.residual == "float16":
            return HALF_UNITS[value]
        if self.rounding == "stochastic":
            return 0.0
        return HALF_UNITS["bfloat16"] if value == "float16" else HALF_UNITS["bfloat16"] * 2.0**-9


_WHOLE = float.fromhex("0x1.feff8p127")
"""From here on the sum of value and residual would round to infinity: the residual is cut, as that of ``x`` itself is."""


def _encoded_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of the parts that :func:`_canonical` gives, for a bfloat16 value and residual, by a third of the operations.

    Value and residual hold 16 significant bits, and their sum is exact. So the sum, encoded again, leaves nothing to round, and a tie goes
    where it would go the next time.
    """
    first = rounding.nearest(x, "bfloat16", finite=True)
    left = x - first
    held = first + rounding.nearest(left, "bfloat16", finite=True)
    bits = held.view(torch.int32) | (x.view(torch.int32) & _SIGN)  # the sum of -0 and 0 is 0
    held = torch.where(x.abs() < _WHOLE, bits.view(torch.float32), x)
    value = rounding.nearest(held, "bfloat16").view(torch.int32)
    residual = held - value.view(torch.float32)
    residual = torch.where(residual.abs() < torch.inf, residual, 0.0)  # not that of infinities
    return value, residual.view(torch.int32)


_SIGN, _EXPONENT = -0x80000000, 0x7F800000


def _canonical(value: Tensor, residual: Tensor, dtype: LowDType, kept_in: LowDType) -> tuple[Tensor, Tensor]:
    """The parts of which the first is their sum rounded to nearest: those that encoding the sum again would give.

    A residual that was rounded up beyond half a unit (float16 is coarse there) would be dropped by ``decode``, and is zero. A residual that
    was rounded up to half a unit puts the sum on a tie, and beside an odd value the tie goes to the neighbour: then the neighbour is
    stored, and the residual on its other side. Otherwise weights would move by a unit at a step with a zero update. If the neighbour is
    infinity, the residual is rounded down instead: it is a power of two, below which numbers are closer.
    """
    half, size = rounding.half_ulp(value, dtype), residual.abs()
    residual = torch.where(size > half, 0.0, residual)
    neighbour = value + 2 * residual
    if dtype == "float16":  # whose smallest number has zero for a neighbour, and a residual can say so
        neighbour = torch.copysign(neighbour, value)
    tie = (size == half) & rounding.is_odd(value, dtype)
    finite = neighbour.abs() <= torch.finfo(DTYPES[dtype]).max
    residual = torch.where(tie, torch.where(finite, -residual, residual * (1 - HALF_UNITS[kept_in])), residual)
    return torch.where(tie & finite, neighbour, value), residual
