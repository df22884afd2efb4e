"""Schedules: hyperparameters that follow the step.

A schedule is a function from the number of updates done so far (0 at the first, int64, 0-d) to a 0-d float64 tensor. These are frozen
values: they compare, print and pickle. They read the step on its device and never wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from everybit.base import Constant, PositiveConstant, Range, Ranged, Schedule, Updates, cos, require_count


@dataclass(frozen=True, slots=True)
class ConstantSchedule(Ranged):
    """A schedule that is ``value`` at every step."""

    value: Constant

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        return torch.full_like(step, self.value, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class LinearSchedule(Ranged):
    """A schedule from ``start`` to ``end`` in ``steps`` updates, then ``end``."""

    start: Constant
    end: Constant
    steps: Updates

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        return self.start + (self.end - self.start) * progress(step, self.steps)


@dataclass(frozen=True, slots=True)
class CosineDecaySchedule(Ranged):
    """A schedule from ``start`` to ``end`` along half a cosine in ``steps`` updates, then ``end``.

    The first update has ``start``, and the update with ``steps`` before it is the first that has ``end``.

    Args:
        start: First value.
        steps: Updates from ``start`` to ``end``.
        end: Last value. optax has ``alpha`` instead, a share of the first: ``end=alpha * start``.
        exponent: Power of the falling cosine, above zero.

    Raises:
        TypeError: ``end`` by position, where optax has a share of the first value.
        ValueError: A number that is not finite, or out of range.

    Reference:
        Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983.
    """

    start: Constant
    steps: Updates
    _: KW_ONLY
    end: Constant = 0.0
    exponent: PositiveConstant = 1.0

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
        boundaries: Update at which each but the first begins, increasing: ``boundaries[i]`` is that of ``schedules[i + 1]``.
    """

    schedules: Sequence[Schedule]
    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedules", tuple(self.schedules))
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
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


constant_schedule = ConstantSchedule
linear_schedule = LinearSchedule
cosine_decay_schedule = CosineDecaySchedule
join_schedules = JoinSchedules


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
        (
            LinearSchedule(start, peak, warmup_steps),
            CosineDecaySchedule(peak, steps - warmup_steps, end=end, exponent=exponent),
        ),
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
    Range(0.0, open_low=True, schedule=False).check(name, value)
