"""Schedules that fall along a power, an exponential or an inverse root; :mod:`everybit.schedules` defines a schedule.

Where a schedule is said to reach a value "at ``steps``", the update with so many updates before it is the first that has the value: it is
update number ``steps + 1``, as in optax, and as in torch if its scheduler steps once after every update.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from everybit.base import Constant, PositiveConstant, Ranged, Schedule, Updates, sqrt
from everybit.schedules.basic import (
    ConstantSchedule,
    JoinSchedules,
    LinearSchedule,
    join_schedules,
    progress,
    require_steps,
)


@dataclass(frozen=True, slots=True)
class PolynomialSchedule(Ranged):
    r"""A schedule from ``start`` to ``end`` along a power of the share :math:`x = \min(t / \text{steps}, 1)` that has passed.

    .. math::
        \text{end} + (\text{start} - \text{end}) \cdot
        \begin{cases} (1 - x)^\text{power} & \text{of the remaining share} \\ 1 - x^\text{power} & \text{of the passed share} \end{cases}

    As optax's, and torch's ``PolynomialLR`` with ``end=0``. To begin later, put a constant before it with :func:`everybit.join_schedules`.

    Args:
        start: First value: the first update has it.
        end: Last value, reached at ``steps``.
        steps: Updates from ``start`` to ``end``.
        power: Above zero; 1 is linear.
        of_passed: The power is that of the share that has passed.

    Raises:
        ValueError: A number that is not finite, or out of range.
    """

    start: Constant
    end: Constant
    _: KW_ONLY
    steps: Updates
    power: PositiveConstant = 1.0
    of_passed: bool = False

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        passed = progress(step, self.steps)
        share = 1 - passed**self.power if self.of_passed else (1 - passed) ** self.power
        return self.end + (self.start - self.end) * share


@dataclass(frozen=True, slots=True)
class ExponentialDecaySchedule(Ranged):
    r"""A schedule that is multiplied by ``rate`` every ``steps`` updates: :math:`\text{start} \cdot \text{rate}^{t / \text{steps}}`.

    As optax's ``exponential_decay``; as torch's ``ExponentialLR``, and with ``staircase`` as its ``StepLR``. The first update has
    ``start``; at ``steps`` the value is ``start * rate``. It has no last value but ``end``.

    Args:
        start: First value.
        rate: Factor for every ``steps`` updates, above zero. Above 1 the schedule grows. (optax takes 0 for a constant schedule.)
        steps: Updates for one factor.
        staircase: Change at multiples of ``steps`` only.
        end: Where the schedule stops: its least value, or its greatest if ``rate`` is at least 1. None: it does not stop.

    Raises:
        ValueError: A number that is not finite, or out of range.
    """

    start: Constant
    rate: PositiveConstant
    steps: Updates = 1
    _: KW_ONLY
    staircase: bool = False
    end: Constant | None = None

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        periods = step.double() / self.steps
        value = self.start * self.rate ** (periods.floor() if self.staircase else periods)
        if self.end is None:
            return value
        return value.clamp(min=self.end) if self.rate < 1 else value.clamp(max=self.end)


@dataclass(frozen=True, slots=True)
class InverseSqrtSchedule(Ranged):
    r"""A schedule :math:`\text{start} \sqrt{\tau / (t + \tau)}`, in which :math:`\tau` is ``timescale``, in updates."""

    start: Constant
    timescale: PositiveConstant

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        return self.start * sqrt(torch.reciprocal(1 + step.double() / self.timescale))


@dataclass(frozen=True, slots=True)
class RelativeStepSchedule(Ranged):
    r"""Adafactor's schedule :math:`\min(\rho, 1/\sqrt t)`, where t is 1 at the first update (Shazeer & Stern 2018, section 9).

    Args:
        limit: :math:`\rho`, above zero.
        slope: Warm up: :math:`\rho` is ``slope`` times t in the place of ``limit``; Hugging Face's ``warmup_init`` has 1e-6.

    Raises:
        ValueError: A number that is not finite, or out of range.
    """

    limit: PositiveConstant = 1e-2
    _: KW_ONLY
    slope: PositiveConstant | None = None

    def __call__(self, step: Tensor) -> Tensor:
        """Return the value after ``step`` updates; 0-d."""
        number = step.double() + 1
        limit = torch.full_like(number, self.limit) if self.slope is None else self.slope * number
        return torch.minimum(limit, 1 / sqrt(number))


polynomial_schedule = PolynomialSchedule
exponential_decay_schedule = ExponentialDecaySchedule
relative_step_schedule = RelativeStepSchedule


def warmup_constant_schedule(peak: float, warmup_steps: int, *, start: float = 0.0) -> LinearSchedule:
    """Return a schedule that rises linearly from ``start`` to ``peak`` in ``warmup_steps`` updates, and stays there.

    The first update has ``start``, which is zero unless you say otherwise.
    """
    return LinearSchedule(start, peak, warmup_steps)


def warmup_exponential_decay_schedule(
    peak: float,
    warmup_steps: int,
    *,
    rate: float,
    steps: int = 1,
    start: float = 0.0,
    staircase: bool = False,
    end: float | None = None,
) -> JoinSchedules:
    """Linearly from ``start`` to ``peak`` in ``warmup_steps`` updates, then by ``rate`` every ``steps`` updates.

    Args:
        peak: The value at ``warmup_steps``, where the decay begins.
        warmup_steps: Updates from ``start`` to ``peak``.
        rate: See :func:`exponential_decay_schedule`.
        steps: Updates for one factor, counted from the end of the warm-up.
        start: First value.
        staircase: See :func:`exponential_decay_schedule`.
        end: See :func:`exponential_decay_schedule`.

    Raises:
        ValueError: A number that is not finite, or out of range.
    """
    decay = ExponentialDecaySchedule(peak, rate, steps, staircase=staircase, end=end)
    return JoinSchedules((LinearSchedule(start, peak, warmup_steps), decay), (warmup_steps,))


def inverse_sqrt_schedule(
    peak: float, warmup_steps: int, *, timescale: float | None = None, start: float = 0.0
) -> JoinSchedules:
    r"""Linearly from ``start`` to ``peak`` in ``warmup_steps`` updates, then :math:`\text{peak} \sqrt{\tau / (t - w + \tau)}`.

    With :math:`\tau = w`, the default, this is the schedule of the Transformer: :math:`\text{peak} \sqrt{w / t}` from :math:`w` on
    (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 5.3, which counts updates from 1 and peaks at
    :math:`d^{-1/2} w^{-1/2}`). It has no last value.

    Args:
        peak: The value at ``warmup_steps``.
        warmup_steps: :math:`w`, updates from ``start`` to ``peak``.
        timescale: :math:`\tau`, in updates, above zero; None: ``warmup_steps``.
        start: First value.

    Raises:
        ValueError: A number that is not finite, or out of range.
    """
    require_steps("warmup_steps", warmup_steps)
    decay = InverseSqrtSchedule(peak, warmup_steps if timescale is None else timescale)
    return JoinSchedules((LinearSchedule(start, peak, warmup_steps), decay), (warmup_steps,))


def power_cooldown_schedule(
    peak: float,
    steps: int,
    cooldown_steps: int,
    *,
    power: float,
    of_passed: bool = False,
    end: float = 0.0,
    warmup_steps: int = 0,
    start: float = 0.0,
) -> Schedule:
    """A plateau, and a cooldown along a power in the last ``cooldown_steps`` of ``steps`` updates (PowerCool).

    Runs of modded-nanogpt cool down with ``(1 - x) ** power``, where ``x`` is the share of the cooldown that has passed. ``of_passed``
    takes ``1 - x ** power`` instead; with ``power=0.5`` that is the "1-sqrt" cooldown of Hägele et al. 2024
    (https://arxiv.org/abs/2405.18392). With ``power=1`` both are :func:`everybit.warmup_stable_decay_schedule`.

    Args:
        peak: The plateau's value.
        steps: Updates in all; at ``steps`` the value is ``end``, so that the last of ``steps`` updates is still above it.
        cooldown_steps: How many of them cool down.
        power: Above zero.
        of_passed: See above.
        end: Last value.
        warmup_steps: Updates from ``start`` to ``peak``, at least 0.
        start: First value, if there is a warm-up.

    Raises:
        ValueError: A number that is not finite, or out of range; more updates in the parts than in all.

    Examples:
        >>> import torch, everybit as eb
        >>> schedule = eb.power_cooldown_schedule(1.0, steps=6, cooldown_steps=4, power=2.0)
        >>> [float(schedule(torch.tensor(t))) for t in range(7)]
        [1.0, 1.0, 1.0, 0.5625, 0.25, 0.0625, 0.0]
    """
    require_steps("steps", steps)
    require_steps("cooldown_steps", cooldown_steps)
    if warmup_steps != 0:
        require_steps("warmup_steps", warmup_steps)
    if warmup_steps + cooldown_steps > steps:
        raise ValueError(
            f"cooldown_steps: got {cooldown_steps}; accepted are at most steps - warmup_steps = {steps - warmup_steps}."
        )
    parts: list[tuple[int, Schedule]] = [
        (warmup_steps, LinearSchedule(start, peak, max(warmup_steps, 1))),
        (steps - warmup_steps - cooldown_steps, ConstantSchedule(peak)),
        (cooldown_steps, PolynomialSchedule(peak, end, steps=cooldown_steps, power=power, of_passed=of_passed)),
    ]
    kept = [(length, part) for length, part in parts if length]
    ends = [sum(length for length, _ in kept[: index + 1]) for index in range(len(kept))]
    return join_schedules([part for _, part in kept], ends[:-1]) if len(kept) > 1 else kept[0][1]
