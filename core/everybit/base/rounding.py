"""Rounding by integer arithmetic on the bits.

Why not ``x.to(bfloat16).float()``: a compiler keeps fused code in float32 and folds that round trip back into ``x``; a residual
``x - rounded`` is then zero, and compensation is gone without a word. No compiler folds integer arithmetic. So every value that is
needed *as stored* is computed here, eager and compiled alike, and the final cast is of a number that needs no rounding.

All functions take float32 and return float32 holding numbers that the narrow format has. bfloat16 and float32 share their
exponents, so a bfloat16 is the upper half of the bits; float16 has fewer, so its subnormals and its overflow are separate cases.
Infinities, NaN and signed zeros pass through.

The true derivative of rounding is zero almost everywhere, so that a hypergradient would vanish without a word. :func:`straight_through`
takes the rounded number forward and the derivative of the exact one back (Bengio et al. 2013, https://arxiv.org/abs/1308.3432), which is
also right on average under stochastic rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everybit.base.dtypes import DTYPES, FloatDType, LowDType
from everybit.base.older_torch import let_views_batch

let_views_batch()

FLOAT16_MAX = 65504.0
FLOAT16_SMALLEST_NORMAL = 2.0**-14
# 13 of float32's 23 fraction bits do not fit into float16, 16 do not fit into bfloat16.
DROPPED_BITS: dict[LowDType, int] = {"bfloat16": 16, "float16": 13}


def nearest(x: Tensor, dtype: LowDType, *, finite: bool = False) -> Tensor:
    """Round to the nearest value, ties to even (IEEE 754-2019, 4.3.1), as ``x.to(dtype)`` does.

    ``finite`` promises that no element is infinite or NaN, here as below.
    """
    rounded = _up_to_nearest(x, dtype).bitwise_and(-(1 << DROPPED_BITS[dtype])).view(torch.float32)
    if dtype == "float16":
        # Below 2**-14 float16 is fixed point with a quantum of 2**-24; both products are exact.
        rounded = _float16_range(x, rounded, torch.round(x * 2.0**24) * 2.0**-24)
    # Infinity has no bits to drop; NaN would be carried into infinity or zero.
    return rounded if finite else with_nan_of(x, rounded.view(torch.int32)).view(torch.float32)


def stochastic(x: Tensor, dtype: LowDType, bits: Tensor, *, finite: bool = False) -> Tensor:
    """Up or down with probabilities that make the expectation ``x``; a value that ``dtype`` has stays as it is.

    Args:
        x: float32.
        dtype: Where the values are to fit.
        bits: int32 of the same shape, uniform; see :class:`everybit.base.random_bits.Key`.
        finite: No element is infinite or NaN.
    """
    rounded = _dithered(x, dtype, bits).bitwise_and(-(1 << DROPPED_BITS[dtype])).view(torch.float32)
    if dtype == "float16":
        quanta = floor_stochastic(x.abs() * 2.0**24, bits)
        rounded = _float16_range(x, rounded, torch.copysign(quanta * 2.0**-24, x))
    return rounded if finite else with_nan_of(x, rounded.view(torch.int32)).view(torch.float32)


def to_nearest(x: Tensor, dtype: FloatDType, *, finite: bool = False) -> Tensor:
    """:func:`nearest`, stored as ``dtype``. ``finite`` promises that no element is infinite or NaN."""
    if dtype == "bfloat16":
        bits = _up_to_nearest(x, dtype)
        return upper_half(bits if finite else with_nan_of(x, bits))
    return narrow(nearest(x, dtype) if dtype == "float16" else x, dtype)


def to_stochastic(x: Tensor, dtype: LowDType, bits: Tensor, *, finite: bool = False) -> Tensor:
    """:func:`stochastic`, stored as ``dtype``. ``finite`` promises that no element is infinite or NaN."""
    if dtype == "bfloat16":
        # Infinity has no bits below the cut that a dither could carry over it.
        dithered = _dithered(x, dtype, bits)
        return upper_half(dithered if finite else with_nan_of(x, dithered))
    return narrow(stochastic(x, dtype, bits), dtype)


def _up_to_nearest(x: Tensor, dtype: LowDType) -> Tensor:
    """The bits of ``x`` plus what carries into those that are kept, where they are to be rounded up."""
    bits, dropped = x.view(torch.int32), DROPPED_BITS[dtype]
    return bits + ((1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1))


def _dithered(x: Tensor, dtype: LowDType, bits: Tensor) -> Tensor:
    return x.view(torch.int32) + (bits & ((1 << DROPPED_BITS[dtype]) - 1))


def floor_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Round to either neighbouring integer, with probabilities that make the expectation ``x``."""
    whole = torch.floor(x)
    return whole + (x - whole > uniform(bits)).float()


def narrow(x: Tensor, dtype: FloatDType, *, finite: bool = False) -> Tensor:
    """``x`` stored as ``dtype``, bit for bit (NaN as some NaN); ``x`` is float32 and holds values that ``dtype`` has."""
    if dtype == "bfloat16":
        bits = x.view(torch.int32)
        return upper_half(bits if finite else with_nan_of(x, bits.clone()))
    return x.to(DTYPES[dtype])


def upper_half(bits: Tensor) -> Tensor:
    """The upper half of float32 ``bits`` as bfloat16. Not ``.to(bfloat16)``: processors with an instruction for it may flush subnormals."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def with_nan_of(x: Tensor, bits: Tensor) -> Tensor:
    """Set all ``bits``, those of float32 numbers, where ``x`` is NaN: a quiet NaN in either half. They are overwritten."""
    return bits.bitwise_or_(nan_mask(x)) if may_have_nan(x) else bits


def may_have_nan(x: Tensor) -> bool:
    """Whether ``x`` has a NaN, as far as the host knows at once, and otherwise True.

    A sum with a NaN is NaN: uncompiled, one operation spares six.
    """
    if torch.compiler.is_compiling() or not x.is_cpu:
        return True
    total = on_host(x.sum())
    return isinstance(total, Tensor) or total != total


def nan_mask(x: Tensor) -> Tensor:
    """-1 where ``x``, a float32 tensor, is NaN, else 0: int32, in memory of its own.

    Eager torch takes as long for a comparison and a ``where`` as for eight operations on integers; compiled code takes less.
    """
    if torch.compiler.is_compiling():
        return (x != x).to(torch.int32).neg()
    return (x.view(torch.int32) & 0x7FFFFFFF).neg_().add_(0x7F800000).bitwise_right_shift_(31)


def widen(x: Tensor) -> Tensor:
    """A stored tensor as float32, exactly; float32 and float64 are returned as they are."""
    return x.float() if x.dtype.itemsize == 2 else x


def seen_bits(x: Tensor, dtype: FloatDType) -> Tensor:
    """The bits of the values as they are in another dtype, rounded to nearest once: integers, which are equal where those bits are.

    A value of 16 bits is seen in float32 exactly. Of NaN some bits are returned, always the same for the same number in ``x``.
    """
    if x.dtype is DTYPES[dtype]:
        if x.dtype.itemsize == 2:  # compiled code has the wide number at hand, and eager code the narrow one
            return widen(x).view(torch.int32) if torch.compiler.is_compiling() else x.view(torch.int16)
        return x.view(torch.int32 if dtype == "float32" else torch.int64)
    wide = x.float()
    return (nearest(wide, dtype) if dtype in ("bfloat16", "float16") else wide).view(torch.int32)


def on_host(number: Tensor) -> Tensor | int | float:
    """A number's value if the host has it at once, and no transform of torch's hides it."""
    if torch.compiler.is_compiling() or not number.is_cpu:
        return number
    try:
        value = number.item()
    except RuntimeError:  # under vmap, or while it is traced
        return number
    return value if type(value) in (int, float) else number


def uniform(bits: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


def half_ulp(x: Tensor, dtype: LowDType) -> Tensor:
    """Half a unit in the last place of ``x``, a float32 tensor of values that ``dtype`` has: how far a residual can reach.

    For a power of two this is the larger of its two neighbours' halves. Infinite for infinities, and at least half the smallest
    subnormal.
    """
    power_of_two = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    if dtype == "bfloat16":
        return (power_of_two * 2.0**-8).clamp(min=2.0**-134)
    return (power_of_two * 2.0**-11).clamp(min=2.0**-25)


def is_odd(x: Tensor, dtype: LowDType) -> Tensor:
    """Where the last bit of ``x`` is set, a float32 tensor of values that ``dtype`` has: ties go to the neighbour then."""
    if dtype == "bfloat16":
        return (x.view(torch.int32) & 0x10000) != 0
    return (x.to(torch.float16).view(torch.int16) & 1) != 0


def _float16_range(x: Tensor, normal: Tensor, subnormal: Tensor) -> Tensor:
    """Choose by range, and send numbers beyond float16's largest to infinity."""
    rounded = torch.where(x.abs() < FLOAT16_SMALLEST_NORMAL, subnormal, normal)
    return torch.where(rounded.abs() > FLOAT16_MAX, torch.copysign(torch.full_like(x, torch.inf), x), rounded)


def straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded``, with the derivative of ``x``: a tensor of the same shape, of any floating dtype.

    Without a derivative this is ``rounded`` itself.
    """
    return _apply(rounded, x) if torch.is_grad_enabled() else rounded


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rounded: Tensor, x: Tensor) -> Tensor:  # noqa: ARG004 (autograd differentiates by it)
        return rounded.view_as(rounded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        rounded, x = inputs
        ctx.rounded, ctx.exact = rounded.dtype, x.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient.to(ctx.exact)

    @staticmethod
    def jvp(ctx: Any, rounded_tangent: Tensor | None, tangent: Tensor) -> Tensor:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent.to(ctx.rounded)


def _apply(rounded: Tensor, x: Tensor) -> Tensor:
    made: Tensor = _StraightThrough.apply(rounded, x)  # type: ignore[no-untyped-call]
    return made
