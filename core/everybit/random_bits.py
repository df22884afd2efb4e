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
        # The index is multiplied by a number that belongs to the key, so that two keys do not draw one sequence, shifted.
        factor, outer = self._words()
        low, high, carry = _index(like, self.first)
        word = settle(_mix(high ^ outer))
        if carry is not None:
            word = torch.where(carry, settle(_mix((high + 1) ^ outer)), word)
        return _mix(low * factor + word, skip_first=True).reshape(like.shape)

    def _words(self) -> tuple[Tensor, Tensor]:
        """An odd factor, and another word, from seed, stream and step: computed once for the whole tensor."""
        salt = stream(f"{self.seed}:{self.stream}")
        low, high = self.step.to(torch.int32), (self.step >> 32).to(torch.int32)
        outer = settle(_mix(_mix(low ^ _signed(salt)) ^ high))
        return settle(_mix(outer ^ _signed(salt * 0x9E3779B1 + 0x7F4A7C15)) | 1), outer


def _index(like: Tensor, first: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The elements' global indices in 32-bit arithmetic, which vectorises.

    Returns:
        The lower words; the upper word of the first element; whether an element is beyond a carry into the upper word (None: no element
        can be). A tensor too large to be counted so has all upper words.
    """
    if like.numel() >= 1 << 31:
        index = torch.arange(like.numel(), dtype=torch.int64, device=like.device) + first
        return index.to(torch.int32), (index >> 32).to(torch.int32), None
    count = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    if isinstance(first, int):
        low, high = count + _signed(first), torch.full((), _signed(first >> 32), dtype=torch.int32, device=like.device)
        until_carry = (1 << 32) - (first & 0xFFFFFFFF)
        return low, high, None if until_carry >= like.numel() else count >= until_carry
    left = ((1 << 32) - (first & 0xFFFFFFFF)).clamp(max=(1 << 31) - 1)
    return count + settle(first.to(torch.int32)), (first >> 32).to(torch.int32), count >= settle(left.to(torch.int32))


def stream(name: str) -> int:
    """A number for a name: ``"variance"`` and ``"params"`` draw different bits. FNV-1a, in Python: compilers trace through it."""
    number = 0x811C9DC5
    for character in name:
        number = ((number ^ ord(character)) * 0x01000193) & 0xFFFFFFFF
    return number


def uniform(bits: Tensor) -> Tensor:
    """float32 in [0, 1), multiples of 2**-24."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


def _signed(word: int) -> int:
    """The low 32 bits of ``word`` as the int32 with the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def _mix(x: Tensor, *, skip_first: bool = False) -> Tensor:
    """A bijection of 32-bit words in which every input bit flips every output bit with probability close to 1/2.

    C. Wellons's ``lowbias32`` (https://nullprogram.com/blog/2018/07/31/, public domain); its first shift may be skipped after a
    multiplication. Products wrap; right shifts are made logical by masking off the copies of the sign.
    """
    if not skip_first:
        x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
