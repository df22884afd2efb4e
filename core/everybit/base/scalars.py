"""Hyperparameters and the 0-d expressions made of them.

A hyperparameter is a float, a 0-d tensor, or a schedule: a function from the number of updates done so far (0 at the first) to a
0-d tensor. It is never rounded to the dtype of the tensors it meets: bfloat16(0.999) is 1.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor

from everybit.base.barriers import materialize

Scalar = float | Tensor
Schedule = Callable[[Tensor], Tensor]
Hyperparameter = float | Tensor | Schedule


def require(
    name: str,
    value: object,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_high: bool = False,
    schedule: bool = True,
) -> None:
    """Refuse a hyperparameter that cannot be one.

    Floats are compared with ``[low, high]`` (``[low, high)`` if ``open_high``). The value of a tensor is not looked at, since that
    would make the host wait for the device; its shape and dtype are.

    Raises:
        TypeError: Neither a number, nor a 0-d float32 or float64 tensor, nor (where allowed) a schedule.
        ValueError: A number that is not finite, or out of range.
    """
    if isinstance(value, Tensor):
        if value.ndim != 0 or value.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name}: got a tensor of shape {tuple(value.shape)} and {value.dtype}; a tensor hyperparameter is 0-d and"
                " float32 or float64 (a lower precision would round it: bfloat16(0.999) is 1)."
            )
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if schedule and callable(value):
            return
        raise TypeError(
            f"{name}: got {value!r}; accepted are a number, a 0-d tensor{' or a schedule' if schedule else ''}."
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(
            f"{name}: got a whole number of {value.bit_length()} bits; accepted are those of 64 bits. Write it as a float."
        )
    above = value >= high if open_high else value > high
    if not math.isfinite(value) or value < low or above:
        left = "(-inf" if low == -math.inf else f"[{low:g}"
        right = "inf)" if high == math.inf else f"{high:g}" + (")" if open_high else "]")
        raise ValueError(f"{name}: got {value!r}; accepted is a finite number in {left}, {right}.")


def require_count(name: str, value: object, what: str, least: int = 1, *, optional: bool = False) -> None:
    """Refuse a value that is not a whole number of at least ``least``. None is accepted if it is ``optional``.

    Args:
        name: The parameter's.
        value: The value that was given for it.
        what: The accepted values, such as ``"a whole number of updates"``.
        least: The least number.
        optional: Whether None is accepted, too.

    Raises:
        ValueError: It is another number, or not a number.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name}: got {value!r}; accepted is {what}, at least {least}{', or None' if optional else ''}."
        )


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a hyperparameter accepts: those of ``[low, high]``, without an end that is open."""

    low: float = -math.inf
    high: float = math.inf
    open_high: bool = False
    open_low: bool = False
    schedule: bool = True

    def check(self, name: str, value: object) -> None:
        """Refuse a value that is not in the range; see :func:`require`."""
        require(name, value, self.low, self.high, open_high=self.open_high, schedule=self.schedule)
        if self.open_low and isinstance(value, (int, float)) and value == self.low:
            raise ValueError(f"{name}: got {value!r}; accepted is a number above {value or 'zero'}.")


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers of at least ``least``; ``what`` describes them in messages."""

    what: str = "a whole number"
    least: int = 1

    def check(self, name: str, value: object, *, optional: bool = False) -> None:
        """Refuse another value; see :func:`require_count`."""
        require_count(name, value, self.what, self.least, optional=optional)


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a ``Literal``."""

    kind: Any

    def check(self, name: str, value: object) -> None:
        """Refuse another value; see :func:`require_word`."""
        require_word(name, value, self.kind)


@dataclass(frozen=True, slots=True)
class Instance:
    """The values of a class of :class:`Options`."""

    kind: type[Options]

    def check(self, name: str, value: object, *, optional: bool = False) -> None:
        """Refuse a value of another class, with a TypeError."""
        if not isinstance(value, self.kind) and not (optional and value is None):
            which = f"{'are None and values such as' if optional else 'is'} {self.kind.example()}"
            raise TypeError(f"{name}: got {value!r}; accepted {which}.")


Finite = Annotated[Hyperparameter, Range()]
"""Any finite number."""
NonNegative = Annotated[Hyperparameter, Range(0.0)]
"""At least zero."""
AboveZero = Annotated[Hyperparameter, Range(0.0, open_low=True)]
"""Above zero."""
AtMostZero = Annotated[Hyperparameter, Range(high=0.0)]
"""At most zero."""
AtLeastOne = Annotated[Hyperparameter, Range(1.0)]
"""At least one."""
Share = Annotated[Hyperparameter, Range(0.0, 1.0)]
"""In [0, 1]."""
Rate = Annotated[Hyperparameter, Range(0.0, 1.0, open_high=True)]
"""A decay rate, in [0, 1)."""

FixedFinite = Annotated[Scalar, Range(schedule=False)]
"""Any finite number, and no schedule."""
FixedNonNegative = Annotated[Scalar, Range(0.0, schedule=False)]
"""At least zero, and no schedule."""
FixedShare = Annotated[Scalar, Range(0.0, 1.0, schedule=False)]
"""In [0, 1], and no schedule."""
FixedAboveZero = Annotated[Scalar, Range(0.0, open_low=True, schedule=False)]
"""Above zero, and no schedule."""
Constant = Annotated[float, Range(schedule=False)]
"""Any finite number, of which compiled code is made."""
PositiveConstant = Annotated[float, Range(0.0, open_low=True, schedule=False)]
"""A number above zero, of which compiled code is made."""

RateConstant = Annotated[float, Range(0.0, 1.0, open_high=True, schedule=False)]
"""A decay rate, in [0, 1), of which compiled code is made."""
NonNegativeConstant = Annotated[float, Range(0.0, schedule=False)]
"""At least zero; compiled code is made of it."""

Count = Annotated[int, Whole()]
"""A whole number, at least 1."""
CountFromZero = Annotated[int, Whole(least=0)]
"""A whole number, at least 0."""
Updates = Annotated[int, Whole("a whole number of updates")]
"""A number of updates, at least 1."""
UpdatesFromZero = Annotated[int, Whole("a whole number of updates", 0)]
"""A number of updates, at least 0."""
Rows = Annotated[int, Whole("a whole number of rows")]
"""A number of rows, at least 1."""


class Ranged:
    """Base class of dataclasses whose fields say in their annotations what they accept.

    That is a range, as ``b1: Rate = 0.9`` or ``limit: NonNegative | None = None``, a whole number, as ``period: Updates = 10``, the words
    of a ``Literal`` with a name, or :class:`Options`. Values are checked when an object is made. A ``__post_init__`` with further checks
    calls this one.
    """

    __slots__ = ()

    accepts: ClassVar[tuple[tuple[str, Range | Whole | Words | Instance, bool], ...]] = ()
    """What each field with a check accepts, and whether it accepts None, too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__slots__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            return  # a base class of dataclasses, without fields
        known = vars(sys.modules.get(cls.__module__, math))
        for field, annotation in inspect.get_annotations(cls).items():
            # Names are looked up, and no annotation is evaluated: inside of a function it may have no meaning yet.
            name, bar, _ = str(annotation).partition(" | None")
            kind = known.get(name) if isinstance(annotation, str) else annotation
            own: list[Any] = [one for one in getattr(kind, "__metadata__", ()) if isinstance(one, (Range, Whole))]
            if get_origin(kind) is Literal:
                own = [Words(kind)]
            elif isinstance(kind, type) and issubclass(kind, Options):
                own = [Instance(kind)]
            kept = tuple(old for old in cls.accepts if old[0] != field)
            cls.accepts = (*kept, *((field, one, bool(bar)) for one in own))

    def __post_init__(self) -> None:
        for name, one, is_optional in self.accepts:
            value = getattr(self, name)
            if isinstance(one, (Whole, Instance)):
                one.check(name, value, optional=is_optional)
            elif not is_optional or value is not None:
                one.check(name, value)

    def at(self, step: Tensor | None, *names: str) -> tuple[Scalar, ...]:
        """The values of hyperparameters at a step, by the names of their fields; see :func:`at`."""
        return tuple([at(getattr(self, name), step, name=name) for name in names])


class Options(Ranged):
    """Base class of values that hold several options of a transform, so that its signature stays short."""

    __slots__ = ()

    @classmethod
    def example(cls) -> str:
        """How such a value is written."""
        return f"everybit.{cls.__name__}(...)"


def square_root(x: Scalar) -> Scalar:
    """The square root of a number, or of a 0-d tensor."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def beside(value: Scalar, like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A number as a 0-d tensor where another tensor is, made there: a number that is copied there would make a compiled step wait."""
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=like.device)


def as_tensor(value: Scalar) -> Tensor:
    """A number as a 0-d float64 tensor on the host, which operations on tensors of any device take; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device="cpu")


def clamp(x: Tensor, low: Scalar, high: Scalar) -> Tensor:
    """The elements of ``x``, at least ``low`` and then at most ``high``.

    0-d tensors do not go through torch's clamp, which refuses a 0-d tensor on the host beside elements on a device.
    """
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    return torch.minimum(torch.maximum(x, as_tensor(low).to(x.dtype)), as_tensor(high).to(x.dtype))


def is_zero(value: object) -> bool:
    """Whether a value is the number zero. A tensor is not looked at: its value may be on a device."""
    return isinstance(value, (int, float)) and value == 0


def at(value: Hyperparameter, step: Tensor | None, *, name: str) -> Scalar:
    """The value at this step: schedules are evaluated at the number of updates done before it.

    Raises:
        ValueError: A schedule where steps are not counted.
        TypeError: A schedule that gives anything but a 0-d float32 or float64 tensor.
    """
    if isinstance(value, float):
        return _number(value, step)
    if isinstance(value, Tensor) or not callable(value):
        return value
    now: object = value(require_step(step, name) - 1)
    if not isinstance(now, Tensor):
        raise TypeError(f"{name}: its schedule gave {now!r}; accepted is a 0-d float32 or float64 tensor.")
    require(f"{name}, from its schedule", now)
    return materialize(now)


def _number(value: float, step: Tensor | None) -> Scalar:
    """A number as it may be computed with: in code that is being compiled a 0-d float64 tensor beside the step, else the number.

    A number that was another at an earlier call is a symbol to Dynamo. Inductor (torch 2.13) makes a tensor of a symbol that is
    multiplied or added, and in the same graph puts the number of the second call into every other operation with it, such as ``b ** step``,
    without a guard. So a symbol is multiplied here, and all that follows sees a tensor.

    It is beside the step, since Inductor folds constants as tensors of one dimension, and refuses the product of one on the host and one on
    a device.
    """
    if not torch.compiler.is_compiling():
        return value
    return torch.ones((), dtype=torch.float64, device="cpu" if step is None else step.device) * value


def require_word(name: str, value: object, words: Any) -> None:
    """Refuse a value that is none of the words of a ``Literal``.

    Raises:
        ValueError: It is another value.
    """
    if value not in get_args(words):
        raise ValueError(f"{name}: got {value!r}; accepted are {', '.join(map(repr, get_args(words)))}.")


def require_step(step: Tensor | None, who: str) -> Tensor:
    """Return the step of a context that needs to have one.

    Raises:
        ValueError: The context has no step.
    """
    if step is None:
        raise ValueError(
            f"{who} depends on the step and nobody counts it: use it inside eb.chain(...) or eb.with_policy(...), which do,"
            " or pass ctx=eb.Context(step=...)."
        )
    return step
