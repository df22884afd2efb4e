"""Every built-in format, and a user's own, keeps the promises of a format; and liars are caught."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.formats import Parts
from everybit.testing import check_format
from tests.support.block_formats import Int8Blocks, Int8Residual

FORMATS: list[Any] = [
    eb.Nearest(), eb.Nearest("bfloat16"), eb.Stochastic(), eb.Kahan(), eb.Kahan("float32"), eb.Split(16),
    eb.Split(8, rounding="stochastic"), eb.Master(), Int8Blocks(), Int8Blocks(8), Int8Residual(),
]  # fmt: skip
# Code that draws bits takes ten times as long to compile.
SAMPLED = ("Split(bits=16", "Int8Blocks(block=32")


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(one, id=str(one), marks=() if str(one).startswith(SAMPLED) else pytest.mark.exhaustive)
        for one in FORMATS
    ],
)
def test_a_format_keeps_its_promises(format: Any) -> None:
    check_format(format)


@dataclass(frozen=True, slots=True)
class OneScale(Int8Blocks):
    """One scale for everything that is encoded at once, and a copy of it for each block."""

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        codes, scale = Int8Blocks.encode(self, x / x.abs().amax() if x.numel() else x, key)
        return codes, scale


@dataclass(frozen=True, slots=True)
class Writes(Int8Blocks):
    """Rounds in place what it was given."""

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        return Int8Blocks.encode(self, x.mul_(0.5), key)


@dataclass(frozen=True, slots=True)
class OtherDtype(Int8Blocks):
    """Stores other codes than it says."""

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        codes, scale = Int8Blocks.encode(self, x, key)
        return codes.to(torch.int16), scale


@dataclass(frozen=True, slots=True)
class Random(Int8Blocks):
    """Draws from torch's generator."""

    def encode(self, x: Tensor, key: eb.Key) -> Parts:
        return Int8Blocks.encode(self, x + torch.rand_like(x) * x.abs(), key)


@dataclass(frozen=True, slots=True)
class Infinite(Int8Blocks):
    """Divides by zero where a block is zero."""

    def decode(self, parts: Parts, shape: torch.Size, compute: Any) -> Tensor:
        return Int8Blocks.decode(self, parts, shape, compute) / (parts[1].amin() if parts[1].numel() else 1.0) * 0.0 + torch.where(
            parts[0].reshape(shape) == 0, torch.inf, 1.0
        )  # fmt: skip


@pytest.mark.parametrize(
    ("liar", "said"),
    [
        (OneScale(), "of the runs before and after element|a vector"),
        (Writes(), "after encode|encoded again"),
        (OtherDtype(), r"encode returned .*int16.*; parts\(\) promises"),
        (Random(), "encoded again with the same key"),
        (Infinite(), "not finite"),
    ],
)
def test_a_format_that_lies_is_caught(liar: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_format(replace(liar, block=8))


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(AssertionError, match="neither a StateFormat nor a ParamFormat"):
        check_format(object())  # type: ignore[arg-type]
