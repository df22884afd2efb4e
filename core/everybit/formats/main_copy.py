"""A parameter in its own dtype, and a main copy that the optimizer works on."""

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
    rounding,
    settle_dtype,
    straight_through,
)
from everybit.formats.protocol import SPLITS_FLOAT32, ParamFormat, Parts, PartSpec, low, unnamed


@dataclass(frozen=True, slots=True)
class Master(ParamFormat):
    """A parameter's own tensor in its own dtype, and a main copy that the optimizer works on.

    The main copy is used as long as it rounds to the model's tensor. If it does not, the model was written to since, and the new value is
    used.

    Args:
        dtype: dtype of the main copy; ``"float64"`` with ``Policy(compute="float64")`` only.
        value: dtype of the model's tensor, of fewer bits than the main copy. None: whatever it is.
    """

    dtype: Literal["float32", "float64"] = "float32"
    value: Literal["bfloat16", "float16", "float32"] | None = None

    def __post_init__(self) -> None:
        settle_dtype(self, "dtype", ("float32", "float64"), field="Master.dtype")
        if self.value is not None:
            accepted = LOW_DTYPES if self.dtype == "float32" else (*LOW_DTYPES, "float32")
            settle_dtype(self, "value", accepted, field="Master.value")

    def for_params(self, model: FloatDType) -> Master:
        """Return the format with ``value`` filled in: the model's dtype, unless it was chosen."""
        if self.value is not None:
            return self
        return replace(self, value="float32" if self._narrows_float64(model) else low(model, "Master"))

    def objection(self, compute: ComputeDType) -> str | None:
        """Return the objection to a compute dtype that is not the main copy's."""
        if self.dtype == compute:
            return None
        if compute == "float64":
            return SPLITS_FLOAT32
        return "in which a step would round its main copy. Accepted with it is compute='float64'."

    def parts(self) -> tuple[PartSpec, ...]:
        """The model's tensor and the main copy."""
        return PartSpec("value", DTYPES[self.value or unnamed(self)]), PartSpec("main", DTYPES[self.dtype])

    def encode(self, x: Tensor, key: Key) -> Parts:
        """The main copy is ``x``; the model's tensor is ``x`` rounded to nearest (from float64 by way of float32)."""
        value = self.value or unnamed(self)
        if value == "float32":
            return x.float(), x.clone()
        return straight_through(rounding.to_nearest(x.detach().float(), low(value, "Master")), x), x.clone()

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """The main copy, where it still rounds to the value."""
        value, main = rounding.widen(parts[0]), parts[1]
        dtype = self.value or unnamed(self)
        rounded = main.float() if dtype == "float32" else rounding.nearest(main.float(), low(dtype, "Master"))
        return torch.where(rounded == value, main, value.to(main.dtype))

    def resolution(self, compute: ComputeDType) -> float:
        """0: the main copy is exact."""
        return 0.0

    def _narrows_float64(self, model: FloatDType) -> bool:
        return self.dtype == "float64" and model == "float32"
