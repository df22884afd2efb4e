"""The promises of a number format, for formats of your own."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from everybit.base import DTYPES, LOW_DTYPES, ComputeDType, FloatDType, Key
from everybit.formats import SLOT_KINDS, Format, ParamFormat, StateFormat
from everybit.testing.examples import assert_same_bits

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7, 5), (130,), (3, 2, 33))
COMPUTE: ComputeDType = "float32"


def check_format(format: Format) -> None:
    """Check that a format is a pure pair of functions, with parts as described, in pieces and compiled as well as whole.

    It is tried for both kinds of slots, and for parameters of each 16-bit dtype that it accepts, on values from 1e-8 to 1e4 and zeros:

    * The parts have the dtypes and shapes of ``parts()``, decoding gives a value of the same shape in the compute dtype, and a value that
      is finite and not large is finite when it is decoded.
    * Encoding twice with one key gives the same bits, and writes to no argument.
    * Runs of elements that begin at multiples of every part's ``block`` have the parts of the whole.
    * Compiled with default options it gives eager code's bits, for whole blocks.
    * It is a value: equal to a copy, with the same hash.

    Args:
        format: Of a class that subclasses :class:`everybit.StateFormat`, :class:`everybit.ParamFormat` or both.

    Raises:
        AssertionError: It breaks one; the message says which, and for what.
    """
    tried = 0
    for what, one, low in _uses(format):
        tried += 1
        for shape in SHAPES:
            where = f"{what}, values of shape {shape}"
            x = _values(shape, low=low, non_negative="non-negative" in what)
            _check_described(one, x, where)
            _check_runs(one, x, where)
        # What ends inside a block is stepped uncompiled, since Inductor leaves elements out there; see everybit_torch.
        block = math.lcm(*(spec.block for spec in one.parts()))
        size = 130 if block == 1 else max(128 // block, 1) * block
        _check_compiled(one, _values((size,), low=low, non_negative="non-negative" in what), what)
        if hash(one) != hash(copy.copy(one)) or one != copy.copy(one):
            raise AssertionError(f"{what}: is not equal to itself; promised is a value: a frozen dataclass.")
    if not tried:
        raise AssertionError(f"{format}: is neither a StateFormat nor a ParamFormat that accepts a 16-bit dtype.")


def _uses(format: Format) -> Iterator[tuple[str, Format, FloatDType | None]]:
    """Each use of a format, with every dtype named, and the dtype that a model has then."""
    if hasattr(format, "for_slot"):
        slots: StateFormat = format  # type: ignore[assignment]
        for kind in SLOT_KINDS:
            yield f"{format} for {kind} slots", slots.for_slot(kind, COMPUTE), None
    if hasattr(format, "for_params"):
        params: ParamFormat = format  # type: ignore[assignment]
        for model in LOW_DTYPES:
            try:
                one = params.for_params(model)
            except ValueError:
                continue
            yield f"{format} for {model} parameters", one, model


def _key(first: int = 0) -> Key:
    return Key(3, torch.tensor(5), 11, first)


def _values(shape: tuple[int, ...], *, low: FloatDType | None, non_negative: bool) -> Tensor:
    generator = torch.Generator().manual_seed(17)
    # A float16 model holds no more than 65504.
    size = 10.0 ** (torch.rand(shape, generator=generator) * (8 if low == "float16" else 12) - 8)
    sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    x = size if non_negative else size * sign
    return torch.where(torch.rand(shape, generator=generator) < 0.1, torch.zeros(()), x)


def _check_described(format: Format, x: Tensor, where: str) -> None:
    before = x.clone()
    parts = format.encode(x, _key())
    specs = format.parts()
    got = [(part.dtype, tuple(part.shape)) for part in parts]
    expected = [(spec.dtype, spec.shape(x.shape)) for spec in specs]
    if not isinstance(parts, tuple) or got != expected:
        raise AssertionError(f"{where}: encode returned {got}; parts() promises {expected}.")
    assert_same_bits(format.encode(x, _key()), parts, f"{where}: encoded again with the same key")
    kept = tuple(part.clone() for part in parts)
    value = format.decode(parts, x.shape, COMPUTE)
    if value.shape != x.shape or value.dtype is not DTYPES[COMPUTE]:
        raise AssertionError(
            f"{where}: decode returned {value.dtype} of shape {tuple(value.shape)}; promised is {COMPUTE} of shape {tuple(x.shape)}."
        )
    if not torch.isfinite(value).all():
        raise AssertionError(f"{where}: decode returned numbers that are not finite, of numbers that are.")
    assert_same_bits(parts, kept, f"{where}: the parts, after decode")
    assert_same_bits(x, before, f"{where}: the value, after encode")


def _check_runs(format: Format, x: Tensor, where: str) -> None:
    block = math.lcm(*(spec.block for spec in format.parts()))
    flat = x.reshape(-1)
    edge = len(flat) // 2 // block * block
    whole = format.encode(flat, _key())
    runs = [format.encode(flat[:edge], _key()), format.encode(flat[edge:], _key(edge))]
    for spec, part, pieces in zip(format.parts(), whole, zip(*runs, strict=True), strict=True):
        assert_same_bits(
            torch.cat(pieces), part, f"{where}: part {spec.name!r} of the runs before and after element {edge}"
        )
    assert_same_bits(format.decode(whole, flat.shape, COMPUTE), format.decode(format.encode(x, _key()), x.shape, COMPUTE).reshape(-1),
                     f"{where}: a vector, against the tensor")  # fmt: skip


def _check_compiled(format: Format, x: Tensor, what: str) -> None:
    def both(x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        parts = format.encode(x, _key())
        return parts, format.decode(parts, x.shape, COMPUTE)

    torch._dynamo.reset()
    assert_same_bits(torch.compile(both, fullgraph=True)(x), both(x), f"{what}: compiled, against eager")
