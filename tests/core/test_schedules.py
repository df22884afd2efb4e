"""Schedules against closed forms and against torch's, and as values."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everybit as eb


def values(schedule: eb.Schedule, steps: int) -> list[float]:
    return [schedule(torch.tensor(step)).item() for step in range(steps)]


def torch_values(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler], steps: int
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    scheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_constant() -> None:
    assert values(eb.constant_schedule(0.3), 4) == [0.3] * 4


def test_linear_reaches_its_end_exactly_and_stays() -> None:
    assert values(eb.linear_schedule(1.0, 3.0, 4), 7) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert values(eb.linear_schedule(1e-3, 0.0, 3), 5)[3:] == [0.0, 0.0]


def test_cosine_is_half_a_cosine() -> None:
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * min(step / 8, 1))) / 2 for step in range(12)]
    assert values(eb.cosine_decay_schedule(1.0, 8, end=0.1), 12) == pytest.approx(expected, rel=1e-15)
    assert values(eb.cosine_decay_schedule(1.0, 8, end=0.1), 9)[8] == 0.1


def test_linear_is_torchs() -> None:
    theirs = torch_values(lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.25, 0.75, total_iters=20), 30)
    assert values(eb.linear_schedule(0.3 * 0.25, 0.3 * 0.75, 20), 30) == pytest.approx(theirs, rel=1e-13)


def test_cosine_is_torchs() -> None:
    # Up to T_max, after which torch's rises again.
    theirs = torch_values(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.01), 41)
    assert values(eb.cosine_decay_schedule(0.3, 40, end=0.01), 41) == pytest.approx(theirs, rel=1e-12)


def test_join_is_torchs_sequence() -> None:
    def sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=5),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
            ],
            milestones=[5],
        )

    ours = eb.join_schedules([eb.linear_schedule(0.03, 0.3, 5), eb.cosine_decay_schedule(0.3, 20)], [5])
    assert values(ours, 26) == pytest.approx(torch_values(sequence, 26), rel=1e-12, abs=1e-16)


def test_join_switches_at_its_boundaries_and_each_part_begins_at_its_own_zero() -> None:
    seen: list[list[int]] = [[], []]

    def part(index: int) -> eb.Schedule:
        def schedule(step: torch.Tensor) -> torch.Tensor:
            seen[index].append(int(step))
            return 100.0 * index + step.double()

        return schedule

    joined = eb.join_schedules((part(0), part(1)), (3,))
    assert values(joined, 6) == [0.0, 1.0, 2.0, 100.0, 101.0, 102.0]
    assert min(seen[1]) == 0


def test_warmup_cosine_warms_up_peaks_and_decays() -> None:
    schedule = eb.warmup_cosine_decay_schedule(1.0, 4, steps=12, start=0.2, end=0.1)
    got = values(schedule, 15)
    assert got[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], rel=1e-15)
    assert got[8] == pytest.approx(0.55, rel=1e-15)
    assert got[12:] == [0.1] * 3
    assert schedule == eb.join_schedules(
        [eb.linear_schedule(0.2, 1.0, 4), eb.cosine_decay_schedule(1.0, 8, end=0.1)], [4]
    )


def test_warmup_stable_decay_has_a_plateau() -> None:
    got = values(eb.warmup_stable_decay_schedule(1.0, 2, 3, 4), 11)
    assert got == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_values_are_0d_float64_where_the_step_is() -> None:
    for schedule in SCHEDULES:
        value = schedule(torch.tensor(3))
        assert (value.shape, value.dtype) == ((), torch.float64)
        assert schedule(torch.tensor(3, device="meta")).device.type == "meta"


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 3000))
def test_decays_stay_between_their_ends_and_stop_at_the_last(steps: int, start: float, end: float, step: int) -> None:
    low, high = min(start, end), max(start, end)
    slack = 4 * 2.0**-52 * max(abs(low), abs(high))  # a sum of two products, each rounded once
    for schedule in (eb.linear_schedule(start, end, steps), eb.cosine_decay_schedule(start, steps, end=end)):
        assert low - slack <= schedule(torch.tensor(step)).item() <= high + slack
        assert schedule(torch.tensor(0)).item() == pytest.approx(start, abs=slack)
        assert schedule(torch.tensor(steps + step)).item() == pytest.approx(end, abs=slack)


SCHEDULES: list[Any] = [
    eb.constant_schedule(0.1),
    eb.linear_schedule(0.1, 0.2, 5),
    eb.cosine_decay_schedule(0.1, 5),
    eb.join_schedules([eb.constant_schedule(0.1), eb.constant_schedule(0.2)], [3]),
    eb.warmup_cosine_decay_schedule(0.1, 3, steps=9),
    eb.warmup_stable_decay_schedule(0.1, 1, 2, 3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_schedules_are_values(schedule: Any) -> None:
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again != eb.constant_schedule(7.0)
    assert "at 0x" not in repr(schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_first_update_sees_the_value_at_zero_wherever_the_schedule_is(schedule: Any) -> None:
    g = torch.ones((), dtype=torch.float64)
    wrapped: list[Any] = [
        eb.chain(eb.scale(schedule)),
        eb.named_chain({"only": eb.scale(schedule)}),
        eb.accumulate(eb.scale(schedule), every=1),
        eb.apply_if_finite(eb.scale(schedule)),
    ]
    for transform in wrapped:
        state, seen = transform.init(g), []
        for _ in range(6):
            updates, state = transform.update(g, state, g)
            seen.append(updates.item())
        assert seen == values(schedule, 6)
    optimizer = eb.with_policy(eb.scale(schedule), eb.policies.FP64)
    params = torch.zeros((), dtype=torch.float64)
    after, _ = optimizer.step(params, g, optimizer.init(params))
    assert after.item() == values(schedule, 1)[0]


def test_accumulation_counts_updates_not_gradients() -> None:
    schedule = eb.linear_schedule(1.0, 2.0, 10)
    transform = eb.accumulate(eb.chain(eb.scale(schedule)), every=3)
    g = torch.ones((), dtype=torch.float64)
    state, seen = transform.init(g), []
    for _ in range(9):
        updates, state = transform.update(g, state, g)
        seen.append(updates.item())
    assert seen == pytest.approx([0, 0, 1.0, 0, 0, 1.1, 0, 0, 1.2], rel=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.constant_schedule(math.nan), r"^value: got nan"),
        (lambda: eb.linear_schedule(math.inf, 0.0, 3), r"^start: got inf"),
        (lambda: eb.linear_schedule(0.0, 1.0, 0), r"^steps: got 0; accepted is a whole number of updates, at least 1"),
        (lambda: eb.cosine_decay_schedule(1.0, 2.5), r"^steps: got 2\.5"),  # type: ignore[arg-type]
        (
            lambda: eb.warmup_cosine_decay_schedule(1.0, 5, steps=5),
            r"^steps: got 5; accepted is more than warmup_steps = 5",
        ),
        (lambda: eb.warmup_stable_decay_schedule(1.0, 1, 0, 1), r"^stable_steps: got 0"),
        (lambda: eb.join_schedules([], []), r"^boundaries: got 0 for 0 schedules"),
        (lambda: eb.join_schedules([eb.constant_schedule(1.0)], [3]), r"^boundaries: got 1 for 1 schedules"),
        (
            lambda: eb.join_schedules([eb.constant_schedule(1.0)] * 3, [5, 5]),
            r"^boundaries: got \(5, 5\); accepted are increasing",
        ),
        (lambda: eb.join_schedules([eb.constant_schedule(1.0)] * 2, [0]), r"^boundaries: got \(0,\)"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
