"""Random bits that depend only on the seed, the step and the element's place.

A generator is a hidden state: another order of calls, another number of processes or a resume, and the numbers differ. Here the
bits of an element are a hash of (seed, step, stream, global index of the element), so they are the same on one process and on
eight, eager and compiled, in one go and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, overload

import torch
from torch import Tensor

from everybit.base import rounding
from everybit.base.barriers import cos, log, materialize, sqrt
from everybit.base.blocks import Blocks, FirstElement, Scattered
from everybit.base.dtypes import LowDType


class Lane(NamedTuple):
    """One of three 16-bit numbers that a word gives, so that a single hash serves three tensors of equal elements.

    The first two numbers are the halves of the word. The third is a sum of odd multiples of both, modulo 2**16: with either half given it
    takes every value once. Any two of the three numbers are therefore independent. All three together are not, because two determine the
    third; but no three rounding errors that they decide have a mean product above 4e-8, whatever the numbers that are rounded.

    Attributes:
        stream: The stream of the shared words.
        number: 0 for the lower 16 bits, 1 for the upper, 2 for the third number.
        drawn: The words, as soon as they are drawn for one of the tensors; all three have the same list.
    """

    stream: int
    number: Literal[0, 1, 2]
    drawn: list[Tensor]


class Numbering(NamedTuple):
    """The indices of a tensor's elements.

    Attributes:
        first: The index of the first element, or all indices of a buffer of elements that are not neighbours.
        kind: The name of the elements that are counted together. Elements of two kinds may have one index, and draw from different streams.
    """

    first: FirstElement
    kind: str

    @staticmethod
    def through(
        tensors: Sequence[Tensor], first: FirstElement, kinds: Sequence[str] | None = None
    ) -> tuple[Numbering, ...]:
        """Number the elements of several tensors, those of each kind through all tensors, as they lie in a flat buffer.

        Args:
            tensors: The tensors in order.
            first: The index of the first element of each kind; of a single tensor of elements that are not neighbours, all indices.
            kinds: The kind of each tensor; None: all have the same kind.
        """
        named = [""] * len(tensors) if kinds is None else kinds
        if isinstance(first, (Blocks, Scattered)):
            return (Numbering(first, *named),)
        offsets = dict.fromkeys(named, 0)
        found = []
        for tensor, kind in zip(tensors, named, strict=True):
            found.append(Numbering(first + offsets[kind], kind))
            offsets[kind] += tensor.numel()
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Key:
    """Names the random bits of one tensor.

    Attributes:
        seed: Chosen by the user; one run, one seed. An int of at most 64 bits, or an int64 tensor, 0-d: under ``torch.func.vmap`` each
            member of a population may have a seed of its own.
        step: Number of the update, int64, 0-d.
        stream: Tells apart tensors that are rounded in the same step; see :func:`stream`.
        first: The global index of the tensor's first element, or all indices of a buffer of elements that are not neighbours.
        lane: Where 16 bits come from, if other tensors of the same elements take theirs from the same words.
    """

    seed: int | Tensor
    step: Tensor
    stream: int
    first: FirstElement = 0
    lane: Lane | None = None

    def bits(self, like: Tensor) -> Tensor:
        """Return 32 random bits per element, as int32 of the shape of ``like``."""
        return self._draw(like, self.stream)

    def bits16(self, like: Tensor) -> Tensor:
        """16 random bits per element, in the lower half of an int32; the upper half is to be masked off."""
        if self.lane is None:
            return self.bits(like)
        stream, number, drawn = self.lane
        if not drawn:
            drawn.append(self._draw(like, stream))
        (word,) = drawn
        if number == 0:
            return word
        upper = word >> 16
        return upper if number == 1 else upper.mul_(_THIRD_OF_UPPER).add_(word, alpha=_THIRD_OF_LOWER)

    def dither(self, dtype: LowDType, like: Tensor) -> Tensor:
        """Return random bits to round to ``dtype`` with: 16 for bfloat16, which drops 16; 32 for float16 and its finer subnormals."""
        return self.bits16(like) if dtype == "bfloat16" else self.bits(like)

    def _draw(self, like: Tensor, stream: int) -> Tensor:
        word, inner = self._words(stream)
        if isinstance(self.first, Blocks):
            return self._draw_blocks(like, self.first, word, inner)
        if isinstance(self.first, Scattered):
            scattered = materialize(_mix(word ^ self.first.high))
            return _mix(self.first.low + scattered, _settled(inner)).reshape(like.shape)
        count, low, high, carry = _index(like, _known(self.first, self.step))
        # Indices and the key's first word are added before the elements are looked at: one operation on each element, not two.
        start = _settled(_add(_mix(word ^ high), low))
        if carry is not None:
            carried = _settled(_add(_mix(word ^ _add(high, 1)), low))
            one, other = (count.new_tensor(x) if isinstance(x, int) else x for x in (carried, start))
            start = torch.where(carry, one, other)
        return _mix(count + start, _settled(inner)).reshape(like.shape)

    def _draw_blocks(self, like: Tensor, blocks: Blocks, word: Word, inner: Word) -> Tensor:
        """The same words as of the parameters of a buffer with gaps each by itself; those in gaps are other elements', and not used."""
        low, high = blocks.first.to(torch.int32), (blocks.first >> 32).to(torch.int32)
        place = blocks.places(like)
        start = blocks.spread(materialize(_mix(word ^ high) + low))
        left = ((1 << 32) - (blocks.first & _WORD)).clamp(max=blocks.size).to(torch.int32)
        carried = blocks.spread(materialize(_mix(word ^ (high + 1)) + low))
        start = torch.where(place >= blocks.spread(materialize(left)), carried, start)
        return _mix(place + start, _settled(inner)).reshape(like.shape)

    def _words(self, stream: int) -> tuple[Word, Word]:
        """Two words that depend on every bit of seed, stream and step, each in its own way: computed once for the whole tensor.

        The first is added to the indices, the second in the middle of the mix. Two keys that agree in a word by chance, or
        differ by a small number in their first words, therefore do not draw one sequence, shifted.
        """
        # The stream is mixed first, or seed 7 of stream 11 would be seed 11 of stream 7.
        one: Word = _mix(stream)
        two: Word = _mix(stream ^ _SECOND)
        for number in (_known(self.seed, self.step), cast(Word, rounding.on_host(self.step))):
            low, high = _low(number), _low(number >> 32)
            one, two = _mix(_mix(low ^ one) ^ high), _mix(_mix(_add(low, two)) ^ high)
        return one, two


def require_seed(value: object, *, field: str = "seed") -> None:
    """Refuse a seed that is not a whole number of at most 64 bits.

    Raises:
        TypeError: Neither an int nor an int64 tensor, 0-d.
        ValueError: An int that does not fit into 64 bits.
    """
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype is not torch.int64:
            raise TypeError(
                f"{field}: got a tensor of shape {tuple(value.shape)} and {value.dtype}; accepted is a whole number, or a 0-d int64 tensor."
            )
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}: got {value!r}; accepted is a whole number, or a 0-d int64 tensor.")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{field}: got {value}; accepted is a whole number in [-2**63, 2**63).")


Word = Tensor | int
"""32 bits as an int32 tensor, or as a Python number of the same value: arithmetic on the host takes a hundredth of the time."""


def _low(number: Word) -> Word:
    """The lower 32 bits of a number of 64."""
    return _signed(number) if isinstance(number, int) else number.to(torch.int32)


def _add(one: Word, other: Word) -> Word:
    found = one + other
    return _signed(found) if isinstance(found, int) else found


def _settled(x: Word) -> Word:
    return materialize(x) if isinstance(x, Tensor) else x


def _known(value: int | Tensor, like: Tensor) -> int | Tensor:
    """``value``; as a tensor, if a compiler traces it as a symbol (``dynamic=True``), of which it cannot compute bits in Python."""
    if isinstance(value, Tensor) or not torch.compiler.is_compiling():
        return value
    from torch.fx.experimental.symbolic_shapes import has_static_value

    # Settled, because Inductor's CPU code shifts a symbol as if it were a float.
    return value if has_static_value(value) else materialize(like.new_full((), value))


def _index(like: Tensor, first: int | Tensor) -> tuple[Tensor, Word, Word, Tensor | None]:
    """The elements' global indices in 32-bit arithmetic, which vectorises.

    Returns:
        A count of the elements, and the lower word of the first index: their sum gives the indices' lower words; the upper word of the
        first index; whether an element is beyond a carry into the upper word (None: no element can be). A tensor too large to be counted
        so has all upper words, and its count the lower words.
    """
    if like.numel() >= 1 << 31:
        index = torch.arange(like.numel(), dtype=torch.int64, device=like.device) + first
        return index.to(torch.int32), 0, (index >> 32).to(torch.int32), None
    count = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    if isinstance(first, int):
        until_carry = (1 << 32) - (first & _WORD)
        carry = None if until_carry >= like.numel() else count >= until_carry
        return count, _signed(first), _signed(first >> 32), carry
    left = ((1 << 32) - (first & _WORD)).clamp(max=(1 << 31) - 1)
    return count, first.to(torch.int32), (first >> 32).to(torch.int32), count >= materialize(left.to(torch.int32))


def stream(name: str) -> int:
    """A number for a name: ``"variance"`` and ``"params"`` draw different bits. FNV-1a, in Python: compilers trace through it."""
    found = None if torch.compiler.is_compiling() else _STREAMS.get(name)
    return _hashed(name) if found is None else found


def _hashed(name: str) -> int:
    number = 0x811C9DC5
    for character in name:
        number = ((number ^ ord(character)) * 0x01000193) & _WORD
    if not torch.compiler.is_compiling():
        _STREAMS[name] = number
    return number


_STREAMS: dict[str, int] = {}


_WORD = 0xFFFFFFFF
# Of the third number of a word. Two odd factors whose multiples are never both small: tests/core/test_random_bits.py has the bound.
_THIRD_OF_LOWER, _THIRD_OF_UPPER = 0x9E37, 0x79B1
# Tells the second word of a key from the first: the fractional bits of the square root of 2, as an int32.
_SECOND = 0x6A09E667


def _signed(word: int) -> int:
    """The low 32 bits of ``word`` as the int32 with the same bits."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word


@overload
def _mix(x: Tensor, inner: Word = 0) -> Tensor: ...


@overload
def _mix(x: Word) -> Word: ...


def _mix(x: Word, inner: Word = 0) -> Word:
    """A bijection of 32-bit words in which every input bit flips every output bit with a probability of 1/2, to within about 2e-5.

    C. Wellons's ``triple32`` (https://github.com/skeeto/hash-prospector, public domain), with a word added after its first round. Products
    wrap; right shifts are made logical by masking off the copies of the sign. Two rounds (``lowbias32``) are not enough for indices that
    differ in a few high bits alone: rounding noise of elements 2**26 apart was correlated by 7 standard deviations over 2**20 pairs.
    """
    if isinstance(x, int):
        return _signed(_mix_number(x))
    if x.is_meta and not x.ndim:
        return x  # a number without a value; plans, which ask for many, spend most of their time here else
    # Each line makes a tensor and writes to no argument.
    x = (x >> 17).bitwise_and_(0x7FFF).bitwise_xor_(x).mul_(_FIRST_FACTOR)
    x = (x >> 11).bitwise_and_(0x1FFFFF).bitwise_xor_(x)
    x = (x + inner if isinstance(inner, Tensor) else x.add_(inner)).mul_(_SECOND_FACTOR)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_THIRD_FACTOR)
    return (x >> 14).bitwise_and_(0x3FFFF).bitwise_xor_(x)


_FIRST_FACTOR, _SECOND_FACTOR, _THIRD_FACTOR = _signed(0xED5AD4BB), _signed(0xAC4C1B51), 0x31848BAB


def _mix_number(x: int) -> int:
    """:func:`_mix` of a number, on the host; 0 to 2**32 - 1."""
    x &= _WORD
    x = (x ^ (x >> 17)) * 0xED5AD4BB & _WORD
    x = (x ^ (x >> 11)) * 0xAC4C1B51 & _WORD
    x = (x ^ (x >> 15)) * 0x31848BAB & _WORD
    return x ^ (x >> 14)


def normal(like: Tensor, radius: Key, angle: Key) -> Tensor:
    """A standard normal number for each element of ``like``, float64 (Box and Muller 1958).

    Their greatest possible magnitude is 5.9.

    Args:
        like: A tensor of the shape and device of the numbers.
        radius: Of :meth:`everybit.Context.keys`, as ``angle``; two that draw different bits.
        angle: The other.
    """
    # In the middle of its interval, so that no logarithm of zero is taken.
    share = rounding.uniform(radius.bits(like)).double() + 2.0**-25
    turn = rounding.uniform(angle.bits(like)).double() * (2 * math.pi)
    return sqrt(materialize(log(materialize(share)) * -2)) * cos(materialize(turn))
