"""Every schedule against torch's scheduler where there is one, and against its formula, written out, where there is none; and as values."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import everybit as eb

STEPS = 200
# A value is some ten operations in float64, each rounded once; torch multiplies its value by a factor at every step: its error grows.
CLOSED = 20 * 2.0**-52
CHAINED = STEPS * 4 * 2.0**-53


def values(schedule: eb.Schedule, steps: int = STEPS) -> list[float]:
    return [schedule(torch.tensor(step)).item() for step in range(steps)]


def torch_values(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], steps: int = STEPS) -> list[float]:
    """torch's learning rates at each of the first updates, from a base learning rate of 0.3."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.3)
    scheduler = make(optimizer)
    seen: list[float] = []
    for step in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step + 1 < steps:
            scheduler.step()
    return seen


def sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Up to ``T_max``, after which torch's rises again."""
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    return lr_scheduler.SequentialLR(
        optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, T_max=180, eta_min=0.01)], milestones=[20]
    )


TORCH: dict[str, tuple[eb.Schedule, Callable[[Any], Any]]] = {
    "linear": (
        eb.linear_schedule(0.3 * 0.25, 0.3 * 0.75, 20),
        lambda o: lr_scheduler.LinearLR(o, 0.25, 0.75, total_iters=20),
    ),
    "a sequence": (
        eb.join_schedules([eb.linear_schedule(0.03, 0.3, 20), eb.cosine_decay_schedule(0.3, 180, end=0.01)], [20]),
        sequence,
    ),
    "polynomial": (
        eb.polynomial_schedule(0.3, 0.0, steps=150, power=1.7),
        lambda o: lr_scheduler.PolynomialLR(o, 150, power=1.7),
    ),
    "exponential": (eb.exponential_decay_schedule(0.3, 0.97), lambda o: lr_scheduler.ExponentialLR(o, 0.97)),
    "staircase": (
        eb.exponential_decay_schedule(0.3, 0.5, 30, staircase=True),
        lambda o: lr_scheduler.StepLR(o, 30, 0.5),
    ),
    "piecewise constant": (
        eb.piecewise_constant_schedule(0.3, {170: 0.1, 20: 0.1, 90: 0.1}),
        lambda o: lr_scheduler.MultiStepLR(o, [20, 90, 170], 0.1),
    ),
    "restarts": (
        eb.cosine_restarts_schedule(0.3, 30, end=0.01),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 30, eta_min=0.01),
    ),
    "growing restarts": (
        eb.cosine_restarts_schedule(0.3, 10, growth=2),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2),
    ),
    "growing restarts by three": (
        eb.cosine_restarts_schedule(0.3, 5, growth=3, end=0.1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 3, eta_min=0.1),
    ),
    "one cycle": (
        eb.one_cycle_schedule(0.3, STEPS, warmup_share=0.3333, start_divisor=10.0, end_divisor=100.0),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, STEPS, pct_start=0.3333, div_factor=10.0, final_div_factor=100.0),
    ),
    "one cycle, three phases": (
        eb.one_cycle_schedule(0.3, STEPS, three_phase=True),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, STEPS, three_phase=True),
    ),
    "one cycle, linear": (
        eb.one_cycle_schedule(0.3, STEPS, interpolation="linear", warmup_share=0.25),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, STEPS, anneal_strategy="linear", pct_start=0.25),
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", TORCH)
def test_it_is_torchs_at_every_step(name: str) -> None:
    ours, theirs = TORCH[name]
    # What is subtracted near a zero end is of the size of the start: an absolute part beside the relative one.
    assert values(ours) == pytest.approx(torch_values(theirs), rel=CHAINED, abs=0.3 * CLOSED)


def cosine(share: float) -> float:
    return (1 + math.cos(math.pi * share)) / 2


FORMULAS: dict[str, tuple[eb.Schedule, Callable[[int], float]]] = {
    "constant": (eb.constant_schedule(0.3), lambda _: 0.3),
    "linear": (eb.linear_schedule(1.0, 3.0, 4), lambda t: 1.0 + 0.5 * min(t, 4)),
    "half a cosine": (eb.cosine_decay_schedule(1.0, 8, end=0.1), lambda t: 0.1 + 0.9 * cosine(min(t / 8, 1))),
    "warmup and a cosine": (
        eb.warmup_cosine_decay_schedule(1.0, 4, steps=12, start=0.2, end=0.1),
        lambda t: 0.2 + 0.2 * t if t < 4 else 0.1 + 0.9 * cosine(min((t - 4) / 8, 1)),
    ),
    "a constant before a schedule": (
        eb.join_schedules([eb.constant_schedule(0.3), eb.polynomial_schedule(0.3, 0.0, steps=4)], [3]),
        lambda t: 0.3 * (1 - min(max(t - 3, 0) / 4, 1)),
    ),
    "a plateau": (
        eb.warmup_stable_decay_schedule(1.0, 2, 3, 4),
        lambda t: t / 2 if t < 2 else 1 - min(max(t - 5, 0) / 4, 1),
    ),
    "polynomial": (
        eb.polynomial_schedule(0.3, 0.02, steps=50, power=2.5),
        lambda t: 0.02 + 0.28 * (1 - min(t / 50, 1)) ** 2.5,
    ),
    "exponential": (eb.exponential_decay_schedule(0.3, 0.2, 40), lambda t: 0.3 * 0.2 ** (t / 40)),
    "exponential to an end": (
        eb.exponential_decay_schedule(0.3, 0.2, 40, end=0.1),
        lambda t: max(0.3 * 0.2 ** (t / 40), 0.1),
    ),
    "growing to an end": (
        eb.exponential_decay_schedule(0.01, 1.1, 3, end=0.1),
        lambda t: min(0.01 * 1.1 ** (t / 3), 0.1),
    ),
    "warmup exponential": (
        eb.warmup_exponential_decay_schedule(0.3, 20, rate=0.5, steps=15, start=0.1),
        lambda t: 0.1 + 0.2 * t / 20 if t < 20 else 0.3 * 0.5 ** ((t - 20) / 15),
    ),
    "warmup constant": (eb.warmup_constant_schedule(0.3, 7), lambda t: 0.3 * min(t / 7, 1)),
    "the Transformer's": (
        eb.inverse_sqrt_schedule(0.3, 16),
        lambda t: 0.3 * 16**0.5 * min((t or 1e-300) ** -0.5, t * 16**-1.5),
    ),
    "inverse root": (
        eb.inverse_sqrt_schedule(0.3, 16, timescale=100.0, start=0.1),
        lambda t: 0.1 + 0.2 * t / 16 if t < 16 else 0.3 / math.sqrt((t - 16 + 100) / 100),
    ),
    "power cooldown": (
        eb.power_cooldown_schedule(0.3, 100, 60, power=1.2, warmup_steps=10, end=0.01),
        lambda t: 0.3 * t / 10 if t < 10 else 0.01 + 0.29 * (1 - min(max(t - 40, 0) / 60, 1)) ** 1.2,
    ),
    "1-sqrt cooldown": (
        eb.power_cooldown_schedule(0.3, 100, 60, power=0.5, of_passed=True),
        lambda t: 0.3 * (1 - math.sqrt(min(max(t - 40, 0) / 60, 1))),
    ),
    "cooldown and nothing else": (
        eb.power_cooldown_schedule(0.3, 60, 60, power=2.0),
        lambda t: 0.3 * (1 - min(t / 60, 1)) ** 2,
    ),
    "cosine to a power": (
        eb.cosine_decay_schedule(0.3, 70, end=0.01, exponent=1.5),
        lambda t: 0.01 + 0.29 * cosine(min(t / 70, 1)) ** 1.5,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_it_is_its_formula_at_every_step(name: str) -> None:
    ours, formula = FORMULAS[name]
    assert values(ours) == pytest.approx([formula(t) for t in range(STEPS)], rel=CLOSED, abs=0.3 * CLOSED)


ENDS: list[tuple[eb.Schedule, float, int, float]] = [
    (eb.linear_schedule(1e-3, 0.0, 3), 1e-3, 3, 0.0),
    (eb.cosine_decay_schedule(1.0, 8, end=0.1), 1.0, 8, 0.1),
    (eb.polynomial_schedule(0.3, 0.1, steps=9, power=3.0), 0.3, 9, 0.1),
    (eb.piecewise_constant_schedule(0.5, {3: 0.5, 7: 0.5}), 0.5, 7, 0.125),
    (eb.piecewise_interpolate_schedule(0.5, {3: 2.0, 7: 0.25}), 0.5, 7, 0.25),
    (eb.piecewise_interpolate_schedule(0.5, {3: 2.0, 7: 0.25}, interpolation="cosine"), 0.5, 7, 0.25),
    (eb.one_cycle_schedule(0.5, 20, start_divisor=5.0, end_divisor=10.0), 0.1, 19, 0.01),
    (eb.cosine_one_cycle_schedule(0.5, 20, start_divisor=5.0, end_divisor=10.0), 0.1, 20, 0.01),
    (eb.linear_one_cycle_schedule(0.5, 20, start_divisor=5.0, end_divisor=10.0), 0.1, 20, 0.01),
    (eb.power_cooldown_schedule(0.3, 20, 5, power=1.5), 0.3, 20, 0.0),
    (eb.warmup_constant_schedule(0.3, 5), 0.0, 5, 0.3),
    (
        eb.sgdr_schedule(
            [{"peak": 1.0, "warmup_steps": 2, "steps": 8}, {"peak": 0.5, "warmup_steps": 0, "steps": 6, "end": 0.25}]
        ),
        0.0, 14, 0.25,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "first", "steps", "last"), ENDS, ids=lambda one: type(one).__name__)
def test_the_first_update_has_the_first_value_and_the_last_value_comes_where_it_is_said_to(
    schedule: eb.Schedule, first: float, steps: int, last: float
) -> None:
    seen = values(schedule, steps + 5)
    assert seen[0] == pytest.approx(first, rel=CLOSED)
    assert seen[steps:] == [pytest.approx(last, rel=CLOSED, abs=0.0)] * 5
    assert seen[steps - 1] != pytest.approx(last, rel=1e-6)


def test_what_is_exact_is_exact() -> None:
    assert values(eb.constant_schedule(0.3), 4) == [0.3] * 4
    assert values(eb.linear_schedule(1.0, 3.0, 4), 7) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert values(eb.linear_schedule(1e-3, 0.0, 3), 5)[3:] == [0.0, 0.0]
    assert values(eb.cosine_decay_schedule(1.0, 8, end=0.1), 9)[8] == 0.1
    plateau = values(eb.warmup_stable_decay_schedule(1.0, 2, 3, 4), 11)
    assert plateau == [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    warmup = eb.warmup_cosine_decay_schedule(1.0, 4, steps=12, start=0.2, end=0.1)
    assert values(warmup, 15)[12:] == [0.1] * 3
    parts: list[Any] = [eb.linear_schedule(0.2, 1.0, 4), eb.cosine_decay_schedule(1.0, 8, end=0.1)]
    assert warmup == eb.join_schedules(parts, [4])


def test_the_peak_of_one_cycle_is_where_torchs_and_optaxs_are() -> None:
    assert values(eb.one_cycle_schedule(1.0, 20), 20)[5] == 1.0
    assert values(eb.cosine_one_cycle_schedule(1.0, 20), 20)[6] == 1.0
    linear = values(eb.linear_one_cycle_schedule(1.0, 20), 20)
    assert (linear[6], linear[17]) == (1.0, 1 / 25)


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(2, 10), st.integers(0, 12), st.integers(0, 10**6))
def test_restarts_are_exact_at_every_boundary(steps: int, growth: int, number: int, after: int) -> None:
    """The period of a step is a whole number's logarithm, which rounds; neighbours of the boundary are told apart all the same."""
    begin = steps * (growth**number - 1) // (growth - 1)
    length = steps * growth**number
    schedule = eb.cosine_restarts_schedule(1.0, steps, growth=growth)
    assert schedule(torch.tensor(begin)).item() == 1.0
    place = min(after, length - 1)
    assert schedule(torch.tensor(begin + place)).item() == pytest.approx(cosine(place / length), rel=CLOSED, abs=CLOSED)


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


@settings(deadline=None)
@given(st.integers(1, 1000), st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 3000))
def test_decays_stay_between_their_ends_and_stop_at_the_last(steps: int, start: float, end: float, step: int) -> None:
    low, high = min(start, end), max(start, end)
    slack = 4 * 2.0**-52 * max(abs(low), abs(high))  # a sum of two products, each rounded once
    for schedule in (eb.linear_schedule(start, end, steps), eb.cosine_decay_schedule(start, steps, end=end)):
        assert low - slack <= schedule(torch.tensor(step)).item() <= high + slack
        assert schedule(torch.tensor(0)).item() == pytest.approx(start, abs=slack)
        assert schedule(torch.tensor(steps + step)).item() == pytest.approx(end, abs=slack)


ALL: Sequence[Any] = [*(one for one, _ in (*TORCH.values(), *FORMULAS.values())), *(one[0] for one in ENDS)]


def test_schedules_are_values_on_every_device() -> None:
    for schedule in ALL:
        again = pickle.loads(pickle.dumps(schedule))
        assert again == schedule
        assert hash(again) == hash(schedule)
        value = schedule(torch.tensor(3))
        assert (value.shape, value.dtype) == ((), torch.float64)
        assert schedule(torch.tensor(3, device="meta")).device.type == "meta"
        assert again != eb.constant_schedule(7.0)
        assert "at 0x" not in repr(schedule)


@pytest.mark.parametrize(
    "schedule", [*(one for one, _ in list(FORMULAS.values())[:6]), TORCH["a sequence"][0]], ids=repr
)
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
        (lambda: eb.warmup_cosine_decay_schedule(1.0, 5, steps=5), r"^steps: got 5; accepted is more than warmup_steps = 5"),
        (lambda: eb.warmup_stable_decay_schedule(1.0, 1, 0, 1), r"^stable_steps: got 0"),
        (lambda: eb.join_schedules([], []), r"^boundaries: got 0 for 0 schedules"),
        (lambda: eb.join_schedules([eb.constant_schedule(1.0)], [3]), r"^boundaries: got 1 for 1 schedules"),
        (lambda: eb.join_schedules([eb.constant_schedule(1.0)] * 3, [5, 5]), r"^boundaries: got \(5, 5\); accepted are increasing"),
        (lambda: eb.join_schedules([eb.constant_schedule(1.0)] * 2, [0]), r"^boundaries: got \(0,\)"),
        (lambda: eb.polynomial_schedule(1.0, 0.0, steps=0), r"^steps: got 0"),
        (lambda: eb.polynomial_schedule(1.0, 0.0, steps=3, power=0.0), r"^power: got 0\.0; accepted is a number above"),
        (lambda: eb.polynomial_schedule(math.nan, 0.0, steps=3), r"^start: got nan"),
        (lambda: eb.exponential_decay_schedule(1.0, 0.0), r"^rate: got 0\.0"),
        (lambda: eb.exponential_decay_schedule(1.0, -0.5), r"^rate: got -0\.5"),
        (lambda: eb.exponential_decay_schedule(1.0, 0.5, 0), r"^steps: got 0"),
        (lambda: eb.inverse_sqrt_schedule(1.0, 0), r"^warmup_steps: got 0"),
        (lambda: eb.inverse_sqrt_schedule(1.0, 3, timescale=0.0), r"^timescale: got 0\.0"),
        (lambda: eb.power_cooldown_schedule(1.0, 10, 11, power=1.0), r"^cooldown_steps: got 11; accepted are at most .* 10"),
        (lambda: eb.power_cooldown_schedule(1.0, 10, 9, power=1.0, warmup_steps=2), r"^cooldown_steps: got 9; .* = 8"),
        (lambda: eb.power_cooldown_schedule(1.0, 10, 9, power=1.0, warmup_steps=-1), r"^warmup_steps: got -1"),
        (lambda: eb.piecewise_constant_schedule(1.0, {0: 0.5}), r"^factors: got 0; accepted is a whole number"),
        (lambda: eb.piecewise_constant_schedule(1.0, {3: -0.5}), r"^factors: got -0\.5"),
        (lambda: eb.piecewise_interpolate_schedule(1.0, {3: 0.5}, interpolation="cubic"), r"^interpolation: got 'cubic'; accepted are 'li"),  # type: ignore[arg-type]
        (lambda: eb.piecewise_interpolate_schedule(1.0, {3: -1.0}), r"^factors: got -1\.0"),
        (lambda: eb.one_cycle_schedule(1.0, 10, warmup_share=0.1), r"^warmup_share: got 0\.1, which ends phases after \(0\.0, 9"),
        (lambda: eb.one_cycle_schedule(1.0, 10, warmup_share=0.6, three_phase=True), r"^warmup_share: got 0\.6"),
        (lambda: eb.one_cycle_schedule(1.0, 10, start_divisor=0.0), r"^start_divisor: got 0\.0"),
        (lambda: eb.cosine_one_cycle_schedule(1.0, 3, warmup_share=0.3), r"^warmup_share: got 0\.3"),
        (lambda: eb.linear_one_cycle_schedule(1.0, 30, cooldown_share=0.2), r"^warmup_share, cooldown_share: got"),
        (lambda: eb.cosine_restarts_schedule(1.0, 10, growth=0), r"^growth: got 0"),
        (lambda: eb.cosine_decay_schedule(1.0, 10, exponent=-1.0), r"^exponent: got -1\.0"),
        (lambda: eb.sgdr_schedule([]), r"^boundaries: got 0 for 0"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
