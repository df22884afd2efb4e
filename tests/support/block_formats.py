"""Formats as a user might write them: int8 codes, with one float32 scale for each block of elements."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import everybit as eb
from everybit.base import ComputeDType, FloatDType, rounding
from everybit.formats import Parts


def blocks_of(x: Tensor, block: int) -> Tensor:
    """The elements of ``x``, a block in each row; zeros in the place of those that the last block lacks."""
    flat = x.reshape(-1)
    count = -(-flat.numel() // block)
    return torch.nn.functional.pad(flat, (0, count * block - flat.numel())).view(count, block)


def elements_of(blocks: Tensor, shape: torch.Size) -> Tensor:
    """As many elements of blocks as a value of this shape has."""
    return blocks.reshape(-1)[: shape.numel()].view(shape)


def to_codes(x: Tensor, block: int, largest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in units of its block's scale, rounded to nearest, and the scales."""
    rows = blocks_of(x.float(), block)
    scale = rows.abs().amax(1) * (1.0 / largest)
    unit = torch.where(scale > 0, scale, 1.0)
    codes = torch.round(rows / unit[:, None]).clamp(-largest, largest)
    return elements_of(codes, x.shape).to(dtype), scale


def from_codes(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """What codes and scales stand for, float32, of the shape of the codes."""
    return elements_of(blocks_of(codes.float(), block) * scale[:, None], codes.shape)


@dataclass(frozen=True, slots=True)
class Int8Blocks(eb.StateFormat):
    """int8 codes, of a slot without negative numbers uint8; 1 + 4 / block bytes an element."""

    block: int = 32
    kind: eb.SlotKind = "signed"

    def for_slot(self, kind: eb.SlotKind, compute: ComputeDType) -> Int8Blocks:
        return replace(self, kind=kind)

    def parts(self) -> tuple[eb.PartSpec, ...]:
        codes = torch.int8 if self.kind == "signed" else torch.uint8
        return eb.PartSpec("codes", codes), eb.PartSpec("scale", torch.float32, self.block)

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        largest = 127 if self.kind == "signed" else 255
        return to_codes(x.detach(), self.block, largest, self.parts()[0].dtype)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        return from_codes(parts[0], parts[1], self.block).view(shape)

    def resolution(self, compute: ComputeDType) -> float:
        return (
            0.0  # for tests: a real format would say by how much a step may be undone, and be refused for slow averages
        )


@dataclass(frozen=True, slots=True)
class Int8Residual(eb.ParamFormat):
    """For parameters: a bfloat16 model, and what it leaves out in int8 codes."""

    block: int = 32

    def for_params(self, model: FloatDType) -> Int8Residual:
        if model != "bfloat16":
            raise ValueError(f"Int8Residual: got {model} parameters; accepted are bfloat16 ones.")
        return self

    def parts(self) -> tuple[eb.PartSpec, ...]:
        codes, scale = eb.PartSpec("codes", torch.int8), eb.PartSpec("scale", torch.float32, self.block)
        return eb.PartSpec("value", torch.bfloat16), codes, scale

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        value = rounding.nearest(x.detach(), "bfloat16")
        return rounding.narrow(value, "bfloat16"), *to_codes(x.detach() - value, self.block, 127, torch.int8)

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        return rounding.widen(parts[0]) + from_codes(parts[1], parts[2], self.block).view(shape)

    def resolution(self, compute: ComputeDType) -> float:
        return 2.0**-16
