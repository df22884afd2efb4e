"""Schedules of several pieces: steps, lines and arcs between points, one cycle, and warm restarts.

Where a schedule is said to reach a value "at ``steps``", the update with so many updates before it is the first that has the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from everybit.base import Constant, Ranged, Schedule, Updates, cos, require
from everybit.schedules.basic import (
    CosineDecaySchedule,
    JoinSchedules,
    join_schedules,
    require_above_zero,
    require_steps,
    warmup_cosine_decay_schedule,
)

Interpolation = Literal["linear", "cosine"]
"""The way from one point to the next: a line, or half a cosine."""


@dataclass(frozen=True, slots=True)
class PiecewiseConstantSchedule(Ranged):
    """A schedule that is multiplied by a factor at each of several updates. ``factors`` are pairs of update and factor, in order."""

    start: Constant
    factors: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        Ranged.__post_init__(self)
        _require_factors(self.factors)

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        value = torch.full_like(step, self.start, dtype=torch.float64)
        for boundary, factor in self.factors:
            value = torch.where(step < boundary, value, value * factor)
        return value


@dataclass(frozen=True, slots=True)
class InterpolatedSchedule(Ranged):
    """A schedule through ``points``, pairs of a number of updates (which may be a fraction) and a value; constant outside of them."""

    points: tuple[tuple[float, float], ...]
    interpolation: Interpolation = "linear"

    def __post_init__(self) -> None:
        Ranged.__post_init__(self)
        for place, value in self.points:
            require("points", place, 0.0, schedule=False)
            require("points", value, schedule=False)
        places = [place for place, _ in self.points]
        if not places or any(a >= b for a, b in pairwise(places)):
            raise ValueError(
                f"points: got {self.points}; accepted are pairs of increasing numbers of updates and values."
            )

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        value = torch.full_like(step, self.points[0][1], dtype=torch.float64)
        for (begin, old), (end, new) in pairwise(self.points):
            share = ((step.double() - begin) / (end - begin)).clamp(0.0, 1.0)
            left = 1 - share if self.interpolation == "linear" else 0.5 * (1 + cos(math.pi * share))
            between = new + (old - new) * left
            # At its end and after it the piece is the new value itself, and not a sum that is rounded to it.
            value = torch.where(step < begin, value, torch.where(step < end, between, new))
        return value


@dataclass(frozen=True, slots=True)
class CosineRestartsSchedule(Ranged):
    """Half a cosine from ``start`` to ``end`` with warm restarts (SGDR), without end: torch's ``CosineAnnealingWarmRestarts``.

    The first update has ``start``. ``end`` itself is never reached: at ``steps`` the next period begins, with ``start``.

    Args:
        start: Value at the beginning of each period; torch's base learning rate.
        steps: Updates in the first period; torch's ``T_0``.
        growth: The ratio of each period's length to that of the period before, a whole number; torch's ``T_mult``.
        end: Value that each period approaches; torch's ``eta_min``.

    Raises:
        ValueError: A number out of range.

    Reference:
        Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983.
    """

    start: Constant
    steps: Updates
    _: KW_ONLY
    growth: Updates = 1
    end: Constant = 0.0

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        if self.growth == 1:
            share = (step % self.steps).double() / self.steps
        else:
            place = step.double()
            # A logarithm that is rounded may name the neighbouring period; beginnings are whole numbers, and settle it.
            number = torch.log2(1 + place * (self.growth - 1) / self.steps).div(math.log2(self.growth)).floor()
            number = number + (place >= self._begin(number + 1)).double() - (place < self._begin(number)).double()
            begin = self._begin(number)
            share = (place - begin) / (self._begin(number + 1) - begin)
        return self.end + (self.start - self.end) * 0.5 * (1 + cos(math.pi * share))

    def _begin(self, number: Tensor) -> Tensor:
        """The update at which a period begins; float64."""
        return (self.steps * (self.growth**number - 1) / (self.growth - 1)).round()


cosine_restarts_schedule = CosineRestartsSchedule


class Cycle(TypedDict):
    """The arguments of :func:`everybit.warmup_cosine_decay_schedule` for one cycle; ``warmup_steps`` may be zero."""

    peak: float
    warmup_steps: int
    steps: int
    start: NotRequired[float]
    end: NotRequired[float]
    exponent: NotRequired[float]


def piecewise_constant_schedule(start: float, factors: Mapping[int, float]) -> PiecewiseConstantSchedule:
    """Return a schedule that begins at ``start`` and is multiplied by ``factors[t]`` from the update with ``t`` before it on.

    This is optax's schedule, and torch's ``MultiStepLR``.

    Args:
        start: First value.
        factors: A factor for each number of updates done, non-negative. Factors multiply the value after the factors before.

    Raises:
        ValueError: A factor or number of updates out of range.

    Examples:
        >>> import torch, everybit as eb
        >>> schedule = eb.piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
        >>> [float(schedule(torch.tensor(t))) for t in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    return PiecewiseConstantSchedule(start, tuple(sorted(factors.items())))


def piecewise_interpolate_schedule(
    start: float, factors: Mapping[int, float], *, interpolation: Interpolation = "linear"
) -> InterpolatedSchedule:
    """Return a schedule that goes from ``start`` to ``start * factors[t]`` at the first ``t``, from there to the second, and so on.

    As optax's. At each ``t`` its value is reached, and after the last it stays.

    Args:
        start: First value.
        factors: A factor for each number of updates, non-negative. Factors multiply the value after the factors before.
        interpolation: ``"linear"``, or ``"cosine"`` for half a cosine between two points.

    Raises:
        ValueError: A factor, number of updates or interpolation out of range.
    """
    require("start", start, schedule=False)
    ordered = tuple(sorted(factors.items()))
    _require_factors(ordered)
    points: list[tuple[float, float]] = [(0, start)]
    for place, factor in ordered:
        points.append((place, points[-1][1] * factor))
    return InterpolatedSchedule(tuple(points), interpolation)


def one_cycle_schedule(
    peak: float,
    steps: int,
    *,
    warmup_share: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
    interpolation: Interpolation = "cosine",
    three_phase: bool = False,
) -> InterpolatedSchedule:
    """Up from ``peak / start_divisor`` to ``peak``, and down to ``peak / start_divisor / end_divisor``: torch's ``OneCycleLR``.

    The first update has the first value. As in torch, the last of ``steps`` updates has the last value (it is reached at ``steps - 1``,
    where optax's, :func:`cosine_one_cycle_schedule` and :func:`linear_one_cycle_schedule`, are one update from it), and the peak is at
    ``warmup_share * steps - 1``, which may lie between two updates. torch raises an error after ``steps`` updates; here the value stays.

    Args:
        peak: Greatest value; torch's ``max_lr``.
        steps: Updates in all.
        warmup_share: Share of the steps that goes up, in (0, 1); torch's ``pct_start``.
        start_divisor: The peak over the first value, above zero; torch's ``div_factor``.
        end_divisor: The first value over the last, above zero; torch's ``final_div_factor``.
        interpolation: ``"cosine"`` or ``"linear"``; torch's ``anneal_strategy``.
        three_phase: Go down as fast as up, to the first value, and in the remaining steps to the last.

    Raises:
        ValueError: A number out of range, or a share that leaves no update to a phase.

    Reference:
        Smith & Topin 2018, https://arxiv.org/abs/1708.07120.
    """
    first, last = _cycle_ends(peak, steps, start_divisor, end_divisor)
    places = [0.0, float(warmup_share * steps) - 1]
    values = [first, peak]
    if three_phase:
        places.append(float(2 * warmup_share * steps) - 2)
        values.append(first)
    _require_phases("warmup_share", warmup_share, places, steps - 1)
    return InterpolatedSchedule(tuple(zip([*places, steps - 1], [*values, last], strict=True)), interpolation)


def cosine_one_cycle_schedule(
    peak: float, steps: int, *, warmup_share: float = 0.3, start_divisor: float = 25.0, end_divisor: float = 1e4
) -> InterpolatedSchedule:
    """One cycle along cosines as optax's ``cosine_onecycle_schedule``: peak at ``int(warmup_share * steps)``, last value at ``steps``.

    The arguments are those of :func:`one_cycle_schedule`, which is torch's.

    Raises:
        ValueError: A number out of range, or a share that leaves no update to a phase.
    """
    first, last = _cycle_ends(peak, steps, start_divisor, end_divisor)
    up = int(warmup_share * steps)
    _require_phases("warmup_share", warmup_share, [0, up], steps)
    return InterpolatedSchedule(((0, first), (up, peak), (steps, last)), "cosine")


def linear_one_cycle_schedule(
    peak: float,
    steps: int,
    *,
    warmup_share: float = 0.3,
    cooldown_share: float = 0.85,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
) -> InterpolatedSchedule:
    """One cycle along lines as optax's ``linear_onecycle_schedule``: up, down to the first value, and down to the last.

    The peak is at ``int(warmup_share * steps)``, the first value again at ``int(cooldown_share * steps)``, the last value at ``steps``.
    The other arguments are those of :func:`one_cycle_schedule`.

    Raises:
        ValueError: A number out of range, or a share that leaves no update to a phase.
    """
    first, last = _cycle_ends(peak, steps, start_divisor, end_divisor)
    up, down = int(warmup_share * steps), int(cooldown_share * steps)
    _require_phases("warmup_share, cooldown_share", (warmup_share, cooldown_share), [0, up, down], steps)
    return InterpolatedSchedule(((0, first), (up, peak), (down, first), (steps, last)), "linear")


def sgdr_schedule(cycles: Sequence[Cycle]) -> JoinSchedules:
    """Cycles of warm-up and cosine decay one after another, as optax's ``sgdr_schedule``; after the last its ``end`` stays.

    Args:
        cycles: For each the arguments of :func:`everybit.warmup_cosine_decay_schedule`, as a dict; ``steps`` are those of the cycle.

    Raises:
        ValueError: No cycle, or a number out of range.

    Examples:
        >>> import everybit as eb
        >>> schedule = eb.sgdr_schedule(
        ...     [{"peak": 1e-3, "warmup_steps": 10, "steps": 100}, {"peak": 5e-4, "warmup_steps": 0, "steps": 200}]
        ... )
    """
    ends = [0]
    parts: list[Schedule] = []
    for cycle in cycles:
        arguments: dict[str, Any] = dict(cycle)
        if arguments["warmup_steps"] == 0:
            parts.append(
                CosineDecaySchedule(
                    cycle["peak"], cycle["steps"], end=cycle.get("end", 0.0), exponent=cycle.get("exponent", 1.0)
                )
            )
        else:
            parts.append(warmup_cosine_decay_schedule(**arguments))
        ends.append(ends[-1] + cycle["steps"])
    return join_schedules(parts, ends[1:-1])


def _cycle_ends(peak: float, steps: int, start_divisor: float, end_divisor: float) -> tuple[float, float]:
    require("peak", peak, schedule=False)
    require_steps("steps", steps)
    require_above_zero("start_divisor", start_divisor)
    require_above_zero("end_divisor", end_divisor)
    return peak / start_divisor, peak / start_divisor / end_divisor


def _require_phases(name: str, value: object, places: Sequence[float], last: float) -> None:
    if any(a >= b for a, b in zip(places, [*places[1:], last], strict=True)):
        raise ValueError(
            f"{name}: got {value}, which ends phases after {(*places[1:], last)} updates; accepted is what leaves some to each phase."
        )


def _require_factors(factors: tuple[tuple[int, float], ...]) -> None:
    for boundary, factor in factors:
        require_steps("factors", boundary)
        require("factors", factor, 0.0, schedule=False)
