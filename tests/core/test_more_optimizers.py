"""Optimizers against their papers' formulas, written out again in float64, over 200 random steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.following import (
    PEAK,
    STEPS,
    Tensors,
    deviation,
    formula,
    gradients,
    ours,
    ours_with_averages,
    rate,
    schedule,
    start,
)

Rate = Callable[[int], float]
Follow = Callable[[Tensor, list[Tensor], Rate], Iterator[Tensor]]

# Each step adds some 16 rounded numbers, none larger than the largest weight, of which the deviation is a share: 16 * 2**-53 a step.
ROUNDING = STEPS * 16 * 2.0**-53


def decayed_mean(values: list[Tensor], decay: float) -> Tensor:
    """A running mean from zero, summed up anew."""
    shares = (1 - decay) * decay ** torch.arange(len(values) - 1, -1, -1, dtype=torch.float64)
    mean: Tensor = torch.tensordot(shares, torch.stack(values), dims=1)
    return mean


def ademamix(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    b1, b2, b3, alpha, warmup = 0.9, 0.999, 0.9999, 5.0, 150
    slow = torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        done = t / warmup
        log1, log3 = math.log(b1), math.log(b3)
        decay = min(math.exp(log1 * log3 / ((1 - done) * log3 + done * log1)), b3)
        slow = decay * slow + (1 - decay) * g
        fast = decayed_mean(grads[:t], b1) / (1 - b1**t)
        square = decayed_mean([x * x for x in grads[:t]], b2) / (1 - b2**t)
        p = p - lr(t - 1) * ((fast + min(done, 1.0) * alpha * slow) / (square.sqrt() + 1e-8) + 0.1 * p)
        yield p


def adopt(power: float | None, nesterov: bool) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        b1, b2 = 0.9, 0.99
        square, mean = grads[0] ** 2, torch.zeros_like(p)
        yield p
        for done, g in enumerate(grads[1:], 1):
            share = g / square.sqrt().clamp(min=1e-6)
            if power is not None:
                share = share.clamp(-(done**power), done**power)
            mean = b1 * mean + (1 - b1) * share
            ahead = b1 * mean + (1 - b1) * share if nesterov else mean
            p = p - lr(done) * (ahead + 0.1 * p)
            square = b2 * square + (1 - b2) * g**2
            yield p

    return follow


def lamb(most: float) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        for t in range(1, STEPS + 1):
            mean = decayed_mean(grads[:t], 0.9) / (1 - 0.9**t)
            square = decayed_mean([x * x for x in grads[:t]], 0.999) / (1 - 0.999**t)
            u = mean / (square.sqrt() + 1e-6) + 0.1 * p
            p = p - lr(t - 1) * min(float(p.norm() / u.norm()), most) * u
            yield p

    return follow


def lars(joint: bool, inside: bool) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        buffer = torch.zeros_like(p)
        for done, g in enumerate(grads):
            norm = (g + 0.1 * p).norm() if joint else g.norm() + 0.1 * p.norm()
            u = (g + 0.1 * p) * 0.5 * p.norm() / (norm + 1e-8)
            buffer = 0.9 * buffer + (lr(done) * u if inside else u)
            p = p - (buffer if inside else lr(done) * buffer)
            yield p

    return follow


def adan(ahead: float, proximal: bool) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        changes = [torch.zeros_like(p), *(b - a for a, b in itertools.pairwise(grads))]
        for t in range(1, STEPS + 1):
            mean = decayed_mean(grads[:t], 0.98) / (1 - 0.98**t)
            change = decayed_mean(changes[:t], 0.92) / (1 - 0.92**t)
            looked = [(g + ahead * c) ** 2 for g, c in zip(grads[:t], changes[:t], strict=True)]
            u = (mean + ahead * change) / ((decayed_mean(looked, 0.99) / (1 - 0.99**t)).sqrt() + 1e-8)
            eta = lr(t - 1)
            p = (p - eta * u) / (1 + eta * 0.1) if proximal else p - eta * (u + 0.1 * p)
            yield p

    return follow


def adabelief(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    mean, square = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * (g - mean) ** 2 + 1e-10
        p = p - lr(t - 1) * (mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-8) + 0.1 * p)
        yield p


def yogi(first: float) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        mean, square = torch.full_like(p, first), torch.full_like(p, 1e-6)
        for t, g in enumerate(grads, 1):
            mean = 0.9 * mean + 0.1 * g
            square = square - 0.001 * torch.sign(square - g**2) * g**2
            p = p - lr(t - 1) * (mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-3) + 0.1 * p)
            yield p

    return follow


def laprop(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    shares: list[Tensor] = []
    for t in range(1, STEPS + 1):
        square = decayed_mean([x * x for x in grads[:t]], 0.999) / (1 - 0.999**t)
        shares.append(grads[t - 1] / (square.sqrt() + 1e-15))
        p = p - lr(t - 1) * (decayed_mean(shares, 0.9) / (1 - 0.9**t) + 0.1 * p)
        yield p


def signum(decay: float) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        for t in range(1, STEPS + 1):
            p = p - lr(t - 1) * (decayed_mean(grads[:t], decay).sign() + 0.1 * p)
            yield p

    return follow


def stable_adamw(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    for t, g in enumerate(grads, 1):
        mean = decayed_mean(grads[:t], 0.9) / (1 - 0.9**t)
        square = decayed_mean([x * x for x in grads[:t]], 0.5) / (1 - 0.5**t)
        eta = lr(t - 1) / max(1.0, float((g * g / square.clamp(min=1e-12)).mean().sqrt()))
        p = p - eta * (mean / (square.sqrt() + 1e-6) + 0.1 * p)
        yield p


def mars(most: float, sign: bool, before: float) -> Follow:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        corrected: list[Tensor] = []
        for t, g in enumerate(grads, 1):
            last = grads[t - 2] if t > 1 else before * g
            c = g + 0.025 * 0.95 / 0.05 * (g - last)
            corrected.append(c / max(1.0, float(c.norm()) / most))
            mean = decayed_mean(corrected, 0.95)
            square = decayed_mean([x * x for x in corrected], 0.99) / (1 - 0.99**t)
            u = mean.sign() if sign else mean / (1 - 0.95**t) / (square.sqrt() + 1e-8)
            p = p - lr(t - 1) * (u + 0.1 * p)
            yield p

    return follow


def adam_atan2(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
    for t in range(1, STEPS + 1):
        mean = decayed_mean(grads[:t], 0.9) / (1 - 0.9**t)
        square = decayed_mean([x * x for x in grads[:t]], 0.99) / (1 - 0.99**t)
        p = p - lr(t - 1) * (1.5 * torch.atan2(mean, 0.5 * square.sqrt()) + 0.1 * p)
        yield p


DECAY: dict[str, Any] = {"weight_decay": 0.1}
FORMULAS: dict[str, tuple[eb.Transform[Any], Follow]] = {
    "ademamix": (eb.ademamix(schedule, alpha_warmup=150, b3_warmup=150, **DECAY), ademamix),
    "adam-atan2": (eb.adam_atan2(schedule, a=1.5, b=0.5, **DECAY), adam_atan2),
    "adopt": (eb.adopt(schedule, b2=0.99, **DECAY), adopt(0.25, nesterov=False)),
    "adopt, unclipped, nesterov": (
        eb.adopt(schedule, b2=0.99, clip_power=None, nesterov=True, **DECAY),
        adopt(None, nesterov=True),
    ),
    "lamb": (eb.lamb(schedule, **DECAY), lamb(math.inf)),
    "lambc": (eb.lamb(schedule, max_ratio=1.0, **DECAY), lamb(1.0)),
    "lars": (eb.lars(schedule, trust_coefficient=0.5, **DECAY), lars(joint=False, inside=False)),
    "lars, joint, inside": (
        eb.lars(schedule, trust_coefficient=0.5, joint_norm=True, rate_inside=True, **DECAY),
        lars(joint=True, inside=True),
    ),
    "adan": (eb.adan(schedule, **DECAY), adan(0.92, proximal=True)),
    "adan, as optax": (eb.adan(schedule, look_ahead=0.08, proximal=False, **DECAY), adan(0.08, proximal=False)),
    "adabelief": (eb.adabelief(schedule, eps=1e-8, eps_root=1e-10, **DECAY), adabelief),
    "yogi": (eb.yogi(schedule, **DECAY), yogi(0.0)),
    "yogi, as optax": (eb.yogi(schedule, initial_mean=1e-6, **DECAY), yogi(1e-6)),
    "laprop": (eb.laprop(schedule, **DECAY), laprop),
    "signum": (eb.signum(schedule, **DECAY), signum(0.9)),
    "tiger": (eb.tiger(schedule, **DECAY), signum(0.965)),
    "stable adamw": (eb.stable_adamw(schedule, b2=0.5, **DECAY), stable_adamw),
    "mars": (eb.mars(schedule, **DECAY), mars(1.0, sign=False, before=1.0)),
    "mars, as the authors": (eb.mars(schedule, zero_before=True, **DECAY), mars(1.0, sign=False, before=0.0)),
    "mars lion": (eb.mars(schedule, sign=True, max_norm=None, **DECAY), mars(math.inf, sign=True, before=1.0)),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.sampled(2)
def test_it_is_the_papers_formula(name: str) -> None:
    transform, follow = FORMULAS[name]
    assert deviation(ours(transform), formula(follow)) <= ROUNDING


@pytest.mark.parametrize(("adam", "warmup", "r"), [(False, 0, 0.0), (True, 30, 2.0)])
def test_schedule_free_averages_what_it_steps(adam: bool, warmup: int, r: float) -> None:
    """Here x, y and z are kept apart, and x is averaged as the paper writes it; what is compared are y and x."""

    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        x, z, shares, greatest = p, p, 0.0, 0.0
        for t, g in enumerate(grads, 1):
            square = decayed_mean([one * one for one in grads[:t]], 0.999) / (1 - 0.999**t)
            y = 0.1 * z + 0.9 * x
            u = (g / (square.sqrt() + 1e-8) if adam else g) + 0.1 * y
            eta = lr(t - 1) * min(t / warmup, 1.0) if warmup else lr(t - 1)
            greatest = max(greatest, eta)
            shares += t**r * greatest**2
            z = z - eta * u
            share = t**r * greatest**2 / shares
            x = (1 - share) * x + share * z
            yield torch.stack([0.1 * z + 0.9 * x, x])

    make = eb.schedule_free_adamw if adam else eb.schedule_free_sgd
    found = ours_with_averages(make(schedule, warmup_steps=warmup, r=r, weight_decay=0.1))
    expected = formula(follow)
    for index in (0, 1):
        assert deviation(
            [one[index] for one in found], [{k: v[index] for k, v in one.items()} for one in expected]
        ) <= (ROUNDING)


@pytest.mark.parametrize("sgd_phase", [False, True])
def test_schedule_free_radam_rectifies_what_it_steps(sgd_phase: bool) -> None:
    def follow(p: Tensor, grads: list[Tensor], lr: Rate) -> Iterator[Tensor]:
        x, z, shares, greatest = p, p, 0.0, 0.0
        for t, g in enumerate(grads, 1):
            longest = 2 / 0.01 - 1
            length = longest - 2 * t * 0.99**t / (1 - 0.99**t)
            trusted = length > 4
            square = decayed_mean([one * one for one in grads[:t]], 0.99) / (1 - 0.99**t)
            y = 0.1 * z + 0.9 * x
            u = (g / (square.sqrt() + 1e-8) if trusted else g) + 0.1 * y
            factor = float(sgd_phase)
            if trusted:
                factor = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
            eta = lr(t - 1) * factor
            greatest = max(greatest, eta)
            shares += greatest**2
            z = z - eta * u
            share = greatest**2 / shares if shares else 0.0
            x = (1 - share) * x + share * z
            yield torch.stack([0.1 * z + 0.9 * x, x])

    found = ours_with_averages(eb.schedule_free_radam(schedule, b2=0.99, weight_decay=0.1, sgd_phase=sgd_phase))
    expected = formula(follow)
    for index in (0, 1):
        assert deviation(
            [one[index] for one in found], [{k: v[index] for k, v in one.items()} for one in expected]
        ) <= (ROUNDING)


def prodigy(*, growth: float = math.inf, unbiased: bool = False, safeguard: bool = False) -> list[Tensors]:
    """Algorithm 4, with the two sums over all tensors."""
    p0, b1, b2, b3, d0 = start(), 0.9, 0.999, 0.999**0.5, 1e-3
    p, d, greatest, numerator = dict(p0), d0, d0, 0.0
    m, v, s = ({name: torch.zeros_like(value) for name, value in p0.items()} for _ in range(3))
    found = []
    for t, g in enumerate(gradients(), 1):
        size = d * 50 * rate(t - 1) * (math.sqrt(1 - b2**t) / (1 - b1**t) if unbiased else 1)
        numerator *= b3
        for name in p:
            numerator += d / d0 * size * float((g[name] * (p0[name] - p[name])).sum())
            s[name] = b3 * s[name] + d / d0 * (d if safeguard else size) * g[name]
            m[name] = b1 * m[name] + (1 - b1) * d * g[name]
            v[name] = b2 * v[name] + (1 - b2) * d * d * g[name] ** 2
        guess = numerator / sum(float(x.abs().sum()) for x in s.values())
        if d == d0:
            d = max(d, guess)
        greatest = max(greatest, guess)
        d = min(greatest, d * growth)
        p = {name: p[name] - size * (m[name] / (v[name].sqrt() + d * 1e-8) + 0.1 * p[name]) for name in p}
        found.append(p)
    return found


@pytest.mark.parametrize(
    "options", [{}, {"growth": 1.02}, {"unbiased": True}, {"safeguard": True}], ids=lambda options: str(options)
)
def test_prodigy_is_the_papers_algorithm(options: dict[str, Any]) -> None:
    """The estimate is a quotient of sums that begin a thousand times smaller, and everything is in proportion to it."""
    tx = eb.prodigy(
        lambda done: 50 * schedule(done),
        d0=1e-3,
        weight_decay=0.1,
        growth_rate=options.get("growth"),
        bias_correction=options.get("unbiased", False),
        safeguard_warmup=options.get("safeguard", False),
    )
    expected = prodigy(**options)
    assert deviation(ours(tx), expected) <= ROUNDING * 10
    optimizer = eb.with_policy(tx, eb.policies.FP64)
    params, state = start(), optimizer.init(start())
    for gradient in gradients():
        params, state = optimizer.step(params, gradient, state)
    assert float(state.inner.estimate) > 1.1e-3


def test_prodigys_estimate_is_that_of_all_tensors_together() -> None:
    """Not that of each: with one tensor the estimate is another."""
    optimizer = eb.with_policy(eb.prodigy(d0=1e-3), eb.policies.FP64)
    estimates = []
    for names in (("matrix", "vector", "scalar"), ("matrix",)):
        params = {name: start()[name] for name in names}
        state = optimizer.init(params)
        for gradient in gradients()[:20]:
            params, state = optimizer.step(params, {name: gradient[name] for name in names}, state)
        estimates.append(float(state.inner.estimate))
    assert estimates[0] != pytest.approx(estimates[1], rel=1e-3)


def test_nothing_moves_while_prodigy_has_seen_zero_gradients_only() -> None:
    optimizer = eb.with_policy(eb.prodigy(weight_decay=0.1), eb.policies.FP64)
    params = start()
    moved, state = optimizer.step(params, eb.tree.zeros_like(params), optimizer.init(params))
    assert all(torch.equal(moved[name], params[name]) for name in params)
    assert float(state.inner.estimate) == 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: eb.ademamix(b3_warmup=0),
            r"^b3_warmup: got 0; accepted is a whole number of updates, at least 1, or None",
        ),
        (lambda: eb.schedule_free_sgd(b1=0.0), r"^b1: got 0\.0; accepted is a number in \(0, 1\]"),
        (
            lambda: eb.schedule_free_adamw(warmup_steps=-1),
            r"^warmup_steps: got -1; accepted is a whole number of updates",
        ),
        (lambda: eb.prodigy(d0=0.0), r"^d0: got 0\.0; accepted is a number above zero"),
        (lambda: eb.prodigy(growth_rate=0.5), r"^growth_rate: got 0\.5"),
        (lambda: eb.begin_after(-1), r"^steps: got -1; accepted is a whole number of updates, at least 0"),
        (lambda: eb.adan(b2=1.0), r"^b2: got 1\.0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_tensor_without_norm_is_moved_by_a_ratio_of_one() -> None:
    tx = eb.chain(eb.scale_by_trust_ratio(), eb.scale_by_learning_rate(PEAK))
    optimizer = eb.with_policy(tx, eb.policies.FP64)
    params, gradient = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    moved, _ = optimizer.step(params, gradient, optimizer.init(params))
    assert torch.equal(moved, torch.full((3,), -PEAK, dtype=torch.float64))


def test_adam_atan2_has_angles_where_there_are_no_squares() -> None:
    """Of a gradient whose square is zero in float32, and of no gradient."""
    params = torch.zeros(4)
    gradient = torch.tensor([1e-30, -1e-30, 0.0, 1e-3])
    optimizer = eb.with_policy(eb.adam_atan2(1.0, a=1.0), eb.policies.FP32)
    moved, _ = optimizer.step(params, gradient, optimizer.init(params))
    expected = torch.tensor([-math.pi / 2, math.pi / 2, 0.0, -math.pi / 4])
    # Of a half-way point of pi, rounded twice, and of the moments' roundings.
    torch.testing.assert_close(moved, expected, rtol=0, atol=8 * 2.0**-24)
