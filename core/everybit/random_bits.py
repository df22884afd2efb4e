"""Random bits that depend on where and when, and on nothing else.

A generator is a hidden state: another order of calls, another number of processes or a resume, and the numbers differ. Here the
bits of an element are a hash of (seed, step, stream, global index of the element), so they are the same on one process and on
eight, eager and compiled, in one go and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everybit.borders import settle


@dataclass(frozen=True, slots=True)
class Key:
    """Names one tensor's worth of random bits.

    Attributes:
        seed: Chosen by the user; one run, one seed.
        step: Number of the update, int64, 0-d.
        stream: Tells apart tensors that are rounded in the same step; see :func:`stream`.
        first: Global index of the tensor's first element.
    """

    seed: int
    step: Tensor
    stream: int
    first: int | Tensor = 0

    def bits(self, like: Tensor) -> Tensor:
        """int32 of the shape of ``like``; every bit is a fair coin."""
        outer, inner = self._words()
        low, high = _index(like, self.first)
        # The step's word goes in first: no compiler can then reason about the range of what is multiplied.
        return _mix(_mix(low ^ outer) ^ (inner + _times(high, 0x3C6EF372))).reshape(like.shape)

    def _words(self) -> tuple[Tensor, Tensor]:
        """Two 32-bit words from seed, stream and step, computed once for the whole tensor."""
        salt = stream(f"{self.seed}:{self.stream}")
        low, high = self.step.to(torch.int32), (self.step >> 32).to(torch.int32)
        outer = _mix(_mix(low ^ _signed(salt)) ^ high)
        return settle(outer), settle(_mix(outer ^ _signed(salt * 0x9E3779B1 + 0x7F4A7C15)))


def _index(like: Tensor, first: int | Tensor) -> tuple[Tensor, Tensor | int]:
    """The lower and upper words of the elements' global indices.

    In 32-bit arithmetic, which vectorises, where the tensor itself is small enough to be counted in it.
    """
    if like.numel() >= 1 << 31:
        index = torch.arange(like.numel(), dtype=torch.int64, device=like.device) + first
        return index.to(torch.int32), (index >> 32).to(torch.int32)
    count = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    if isinstance(first, int):
        low = count + _signed(first)
        if (first & 0xFFFFFFFF) + like.numel() <= 1 << 32:
            return low, first >> 32
        return low, (first >> 32) + _below(low, torch.full_like(count[:1], _signed(first)))
    start_low, start_high = settle(first.to(torch.int32)), settle((first >> 32).to(torch.int32))
    low = count + start_low
    return low, start_high + _below(low, start_low)


def _below(low: Tensor, start: Tensor) -> Tensor:
    """1 where counting on from ``start`` has run over 32 bits, as an unsigned comparison shows; else 0."""
    return ((low ^ -0x80000000) < (start ^ -0x80000000)).to(torch.int32)


def stream(name: str) -> int:
    """A number for a name: ``"variance"`` and ``"params"`` draw different bits. FNV-1a, in Python: compilers trace through it."""
    number = 0x811C9DC5
    for character in name:
        number = ((number ^ ord(character)) * 0x01000193) & 0xFFFFFFFF
    return number


def uniform(bits: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


def _times(x: Tensor | int, factor: int) -> Tensor | int:
    return _signed(x * factor) if isinstance(x, int) else x * factor


def _signed(word: int) -> int:
    """The low 32 bits of ``word`` as the int32 with the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every input bit flips every output bit with probability close to 1/2.

    C. Wellons's ``lowbias32`` (https://nullprogram.com/blog/2018/07/31/, public domain). Products wrap; right shifts are made
    logical by masking off the copies of the sign.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
