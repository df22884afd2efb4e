"""The protocol of formats, the description of their parts, and functions that formats of 16-bit values share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NoReturn, Protocol, get_args

import torch
from torch import Tensor

from everybit.base import LOW_DTYPES, ComputeDType, FloatDType, Key, LowDType

Rounding = Literal["nearest", "stochastic"]

HALF_UNITS: Mapping[FloatDType, float] = MappingProxyType(
    {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
)
"""Half a unit in the last place of 1: the largest relative error of rounding to nearest."""

Parts = tuple[Tensor, ...]


SlotKind = Literal["signed", "non-negative"]
"""The range of a slot's numbers: of either sign, or never below zero (running means of squares)."""

SLOT_KINDS: tuple[SlotKind, ...] = get_args(SlotKind)


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One of the tensors that a format stores.

    Attributes:
        name: The part's name in state dicts and checkpoints: ``"residual"``, ``"scale"``.
        dtype: The dtype of its numbers.
        block: How many elements of the value one number of it covers. With 1 the part has the value's shape. With more it is 1-d:
            number ``i`` covers the elements ``i * block`` to ``(i + 1) * block`` of the value, in the order of their indices, and the last
            one those that are left.
    """

    name: str
    dtype: torch.dtype
    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"PartSpec.name: got {self.name!r}; accepted is an identifier, such as 'scale'.")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"PartSpec.dtype: got {self.dtype!r}; accepted is a torch.dtype.")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"PartSpec.block: got {self.block!r}; accepted is a number of elements, 1 or more.")

    def count(self, elements: int) -> int:
        """Return how many numbers of the part cover a number of elements of the value."""
        return -(-elements // self.block)

    def shape(self, value: Sequence[int]) -> tuple[int, ...]:
        """The part's shape, for a value of this shape."""
        return tuple(value) if self.block == 1 else (self.count(math.prod(value)),)

    def range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of its numbers that cover the elements ``start`` to ``stop``.

        Raises:
            ValueError: One of them covers elements before ``start``, too.
        """
        if start % self.block:
            raise ValueError(f"cannot be cut before element {start}; accepted is a multiple of {self.block}.")
        return start // self.block, self.count(stop)

    @property
    def bytes_per_element(self) -> float:
        """Bytes for each element of a long value."""
        return self.dtype.itemsize / self.block


class Format(Protocol):
    """Two pure functions, from a computed value to the stored tensors and back, and the facts that a policy needs about them.

    Formats are values: frozen dataclasses, which can be compared and hashed. A format that can store a slot of the state is a
    :class:`StateFormat` too, a format that can store parameters a :class:`ParamFormat`. Classes that subclass them have the defaults that
    are given here.

    A value may be encoded as a whole or in runs of elements, which begin at multiples of every part's ``block``; the parts of the runs are
    those of the whole. So a number of a part may depend only on the elements that it covers.
    """

    __slots__ = ()

    @property
    def draws_bits(self) -> bool:
        """Whether ``encode`` draws random bits from its key. By default it does not."""
        return False

    @property
    def loses_small_numbers(self) -> bool:
        """Whether small numbers that float32 holds are stored as zero, so that squares of gradients would be lost. By default no."""
        return False

    def parts(self) -> tuple[PartSpec, ...]:
        """Describe the tensors that are stored, in order; every dtype is known, as after ``for_slot`` or ``for_params``."""
        ...

    def encode(self, x: Tensor, key: Key) -> Parts:
        """The parts that keep ``x``, in the shapes of :meth:`PartSpec.shape`. ``key`` names the random bits, for formats that draw any."""
        ...

    def decode(self, parts: Parts, shape: torch.Size, compute: ComputeDType) -> Tensor:
        """The number that the parts keep, of this shape, in the compute dtype."""
        ...

    def resolution(self, compute: ComputeDType) -> float:
        """The largest change, relative to the number that is kept, that ``encode`` may undo every time: half a unit in the last place.

        0 if the format is unbiased, or if it keeps everything that the compute dtype holds.
        """
        ...

    def objection(self, compute: ComputeDType) -> str | None:
        """Why the format cannot store values of this dtype, and a format that can; None if it can, which is the default."""
        return None


class StateFormat(Format, Protocol):
    """A format that can store a slot of an optimizer's state; all of its parts belong to the state."""

    __slots__ = ()

    def for_slot(self, kind: SlotKind, compute: ComputeDType) -> Format:
        """This format for a slot with numbers of this kind, with every dtype named.

        The names and blocks of its parts are the same for every kind.
        """
        ...


class ParamFormat(Format, Protocol):
    """A format that can store parameters: its first part is the model's own tensor, the others belong to the optimizer's state."""

    __slots__ = ()

    def for_params(self, model: FloatDType) -> Format:
        """This format for parameters that the model holds in this dtype, with every dtype named.

        Raises:
            ValueError: It cannot store them; the message says which formats can.
        """
        ...


_PARTS: dict[Format, tuple[PartSpec, ...]] = {}


def parts_of(format: Format) -> tuple[PartSpec, ...]:
    """Return ``format.parts()``, found once for each format; compiled code finds it while it is traced."""
    if torch.compiler.is_compiling():
        return format.parts()
    found = _PARTS.get(format)
    if found is None:
        found = _PARTS[format] = format.parts()
    return found


def unnamed(who: Format) -> NoReturn:
    """Refuse to encode in a format with a dtype that is left to the context.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{who}: its dtype was left to the context; call .for_params(dtype) or .for_slot(kind, compute) first."
    )


SPLITS_FLOAT32 = (
    "the two-part and stochastic formats split a float32. Accepted with float64 are Nearest, and Master('float64')"
    " for parameters."
)
"""The objection of formats that are made for float32."""


def low(dtype: FloatDType, who: str) -> LowDType:
    """Return a dtype of 16 bits.

    Raises:
        ValueError: It has more; the message begins with ``who``.
    """
    if dtype not in LOW_DTYPES:
        raise ValueError(
            f"{who} splits a number over a 16-bit tensor and something else; got a {dtype} tensor, which already holds all that"
            f" is computed. Accepted are bfloat16 and float16 tensors; use Nearest() for {dtype}."
        )
    return "bfloat16" if dtype == "bfloat16" else "float16"
