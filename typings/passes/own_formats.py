"""Formats of the user's own, for slots and for parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import everybit as eb


@dataclass(frozen=True, slots=True)
class Tenths(eb.StateFormat):
    """Whole tenths; what else a format has is inherited."""

    def for_slot(self, kind: eb.SlotKind, compute: Literal["float64", "float32"]) -> Tenths:
        return self

    def parts(self) -> tuple[eb.PartSpec, ...]:
        return (eb.PartSpec("tenths", torch.int32),)

    def encode(self, x: Tensor, key: eb.Key) -> tuple[Tensor, ...]:
        return (torch.round(x * 10.0).to(torch.int32),)

    def decode(self, parts: tuple[Tensor, ...], shape: torch.Size, compute: Literal["float64", "float32"]) -> Tensor:
        return parts[0].float() / 10.0

    def resolution(self, compute: Literal["float64", "float32"]) -> float:
        return 0.05


policy = eb.Policy(momentum=Tenths(), slots={"mean": Tenths()})
