"""Schedules: hyperparameters that follow the step.

A schedule is a function from the number of updates done so far (0 at the first, int64, 0-d) to a 0-d float64 tensor. These are frozen
values: they compare, print and pickle. They read the step on its device and never wait for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from everybit.base import Schedule, cos, is_zero, require, require_count

P = ParamSpec("P")
R = TypeVar("R")


def taken_by_name(
    positions: int, *names: str, refused_for: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Say what to write where arguments that are taken by name are given by position.

    A schedule with a name of optax's takes by position what optax takes there, so that no call of optax's means something else here.

    Args:
        positions: Number of arguments that are taken by position.
        *names: The arguments that followed these in versions before 0.3, in order.
        refused_for: Why they are refused there. None: they are accepted with a DeprecationWarning until version 0.4.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def by_name(*args: P.args, **kwargs: P.kwargs) -> R:
            extra = args[positions:]
            if not extra or len(extra) > len(names):
                return function(*args, **kwargs)
            title = function.__name__
            write = ", ".join(f"{name}={value!r}" for name, value in zip(names, extra, strict=False))
            if refused_for is not None:
                raise TypeError(
                    f"{title}: write {write}. Got {', '.join(map(repr, extra))} by position; {refused_for}."
                )
            named: dict[str, Any] = dict(zip(names, extra, strict=False))
            result = function(*args[:positions], **named, **kwargs)  # type: ignore[arg-type]  # names are the function's own
            warnings.warn(
                f"{title}: write {write}. By position this is deprecated, because optax's function of this name has another"
                f" argument there; version 0.4 refuses it.",
                DeprecationWarning,
                stacklevel=2,
            )
            return result

        return by_name

    return decorate


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """A schedule that is ``value`` at every step."""

    value: float

    def __post_init__(self) -> None:
        require("value", self.value, schedule=False)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        return torch.full_like(step, self.value, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """A schedule from ``start`` to ``end`` in ``steps`` updates, then ``end``."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        require("start", self.start, schedule=False)
        require("end", self.end, schedule=False)
        require_steps("steps", self.steps)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        return self.start + (self.end - self.start) * progress(step, self.steps)


@dataclass(frozen=True, slots=True)
class CosineDecaySchedule:
    """A schedule from ``start`` to ``end`` along half a cosine in ``steps`` updates, then ``end``.

    It is the decay of Loshchilov & Hutter 2017, arXiv:1608.03983. ``exponent`` is the power to which the falling cosine is raised.
    """

    start: float
    steps: int
    end: float = 0.0
    exponent: float = 1.0

    def __post_init__(self) -> None:
        require("start", self.start, schedule=False)
        require("end", self.end, schedule=False)
        require_steps("steps", self.steps)
        require_above_zero("exponent", self.exponent)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        falling = 1 + cos(math.pi * progress(step, self.steps))
        if self.exponent == 1:
            return self.end + (self.start - self.end) * 0.5 * falling
        return self.end + (self.start - self.end) * (0.5 * falling) ** self.exponent


@dataclass(frozen=True, slots=True)
class JoinSchedules:
    """One schedule after another; each counts from zero at its beginning.

    Args:
        schedules: One schedule or more.
        boundaries: Update at which each but the first begins, increasing.
    """

    schedules: tuple[Schedule, ...]
    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.schedules or len(self.boundaries) != len(self.schedules) - 1:
            raise ValueError(
                f"boundaries: got {len(self.boundaries)} for {len(self.schedules)} schedules; accepted is one less than schedules,"
                " and at least one schedule."
            )
        if any(a >= b for a, b in zip((0, *self.boundaries), self.boundaries, strict=False)):
            raise ValueError(
                f"boundaries: got {self.boundaries}; accepted are increasing numbers of updates above zero."
            )

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        value = self.schedules[0](step)
        for boundary, schedule in zip(self.boundaries, self.schedules[1:], strict=True):
            # A schedule sees no negative step.
            value = torch.where(step < boundary, value, schedule((step - boundary).clamp(min=0)))
        return value


def constant_schedule(value: float) -> ConstantSchedule:
    """Return a schedule that is ``value`` at every step."""
    return ConstantSchedule(value)


def linear_schedule(start: float, end: float, steps: int) -> LinearSchedule:
    """Return a schedule from ``start`` to ``end`` in ``steps`` updates, then ``end``."""
    return LinearSchedule(start, end, steps)


@taken_by_name(2, "end", refused_for="optax's third argument, alpha, is a share of the first value, and end is a value")
def cosine_decay_schedule(start: float, steps: int, *, end: float = 0.0, exponent: float = 1.0) -> CosineDecaySchedule:
    """Return a schedule from ``start`` to ``end`` along half a cosine in ``steps`` updates, then ``end``.

    The first update has ``start``, and the update with ``steps`` before it is the first that has ``end``.

    Args:
        start: First value.
        steps: Updates from ``start`` to ``end``.
        end: Last value. optax has ``alpha`` instead, a share of the first: ``end=alpha * start``.
        exponent: Power of the falling cosine, above zero.

    Raises:
        TypeError: ``end`` by position.
        ValueError: A number that is not finite, or out of range.
    """
    return CosineDecaySchedule(start, steps, end, exponent)


def join_schedules(
    schedules: tuple[Schedule, ...] | list[Schedule], boundaries: tuple[int, ...] | list[int]
) -> JoinSchedules:
    """One schedule after another; ``boundaries[i]`` is the update at which ``schedules[i + 1]`` begins, counting from zero."""
    return JoinSchedules(tuple(schedules), tuple(boundaries))


@taken_by_name(2, "steps")
def warmup_cosine_decay_schedule(
    peak: float, warmup_steps: int, *, steps: int, start: float = 0.0, end: float = 0.0, exponent: float = 1.0
) -> JoinSchedules:
    """Linearly from ``start`` to ``peak`` in ``warmup_steps``, then along half a cosine to ``end`` at ``steps`` in all.

    ``exponent`` is the power of the falling cosine. The first update has ``start``, which is zero unless you say otherwise.

    Raises:
        ValueError: ``steps`` not above ``warmup_steps``.
    """
    require_longer("steps", steps, "warmup_steps", warmup_steps)
    return JoinSchedules(
        (LinearSchedule(start, peak, warmup_steps), CosineDecaySchedule(peak, steps - warmup_steps, end, exponent)),
        (warmup_steps,),
    )


def warmup_stable_decay_schedule(
    peak: float, warmup_steps: int, stable_steps: int, decay_steps: int, *, start: float = 0.0, end: float = 0.0
) -> JoinSchedules:
    """Linear warm-up, a plateau, and a linear decay (Hu et al. 2024, MiniCPM, https://arxiv.org/abs/2404.06395).

    Args:
        peak: The plateau's value.
        warmup_steps: Updates from ``start`` to ``peak``.
        stable_steps: Updates at ``peak``.
        decay_steps: Updates from ``peak`` to ``end``.
        start: First value.
        end: Last value.
    """
    for name, value in (("warmup_steps", warmup_steps), ("stable_steps", stable_steps), ("decay_steps", decay_steps)):
        require_steps(name, value)
    return JoinSchedules(
        (LinearSchedule(start, peak, warmup_steps), ConstantSchedule(peak), LinearSchedule(peak, end, decay_steps)),
        (warmup_steps, warmup_steps + stable_steps),
    )


def progress(step: Tensor, steps: float) -> Tensor:
    """Return the share of ``steps`` that has passed, in [0, 1]; float64."""
    return (step.double() / steps).clamp(0.0, 1.0)


def require_steps(name: str, value: Any) -> None:
    """Refuse a number of updates that is not a whole number of at least 1, with a ValueError."""
    require_count(name, value, "a whole number of updates")


def require_longer(name: str, value: int, other_name: str, other: int) -> None:
    """Refuse a number of updates that is not above another, with a ValueError."""
    require_steps(other_name, other)
    require_steps(name, value)
    if value <= other:
        raise ValueError(f"{name}: got {value}; accepted is more than {other_name} = {other}.")


def require_above_zero(name: str, value: object) -> None:
    """Refuse a value that is not a finite number above zero, with a ValueError or TypeError."""
    require(name, value, 0.0, schedule=False)
    if is_zero(value):
        raise ValueError(f"{name}: got {value!r}; accepted is a finite number above zero.")
