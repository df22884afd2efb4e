"""Formats of one tensor: rounded to nearest, or at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everybit.base import (
    DTYPES,
    FLOAT_DTYPES,
    LOW_DTYPES,
    ComputeDType,
    FloatDType,
    Key,
    LowDType,
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
    SlotKind,
    StateFormat,
    low,
    unnamed,
)


@dataclass(frozen=True, slots=True)
class Nearest(StateFormat, ParamFormat):
    """One tensor, rounded to the nearest value, ties to even.

    Args:
        dtype: The stored dtype. None: the model's own dtype for parameters, the compute dtype for state.
    """

    dtype: FloatDType | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            settle_dtype(self, "dtype", FLOAT_DTYPES, field="Nearest.dtype")

    def for_params(self, model: FloatDType) -> Nearest:
        """Return the format with ``dtype`` filled in: the model's, unless it was chosen."""
        return self if self.dtype is not None else Nearest(model)

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Nearest:
        """Return the format with ``dtype`` filled in: the compute dtype, unless it was chosen."""
        return self if self.dtype is not None else Nearest(compute)

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, with 6e-8 as its smallest number."""
        return self.dtype == "float16"

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the only part, the value."""
        return (PartSpec("value", DTYPES[self.dtype or unnamed(self)]),)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Round the value once, to nearest."""
        dtype = self.dtype or unnamed(self)
        if dtype in ("bfloat16", "float16"):
            return (straight_through(rounding.to_nearest(x.detach().float(), dtype), x),)
        return (x.to(DTYPES[dtype]),)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Widen the stored value, which is exact."""
        return parts[0].to(DTYPES[compute])

    def resolution(self, compute: ComputeDType) -> float:
        """Half a unit in the last place of the stored dtype, if it is coarser than the compute dtype."""
        dtype = self.dtype or unnamed(self)
        return 0.0 if dtype in (compute, "float64") else HALF_UNITS[dtype]


@dataclass(frozen=True, slots=True)
class Stochastic(StateFormat, ParamFormat):
    """One 16-bit tensor, rounded up or down at random so that the expectation is right (Gupta et al. 2015, arXiv:1502.02551).

    All that float32 holds is kept on average; the price is noise of up to one unit in the last place a step. An update is added in
    float32 before it is rounded, so that an update below half of float32's unit in the last place is lost, as it is under float32.
    The bits come from (seed, step, global element index): see :mod:`everybit.base.random_bits`.

    Args:
        dtype: The stored dtype. None: the model's own dtype for parameters, bfloat16 for state.
    """

    dtype: LowDType | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            settle_dtype(self, "dtype", LOW_DTYPES, field="Stochastic.dtype")

    def for_params(self, model: FloatDType) -> Stochastic:
        """Return the format with ``dtype`` filled in: the model's, unless it was chosen."""
        return self if self.dtype is not None else Stochastic(low(model, "Stochastic"))

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Stochastic:
        """Return the format with ``dtype`` filled in: bfloat16, unless it was chosen."""
        return self.for_params("bfloat16")

    @property
    def draws_bits(self) -> bool:
        """True, since every ``encode`` rounds at random."""
        return True

    @property
    def loses_small_numbers(self) -> bool:
        """Whether the value is stored in float16, with 6e-8 as its smallest number."""
        return self.dtype == "float16"

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to float64 as the compute dtype: this format splits a float32."""
        return SPLITS_FLOAT32 if compute == "float64" else None

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the only part, the value."""
        return (PartSpec("value", DTYPES[self.dtype or unnamed(self)]),)

    def encode(self, x: Tensor, key: Key) -> Parts:
        """Round the value once, up or down at random."""
        dtype = self.dtype or unnamed(self)
        exact = x.detach()
        return (straight_through(rounding.to_stochastic(exact, dtype, key.dither(dtype, exact)), x),)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """Widen the stored value, which is exact."""
        return parts[0].to(DTYPES[compute])

    def resolution(self, compute: ComputeDType) -> float:
        """Return 0: stochastic rounding is unbiased."""
        return 0.0
