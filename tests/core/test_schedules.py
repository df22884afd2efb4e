"""Schedules against closed forms and against torch's."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everybit as eb
import torch


def at(schedule: eb.Schedule, step: int) -> float:
    value = schedule(torch.tensor(step))
    assert value.dtype is torch.float64
    assert value.ndim == 0
    return float(value)


def torchs(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """The learning rates that a torch scheduler gives from 1.0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def test_cosine_is_torchs_cosine_annealing() -> None:
    schedule = eb.cosine_decay_schedule(1.0, 30, end=0.1)
    expected = torchs(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30, eta_min=0.1), 31)
    # torch's is a recurrence, whose 30 products each round by 2**-53.
    assert [at(schedule, step) for step in range(31)] == pytest.approx(expected, rel=1e-13)


def test_linear_is_torchs_linear() -> None:
    schedule = eb.linear_schedule(0.25, 1.0, 12)
    expected = torchs(lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, 1.0, 12), 30)
    assert [at(schedule, step) for step in range(30)] == pytest.approx(expected, rel=1e-13)


def test_warmup_and_cosine_meet_at_the_peak() -> None:
    schedule = eb.warmup_cosine_decay_schedule(2.0, 10, 110, start=0.5, end=0.2)
    warmup = [0.5 + 1.5 * step / 10 for step in range(10)]
    decay = [0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / 100))) for step in range(190)]
    assert [at(schedule, step) for step in range(200)] == pytest.approx(warmup + decay, rel=1e-14)
    assert at(schedule, 10) == 2.0
    assert at(schedule, 110) == pytest.approx(0.2, rel=1e-15)


def test_warmup_stable_decay_has_three_parts() -> None:
    schedule = eb.warmup_stable_decay_schedule(1.0, 4, 10, 5, start=0.2, end=0.5)
    got = [at(schedule, step) for step in range(25)]
    expected = [0.2, 0.4, 0.6, 0.8] + [1.0] * 10 + [1.0, 0.9, 0.8, 0.7, 0.6] + [0.5] * 6
    assert got == pytest.approx(expected, rel=1e-14)


def test_joined_schedules_count_from_their_own_beginning() -> None:
    schedule = eb.join_schedules(
        [eb.constant_schedule(3.0), eb.linear_schedule(0.0, 1.0, 4), eb.constant_schedule(7.0)], [2, 5]
    )
    assert [at(schedule, step) for step in range(7)] == [3.0, 3.0, 0.0, 0.25, 0.5, 7.0, 7.0]


def test_a_joined_schedule_never_sees_a_negative_step() -> None:
    seen: list[int] = []

    def watch(step: torch.Tensor) -> torch.Tensor:
        seen.append(int(step))
        return step.double()

    schedule = eb.join_schedules([eb.constant_schedule(1.0), watch], [5])
    for step in range(8):
        at(schedule, step)
    assert min(seen) == 0
    assert max(seen) == 2


@given(
    st.integers(1, 1000),
    st.floats(-10, 10),
    st.floats(-10, 10),
    st.integers(0, 3000),
)
def test_decays_stay_between_their_ends_and_stop_at_the_last(steps: int, start: float, end: float, step: int) -> None:
    low, high = min(start, end), max(start, end)
    slack = 4 * 2.0**-52 * max(abs(low), abs(high))  # a sum of two products, each rounded once
    for schedule in (eb.linear_schedule(start, end, steps), eb.cosine_decay_schedule(start, steps, end)):
        assert low - slack <= at(schedule, step) <= high + slack
        assert at(schedule, 0) == pytest.approx(start, abs=slack)
        assert at(schedule, steps + step) == pytest.approx(end, abs=slack)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.linear_schedule(0.0, 1.0, 0), r"steps: got 0; accepted is a whole number of updates, at least 1"),
        (lambda: eb.cosine_decay_schedule(1.0, -5), r"steps: got -5"),
        (lambda: eb.constant_schedule(float("nan")), r"value: got nan"),
        (
            lambda: eb.warmup_cosine_decay_schedule(1.0, 10, 10),
            r"steps: got 10; accepted is more than warmup_steps = 10",
        ),
        (lambda: eb.warmup_stable_decay_schedule(1.0, 4, 0, 5), r"stable_steps: got 0"),
        (lambda: eb.join_schedules([], []), r"boundaries: got 0 for 0 schedules"),
        (
            lambda: eb.join_schedules([eb.constant_schedule(1.0)] * 3, [5, 5]),
            r"boundaries: got \(5, 5\); accepted are increasing",
        ),
    ],
)
def test_impossible_schedules_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_are_values() -> None:
    schedule = eb.warmup_cosine_decay_schedule(1.0, 10, 100)
    assert schedule == eb.warmup_cosine_decay_schedule(1.0, 10, 100)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert "CosineDecaySchedule(start=1.0, steps=90, end=0.0)" in repr(schedule)
