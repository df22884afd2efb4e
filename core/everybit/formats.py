"""Formats: how a number computed in float32 is kept in fewer bits.

A format is a pair of pure functions. ``encode`` turns what was computed into *parts* to store, ``decode`` turns them back. For a
parameter the first part is the model's own tensor and the rest lives in the optimizer's state; for a slot of the state all parts
live there. The optimizer never knows. Compensation of a parameter, of the second moment and of an average is therefore one piece
of code, and weight decay, being part of the update, is always inside it.

=====================  ====================  ========================================  ==============================
format                 parts                 error of one encode, relative to ``|x|``   bytes (bfloat16 value)
=====================  ====================  ========================================  ==============================
``Nearest``            value                 2**-8                                     2
``Stochastic``         value                 2**-7, zero on average                    2
``Kahan``              value, residual       2**-17 / 2**-20 / exact                   2 + 2 / 2 + 2 / 2 + 4
``Split(16)``          value, remainder      exact                                     2 + 2
``Split(8)``           value, remainder      2**-16                                    2 + 1
``Master``             value, main           exact                                     2 + 4
=====================  ====================  ========================================  ==============================

``Kahan`` and ``Split(8)`` with stochastic rounding are off by up to twice as much, and by nothing on average.

A format of your own subclasses :class:`Format`: see docs/formats.md.

Parameters are public: anyone may zero or overwrite the model's tensor between two steps. Each two-part format therefore decides on
``decode`` whether the second part can belong to the first, and drops it if not. The result is never NaN unless the value is, and is within
half a unit in the last place of what was written; ``Split`` cannot tell a stale remainder from its own, and adds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from everybit import rounding
from everybit.dtypes import (
    FLOAT_DTYPES,
    LOW_DTYPES,
    ComputeDType,
    FloatDType,
    LowDType,
    require_member,
    torch_dtype,
)
from everybit.random_bits import Key
from everybit.straight_through import straight_through

Rounding = Literal["nearest", "stochastic"]

HALF_UNITS: Mapping[FloatDType, float] = MappingProxyType(
    {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
)
"""Half a unit in the last place of 1: the largest relative error of rounding to nearest."""

Parts = tuple[Tensor, ...]


SlotKind = Literal["signed", "non-negative"]
"""The range of a slot's numbers: of either sign, or never below zero (running means of squares)."""

SLOT_KINDS: tuple[SlotKind, ...] = get_args(SlotKind)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One of the tensors that a format stores.

    Attributes:
        name: By which it goes in state dicts and checkpoints: ``"residual"``, ``"scale"``.
        dtype: Of its numbers.
        block: How many elements of the value one number of it covers. With 1 the part has the value's shape. With more it is 1-d:
            number ``i`` covers the elements ``i * block`` to ``(i + 1) * block`` of the value, in the order of their indices, and the last
            one those that are left.
    """

    name: str
    dtype: torch.dtype
    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"PartSpec.name: got {self.name!r}; accepted is an identifier, such as 'scale'.")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"PartSpec.dtype: got {self.dtype!r}; accepted is a torch.dtype.")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"PartSpec.block: got {self.block!r}; accepted is a number of elements, 1 or more.")

    def count(self, elements: int) -> int:
        """Return how many numbers of the part cover so many elements of the value."""
        return -(-elements // self.block)

    def shape(self, value: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, for a value of this shape."""
        return tuple(value) if self.block == 1 else (self.count(math.prod(value)),)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of its numbers that cover the elements ``start`` to ``stop``.

        Raises:
            ValueError: One of them covers elements before ``start``, too.
        """
        if start % self.block:
            raise ValueError(f"cannot be cut before element {start}; accepted is a multiple of {self.block}.")
        return start // self.block, self.count(stop)

    @property
    def bytes_per_element(self) -> float:
        """Bytes for each element of a long value."""
        return self.dtype.itemsize / self.block


class Format(Protocol):
    """A pair of pure functions between the computed value and what is stored of it, and what a policy needs to know of them.

    Formats are values: frozen dataclasses, which can be compared and hashed. A format that can store a slot of the state is a
    :class:`StateFormat` too, one that can store parameters a :class:`ParamFormat`. Classes that subclass them have the defaults that are
    given here.

    A value may be encoded as a whole or in runs of elements, which begin at multiples of every part's ``block``; the parts of the runs are
    those of the whole. So a number of a part may depend on the elements that it covers and on nothing else.
    """

    __slots__ = ()

    @property
    def draws_bits(self) -> bool:
        """Whether ``encode`` draws random bits from its key. By default it does not."""
        return False

    @property
    def loses_small_numbers(self) -> bool:
        """Whether small numbers that float32 holds are stored as zero, so that squares of gradients would be lost. By default no."""
        return False

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the tensors that are stored, in order; every dtype is known, as after ``for_slot`` or ``for_params``."""
        ...

    def encode(self, x: Tensor, key: Key) -> Parts:
        """The parts that keep ``x``, in the shapes of :meth:`PartSpec.shape`. ``key`` names the random bits, for formats that draw any."""
        ...

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """The number that the parts keep, of this shape, in the compute dtype."""
        ...

    def resolution(self, compute: ComputeDType) -> float:
        """The largest change, relative to the number that is kept, that ``encode`` may undo every time: half a unit in the last place.

        0 if nothing is undone on average, or if everything is kept that the compute dtype holds.
        """
        ...

    def objection(self, compute: ComputeDType) -> str | None:
        """Why the format cannot store what is computed in this dtype, and what can; None if it can, which is the default."""
        return None


class StateFormat(Format, Protocol):
    """A format that can store a slot of an optimizer's state: all of its parts lie there."""

    __slots__ = ()

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Format:
        """This format for a slot whose numbers are of this kind, with every dtype named.

        The names and blocks of its parts are the same for every kind.
        """
        ...


class ParamFormat(Format, Protocol):
    """A format that can store parameters: its first part is the model's own tensor, the others lie in the optimizer's state."""

    __slots__ = ()

    def for_params(self, model: FloatDType) -> Format:
        """This format for parameters that the model holds in this dtype, with every dtype named.

        Raises:
            ValueError: It cannot store them; the message says what is accepted.
        """
        ...


def _chosen(dtype: FloatDType | None, who: Format) -> FloatDType:
    if dtype is None:
        raise ValueError(
            f"{who}: its dtype was left to the context; call .for_params(dtype) or .for_slot(kind, compute) first."
        )
    return dtype


_SPLITS_FLOAT32 = (
    "the two-part and stochastic formats split a float32. Accepted with float64 are Nearest, and Master('float64')"
    " for parameters."
)


@dataclass(frozen=True, slots=True)
class Nearest(StateFormat, ParamFormat):
    """One tensor, rounded to the nearest value, ties to even.

    Args:
        dtype: What it is stored in. None: the model's own dtype for parameters, the compute dtype for state.
    """

    dtype: FloatDType | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            require_member(self.dtype, FLOAT_DTYPES, field="Nearest.dtype")

    def for_params(self, model: FloatDType) -> Nearest:
        """Return the format with ``dtype`` filled in: the model's, if none was chosen."""
        return self if self.dtype is not None else Nearest(model)

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Nearest:
        """Return the format with ``dtype`` filled in: the compute dtype, if none was chosen."""
        return self if self.dtype is not None else Nearest(compute)

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, whose smallest number is 6e-8."""
        return self.dtype == "float16"

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the one part, the value."""
        return (PartSpec("value", torch_dtype(_chosen(self.dtype, self))),)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Round the value once, to nearest."""
        dtype = _chosen(self.dtype, self)
        if dtype in ("bfloat16", "float16"):
            return (straight_through(rounding.to_nearest(x.detach().float(), dtype), x),)
        return (x.to(torch_dtype(dtype)),)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Widen the stored value, which is exact."""
        return rounding.widen(parts[0]).to(torch_dtype(compute))

    def resolution(self, compute: ComputeDType) -> float:
        """Half a unit in the last place of the stored dtype, if it is coarser than the compute dtype."""
        dtype = _chosen(self.dtype, self)
        return 0.0 if dtype in (compute, "float64") else HALF_UNITS[dtype]


@dataclass(frozen=True, slots=True)
class Stochastic(StateFormat, ParamFormat):
    """One 16-bit tensor, rounded up or down at random so that the expectation is right (Gupta et al. 2015, arXiv:1502.02551).

    Nothing that float32 holds is lost on average; the price is noise of up to one unit in the last place a step. An update is added in
    float32 before it is rounded, so that one below half of float32's unit in the last place is lost, as it is under float32.
    The bits come from (seed, step, global element index): see :mod:`everybit.random_bits`.

    Args:
        dtype: What it is stored in. None: the model's own dtype for parameters, bfloat16 for state.
    """

    dtype: LowDType | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            require_member(self.dtype, LOW_DTYPES, field="Stochastic.dtype")

    def for_params(self, model: FloatDType) -> Stochastic:
        """Return the format with ``dtype`` filled in: the model's, if none was chosen."""
        return self if self.dtype is not None else Stochastic(_low(model, "Stochastic"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Stochastic:
        """Return the format with ``dtype`` filled in: bfloat16, if none was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """True, since every ``encode`` rounds at random."""
        return True

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, whose smallest number is 6e-8."""
        return self.dtype == "float16"

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return _SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the one part, the value."""
        return (PartSpec("value", torch_dtype(_chosen(self.dtype, self))),)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Round the value once, up or down at random."""
        dtype = _low(_chosen(self.dtype, self), "Stochastic")
        exact = x.detach()
        return (straight_through(rounding.to_stochastic(exact, dtype, _dither(dtype, exact, key)), x),)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Widen the stored value, which is exact."""
        return rounding.widen(parts[0]).to(torch_dtype(compute))

    def resolution(self, compute: ComputeDType) -> float:
        """0: what is undone at one step is made up for at another."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Kahan(StateFormat, ParamFormat):
    """A 16-bit value and the residual it could not hold (Kahan 1965, https://doi.org/10.1145/363707.363723).

    ``value`` is ``x`` rounded to nearest, ``residual`` is ``x - value`` rounded to its own dtype. A bfloat16 residual keeps about 16
    significant bits: updates smaller than about ``2**-17 |x|`` stop the number, unless the residual is rounded stochastically.
    A float16 residual keeps three bits more while ``|x|`` is above 2**-5, and fewer below 2**-8, where its step of 2**-24 is the
    coarser one; below 2**-16 (of a float16 value 2**-13) it keeps nothing.

    Args:
        residual: dtype of the residual.
        rounding: How the residual is rounded: ``"stochastic"`` has no smallest update but float32's, and a little noise.
        value: dtype of the value. None: the model's own for parameters, bfloat16 for state.
    """

    residual: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    rounding: Rounding = "nearest"
    value: LowDType | None = None

    def __post_init__(self) -> None:
        require_member(self.residual, ("bfloat16", "float16", "float32"), field="Kahan.residual")
        require_member(self.rounding, ("nearest", "stochastic"), field="Kahan.rounding")
        if self.value is not None:
            require_member(self.value, LOW_DTYPES, field="Kahan.value")

    def for_params(self, model: FloatDType) -> Kahan:
        """Return the format with ``value`` filled in: the model's dtype, if none was chosen."""
        return self if self.value is not None else replace(self, value=_low(model, "Kahan"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Kahan:
        """Return the format with ``value`` filled in: bfloat16, if none was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """Whether the residual is rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def loses_small_numbers(self) -> bool:
        """Whether either part is stored in float16, whose smallest number is 6e-8."""
        return "float16" in (self.value, self.residual)

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return _SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the two parts, value and residual."""
        return PartSpec("value", torch_dtype(_chosen(self.value, self))), PartSpec(
            "residual", torch_dtype(self.residual)
        )

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Split into what the value holds and what is left."""
        dtype = _low(_chosen(self.value, self), "Kahan")
        whole, x = x, x.detach()  # the value alone has a derivative, or the sum of the two would have it twice
        value = rounding.nearest(x, dtype)
        # Exact: x and value share their leading bits, so the difference has at most 16 (Sterbenz). Nothing is left of what is not finite,
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
            return rounding.stochastic(residual, dtype, _dither(dtype, residual, key), finite=True)
        return rounding.nearest(residual, dtype, finite=True)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Return the sum; the value alone if the residual is above half a unit in the last place, since the value was overwritten then."""
        value, residual = rounding.widen(parts[0]), rounding.widen(parts[1])
        reach = rounding.half_ulp(value, _low(_chosen(self.value, self), "Kahan"))
        # An infinite value has an infinite reach, and infinity + residual is infinity. A zero residual, told by its bits because
        # compilers ignore the signs of zeros, is not added: -0 + 0 would be 0.
        some = (residual.view(torch.int32) & 0x7FFFFFFF) != 0
        return torch.where(some & (residual.abs() <= reach), value + residual, value)

    def resolution(self, compute: ComputeDType) -> float:
        """That of value and residual together. A float16 has nothing below 2**-24, so that of small numbers only one of the two is left."""
        value = _low(_chosen(self.value, self), "Kahan")
        if self.residual == "float32":
            return 0.0
        if self.residual == "float16":
            return HALF_UNITS[value]
        if self.rounding == "stochastic":
            return 0.0
        return HALF_UNITS["bfloat16"] if value == "float16" else HALF_UNITS["bfloat16"] * 2.0**-9


def _canonical(value: Tensor, residual: Tensor, dtype: LowDType, kept_in: LowDType) -> tuple[Tensor, Tensor]:
    """The parts of which the first is their sum rounded to nearest: those that encoding the sum again would give.

    A residual that was rounded up beyond half a unit (a float16 has no small ones) would be dropped by ``decode``, and is zero. One that
    was rounded up to half a unit puts the sum on a tie, and beside an odd value the tie goes to the neighbour: then the neighbour is
    stored, and the residual on its other side. Else weights would move by a unit at a step that moves nothing. Where the neighbour is
    infinity, the residual is rounded down instead: it is a power of two, below which numbers are closer.
    """
    half, size = rounding.half_ulp(value, dtype), residual.abs()
    residual = torch.where(size > half, 0.0, residual)
    neighbour = value + 2 * residual
    if dtype == "float16":  # whose smallest number has zero for a neighbour, and a residual can say so
        neighbour = torch.copysign(neighbour, value)
    tie = (size == half) & rounding.is_odd(value, dtype)
    finite = neighbour.abs() <= torch.finfo(torch_dtype(dtype)).max
    residual = torch.where(tie, torch.where(finite, -residual, residual * (1 - HALF_UNITS[kept_in])), residual)
    return torch.where(tie & finite, neighbour, value), residual


@dataclass(frozen=True, slots=True)
class Split(StateFormat, ParamFormat):
    """A 16-bit value and the low bits that it left out, as an integer.

    The float32 bits are rounded to the value's (nearest, ties away from zero); the remainder is the signed difference of the two bit
    patterns. ``Split(16)`` keeps float32 exactly, in 4 bytes, where the value is bfloat16, or float16 in its normal range; rounding
    ties to even would need one remainder more than an int16 has. ``Split(8)`` first rounds float32 to 24 bits, in 3 bytes.

    Args:
        bits: Of the remainder, 16 or 8.
        rounding: How ``Split(8)`` drops what does not fit: ``"stochastic"`` has no smallest update but float32's.
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
            require_member(self.value, LOW_DTYPES, field="Split.value")

    def for_params(self, model: FloatDType) -> Split:
        """Return the format with ``value`` filled in: the model's dtype, if none was chosen."""
        return self if self.value is not None else replace(self, value=_low(model, "Split"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Split:
        """Return the format with ``value`` filled in: bfloat16, if none was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """Whether the digits that do not fit are rounded stochastically."""
        return self.rounding == "stochastic"

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, whose smallest number is 6e-8."""
        return self.value == "float16"

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return _SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """The value and the remainder."""
        value = PartSpec("value", torch_dtype(_chosen(self.value, self)))
        return value, PartSpec("remainder", torch.int16 if self.bits == 16 else torch.int8)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Cut the bits in two."""
        value, remainder = self._cut(x.detach(), key)
        return straight_through(value, x), remainder

    def _cut(self, x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        if _chosen(self.value, self) == "float16":
            return self._cut_float16(x, key)
        kept = self._drop(x.view(torch.int32), 16 - self.bits, key)
        # The upper half, half-way cases away from zero: then the difference always fits.
        upper = (kept + 0x8000) & -0x10000
        remainder = kept - upper if self.bits == 16 else (kept - upper) >> 8
        # Infinity leaves no remainder. That of NaN means nothing, and whatever it is, does not turn the quiet NaN into a number.
        return rounding.upper_half(x, upper), self._as_integer(remainder)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Put the bits together; where that gives NaN and the value is not, the remainder belongs to another value."""
        value = rounding.widen(parts[0])
        return straight_through(self._whole(value.detach(), parts[1].to(torch.int32)), value)

    def _whole(self, value: Tensor, remainder: Tensor) -> Tensor:
        if _chosen(self.value, self) == "float16":
            return self._whole_float16(value, remainder)
        whole = (value.view(torch.int32) + (remainder if self.bits == 16 else remainder << 8)).view(torch.float32)
        return torch.where(whole != whole, value, whole)

    def resolution(self, compute: ComputeDType) -> float:
        """0 for ``Split(16)``, which is exact, and for stochastic rounding; else half a unit in the last of 24 bits."""
        exact = self.bits == 16 or self.rounding == "stochastic"
        return 0.0 if exact else HALF_UNITS[_low(_chosen(self.value, self), "Split")] * 2.0**-8

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
        # The half-way case is the one value that rounds out of range.
        left = torch.round(left).clamp(-scale / 2, scale / 2 - 1)
        # Up to and including 2**-14, whose neighbours above are one quantum apart too.
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


@dataclass(frozen=True, slots=True)
class Master(ParamFormat):
    """A parameter's own tensor in its own dtype, and a main copy that the optimizer works on.

    The main copy is followed as long as it rounds to the model's tensor; if it does not, somebody wrote to the model since, and what
    was written counts.

    Args:
        dtype: Of the main copy; ``"float64"`` with ``Policy(compute="float64")`` only.
        value: dtype of the model's tensor, of fewer bits than the main copy. None: whatever it is.
    """

    dtype: Literal["float32", "float64"] = "float32"
    value: Literal["bfloat16", "float16", "float32"] | None = None

    def __post_init__(self) -> None:
        require_member(self.dtype, ("float32", "float64"), field="Master.dtype")
        if self.value is not None:
            accepted = LOW_DTYPES if self.dtype == "float32" else (*LOW_DTYPES, "float32")
            require_member(self.value, accepted, field="Master.value")

    def for_params(self, model: FloatDType) -> Master:
        """Return the format with ``value`` filled in: the model's dtype, if none was chosen."""
        if self.value is not None:
            return self
        return replace(self, value="float32" if self._narrows_float64(model) else _low(model, "Master"))

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to a compute dtype that is not the main copy's."""
        if self.dtype == compute:
            return None
        if compute == "float64":
            return _SPLITS_FLOAT32
        return "in which a step would round its main copy. Accepted with it is compute='float64'."

    def parts(self) -> tuple[PartSpec, ...]:
        """The model's tensor and the main copy."""
        return PartSpec("value", torch_dtype(_chosen(self.value, self))), PartSpec("main", torch_dtype(self.dtype))

    def encode(self, x: Tensor, key: Key) -> Parts:
        """The main copy is ``x``; the model's tensor is ``x`` rounded to nearest (from float64 by way of float32)."""
        value = _chosen(self.value, self)
        if value == "float32":
            return x.float(), x.clone()
        return straight_through(rounding.to_nearest(x.detach().float(), _low(value, "Master")), x), x.clone()

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """The main copy, where it still rounds to the value."""
        value, main = rounding.widen(parts[0]), parts[1]
        dtype = _chosen(self.value, self)
        rounded = main.float() if dtype == "float32" else rounding.nearest(main.float(), _low(dtype, "Master"))
        return torch.where(rounded == value, main, value.to(main.dtype))

    def resolution(self, compute: ComputeDType) -> float:
        """0: the main copy is exact."""
        return 0.0

    def _narrows_float64(self, model: FloatDType) -> bool:
        return self.dtype == "float64" and model == "float32"


BUILT_IN: tuple[type[Nearest] | type[Stochastic] | type[Kahan] | type[Split] | type[Master], ...] = (
    Nearest, Stochastic, Kahan, Split, Master,
)  # fmt: skip
"""The formats of this module, which can be written to a file."""


def bytes_of(format: Format, elements: int) -> list[tuple[str, int]]:
    """(part name, bytes) of a value of so many elements, under a format with every dtype named."""
    return [(part.name, part.count(elements) * part.dtype.itemsize) for part in format.parts()]


def _dither(dtype: LowDType, like: Tensor, key: Key) -> Tensor:
    """Random bits to round to ``dtype`` with: 16 for bfloat16, which drops 16; 32 for float16, whose subnormals are rounded more finely."""
    return key.bits16(like) if dtype == "bfloat16" else key.bits(like)


def _low(dtype: FloatDType, who: str) -> LowDType:
    if dtype not in LOW_DTYPES:
        raise ValueError(
            f"{who} splits a number over a 16-bit tensor and something else; got a {dtype} tensor, which already holds all that"
            f" is computed. Accepted are bfloat16 and float16 tensors; use Nearest() for {dtype}."
        )
    return "bfloat16" if dtype == "bfloat16" else "float16"
