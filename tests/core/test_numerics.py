"""What storage does to training: held to float32, to float64, and to what each format can and cannot resolve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.base import barriers
from tests.support.float_patterns import assert_same_bits

FIVE_SIGMA = 5.0
Tree = dict[str, Tensor]


def side_by_side(formats: Mapping[str, eb.ParamFormat]) -> eb.ByLabel:
    """A policy under which the parameter called ``name`` is stored in ``formats[name]``, moments in float32."""
    return eb.by_label(
        {name: name for name in formats}, {name: eb.Policy(params=format) for name, format in formats.items()}
    )


def constant_steps(formats: Mapping[str, eb.ParamFormat], start: Tensor, update: Tensor, steps: int) -> Tree:
    """Where each format gets from ``start`` with the same ``update`` at each step."""
    # Minus one times minus the update is the update, exactly.
    opt = eb.with_policy(eb.sgd(1.0), side_by_side(formats))
    low = {name: start.bfloat16() for name in formats}
    params, state = opt.import_fp32(dict.fromkeys(formats, start), low)
    grads = dict.fromkeys(formats, -update)
    for _ in range(steps):
        params, state = opt.step(params, grads, state)
    return opt.export_fp32(params, state)


# (a) Exact


@pytest.mark.slow
def test_split_16_training_is_bit_for_bit_the_float32_run() -> None:
    """1000 steps of AdamW with decay; the model's tensor is the float32 weight rounded to nearest at each, but for ties."""
    generator = torch.Generator().manual_seed(0)
    low = {
        "matrix": (0.02 * torch.randn(48, 16, generator=generator)).bfloat16(),
        "norm": torch.ones(33, dtype=torch.bfloat16),
        "bias": torch.zeros(7, dtype=torch.bfloat16),
    }
    wide = {name: p.float() for name, p in low.items()}
    transform = eb.adamw(1e-3, b2=0.95, weight_decay=0.1)
    exact, reference = eb.with_policy(transform, eb.policies.EXACT_BF16), eb.with_policy(transform, eb.policies.FP32)
    low_state, wide_state = exact.init(low), reference.init(wide)
    ties = 0
    for step in range(1000):
        scale = 10.0 ** (step % 5 - 3)
        grads = {name: scale * torch.randn(p.shape, generator=generator) for name, p in wide.items()}
        # As backward gives them: the same number to both.
        grads["matrix"] = grads["matrix"].bfloat16()
        low, low_state = exact.step(low, grads, low_state)
        wide, wide_state = reference.step(wide, grads, wide_state)
        recovered = exact.export_fp32(low, low_state)
        for name, weight in wide.items():
            assert_same_bits(recovered[name], weight)
            tie = (weight.view(torch.int32) & 0xFFFF) == 0x8000
            ties += int(tie.sum())
            assert torch.equal(low[name][~tie], weight.bfloat16()[~tie])
    assert all(not torch.equal(p.float(), wide[name]) for name, p in low.items())
    # 808 weights, one tie in 2**16 weights a step: a dozen are to be expected, and none would leave the exception untested.
    assert 0 < ties < 100
    moments, expected = low_state.inner.states[0], wide_state.inner.states[0]
    for name in wide:
        assert_same_bits(moments.momentum[name], expected.momentum[name])
        assert_same_bits(moments.variance[name], expected.variance[name])


def test_split_16_training_of_a_float16_model_is_bit_for_bit_the_float32_run() -> None:
    """As long as weights are in float16's normal range; there all 24 bits fit."""
    generator = torch.Generator().manual_seed(0)
    wide = (torch.rand(512, generator=generator) + 0.5).half().float()
    low = wide.half()
    exact, reference = (
        eb.with_policy(eb.adamw(1e-3), eb.policies.EXACT_BF16),
        eb.with_policy(eb.adamw(1e-3), eb.policies.FP32),
    )
    low_state, wide_state = exact.init(low), reference.init(wide)
    for _ in range(200):
        grad = torch.randn(512, generator=generator)
        low, low_state = exact.step(low, grad, low_state)
        wide, wide_state = reference.step(wide, grad, wide_state)
        assert_same_bits(exact.export_fp32(low, low_state), wide)
        # Round half away from zero, where torch rounds half to even.
        tie = (wide.view(torch.int32) & 0x1FFF) == 0x1000
        assert torch.equal(low[~tie], wide.half()[~tie])
    assert wide.abs().min() > 2.0**-14


# (b) Compensated, against float64


def adamw_in_float64(
    start: np.ndarray[Any, Any], grads: list[np.ndarray[Any, Any]], rates: list[float], weight_decay: float
) -> list[np.ndarray[Any, Any]]:
    """Loshchilov & Hutter's algorithm 2 with beta1 = 0.9, beta2 = 0.95, eps = 1e-8; the weights after each step."""
    p, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    path = []
    for step, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        p = p - rate * ((m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8) + weight_decay * p)
        path.append(p)
    return path


@pytest.mark.exhaustive
def test_kahan_stays_within_its_bound_of_a_float64_run_over_ten_thousand_steps() -> None:
    """AdamW with decay, the rate falling from 1e-3 to 1e-7, so that updates begin above and end far below what a residual resolves.

    Let h = 2**-17 |p|: half a step of a bfloat16 residual (see test_formats). One encode moves p + c by at most

    - nearest: h; and by no more than the update itself, since standing still (or on the tie that was crossed) is one of the choices;
    - stochastic: less than 2h, either way, and by nothing on average: n of them are a martingale of variance at most n h**2.

    What is encoded was computed in float32: off by 2**-24 |p| in the sum, and by 2**-16 of the rate in the direction, which is below
    2 in size (five roundings a step in each of the two means, coefficients included, forgotten at rates 0.1 and 0.05, and the second
    halved by the root: 2**-24 (5 / 0.1 + 5 / 0.05 / 2) < 2**-17). Decay pulls errors together, never apart. So the distance to the
    float64 run is at most the sum of these; for the stochastic residual five standard deviations, and the sum of the rest.
    """
    steps, weight_decay = 10_000, 0.1
    rates = [1e-3 * 10.0 ** (-4 * done / (steps - 1)) for done in range(steps)]
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(64, generator=generator).bfloat16()
    # Half of the weights are pushed one way, so that small updates add up to something that can get lost.
    drift = torch.linspace(0, 1, 64)
    grads = [torch.randn(64, generator=generator) + drift for _ in range(steps)]
    table = torch.tensor(rates, dtype=torch.float64)
    opt = eb.with_policy(
        eb.adamw(lambda done: table[done], b2=0.95, weight_decay=weight_decay),
        side_by_side({"nearest": eb.Kahan(), "stochastic": eb.Kahan(rounding="stochastic")}),
    )
    params = {"nearest": start, "stochastic": start}
    state = opt.init(params)
    for grad in grads:
        params, state = opt.step(params, {"nearest": grad, "stochastic": grad}, state)

    exact_path = adamw_in_float64(
        start.double().numpy(), [grad.double().numpy() for grad in grads], rates, weight_decay
    )
    path = torch.from_numpy(np.stack([start.double().numpy(), *exact_path]))
    size, update = path[1:].abs(), path.diff(dim=0).abs()
    arithmetic = (2.0**-24 * size + 2.0**-16 * table[:, None]).sum(0)
    h = 2.0**-17 * size
    bounds = {
        "nearest": torch.minimum(h, update).sum(0) + arithmetic,
        "stochastic": FIVE_SIGMA * h.square().sum(0).sqrt() + arithmetic,
    }
    kept = opt.export_fp32(params, state)
    for name, bound in bounds.items():
        error = (kept[name].double() - path[-1]).abs()
        # The bounds are of |p| along the float64 run; along the stored one it differs by the bound itself, a small share.
        assert (error <= 1.1 * bound).all(), name
    assert float((path[-1] - path[0]).abs().max()) > 0.5


# (c) Decay, and nothing else


def decay_shares(formats: Mapping[str, eb.ParamFormat], start: Tree, rate: float, steps: int) -> Tree:
    """By each weight's logarithm: the share of a decay by ``rate`` a step, under zero gradients, that took place."""
    opt = eb.with_policy(eb.sgd(1e-3, weight_decay=rate / 1e-3), side_by_side(formats))
    params = {name: start[name] for name in formats}
    state, grads = opt.init(params), eb.tree.zeros_like(params)
    for _ in range(steps):
        params, state = opt.step(params, grads, state)
    kept = opt.export_fp32(params, state)
    return {name: (p.double() / start[name].double()).log() / (steps * math.log1p(-rate)) for name, p in kept.items()}


@pytest.mark.slow
def test_decay_of_a_hundred_thousandth_a_step_is_effective_to_a_thousandth() -> None:
    """lr * wd = 1e-5, no gradient, 1000 steps: the mean share over all weights is 1 to within 1e-3.

    float32 is within 2**-24 / 1e-5 = 0.6 % for one weight, either way as it falls, and less by sqrt(2000) for the mean. A stochastic
    second part adds at most half of its step s as deviation to a weight's logarithm, each time: s / 2 sqrt(1000 n) to the sum over
    n = 2**14 weights, of which 1000 n 1e-5 is due. For s = 2**-16 five deviations are 1e-3; for Split(8), 2**-15, twice that.
    """
    many = torch.randn(2**14, generator=torch.Generator().manual_seed(0)).bfloat16()
    # The float16 residual has steps of 2**-24, and keeps nothing below 2**-16: of small weights it claims nothing.
    many = torch.where(many.abs() < 2.0**-6, 2.0**-6, many)
    few = many[:2000]
    claims: dict[str, tuple[eb.ParamFormat, Tensor, float]] = {
        "exact": (eb.Split(16), few, 1e-3),
        "main": (eb.Master(), few, 1e-3),
        "float32 residual": (eb.Kahan("float32"), few, 1e-3),
        "stochastic residual": (eb.Kahan(rounding="stochastic"), many, 1e-3),
        "stochastic float16 residual": (eb.Kahan("float16", rounding="stochastic"), many, 1e-3),
        "stochastic remainder": (eb.Split(8, "stochastic"), many, 2e-3),
    }
    formats = {name: format for name, (format, _, _) in claims.items()}
    shares = decay_shares(formats, {name: start for name, (_, start, _) in claims.items()}, 1e-5, 1000)
    for name, (_, _, tolerance) in claims.items():
        assert abs(float(shares[name].mean()) - 1) <= tolerance, name


def test_decay_is_lost_on_plain_bfloat16() -> None:
    """Through the preset, with AdamW: not one bit of one weight changes in 200 steps, and half a step is far away."""
    opt = eb.with_policy(eb.adamw(1e-3, weight_decay=1e-2), eb.policies.PURE_BF16, unsafe="allow")
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    params, state = start, opt.init(start)
    for _ in range(200):
        params, state = opt.step(params, torch.zeros_like(start), state)
    assert_same_bits(params, start)


@pytest.mark.slow
def test_decay_under_a_residual_rounded_to_nearest_needs_more_than_2_to_the_minus_17() -> None:
    """Half a step of the residual is at most 2**-17 of the weight (float16: 2**-20). Above, decay is off by no more; below, it ends."""
    start = (1 + torch.rand(256, generator=torch.Generator().manual_seed(0))).bfloat16()
    formats: dict[str, eb.ParamFormat] = {"bfloat16": eb.Kahan(), "float16": eb.Kahan("float16")}
    starts = dict.fromkeys(formats, start)
    above = decay_shares(formats, starts, 1e-4, 300)
    assert ((above["bfloat16"] - 1).abs() <= 2.0**-17 / 1e-4).all()
    assert ((above["float16"] - 1).abs() <= 2.0**-20 / 1e-4).all()
    # One way for one weight, the other way for the next.
    assert abs(float(above["bfloat16"].mean()) - 1) <= 1e-2
    # Half a step of a residual in the binade below its coarsest, 2**-19 of a weight at least, is about 2e-6: there it stops. So what
    # it loses in all is less than the coarsest binade, 2**-9, reaches.
    below = decay_shares(formats, starts, 1.9e-6, 1500)
    assert (below["bfloat16"] * 1500 * 1.9e-6 <= 2.0**-9).all()
    assert float(below["bfloat16"].mean()) < 0.5
    assert ((below["float16"] - 1).abs() <= 2.0**-20 / 1.9e-6).all()


# (d) The smallest update that moves a weight

# Half of the coarsest step with which numbers in [1, 2) are kept, so what an update must exceed; derived in test_formats.
THRESHOLDS: dict[str, tuple[eb.ParamFormat, float]] = {
    "bfloat16": (eb.Nearest(), 2.0**-8),
    "bfloat16 + bfloat16": (eb.Kahan(), 2.0**-17),
    "bfloat16 + float16": (eb.Kahan("float16"), 2.0**-20),
    "bfloat16 + int8": (eb.Split(8), 2.0**-16),
    "bfloat16 + int16": (eb.Split(16), 2.0**-24),
    "bfloat16 + float32": (eb.Kahan("float32"), 2.0**-24),
    "bfloat16, float32 main": (eb.Master(), 2.0**-24),
}
NO_THRESHOLD: dict[str, eb.ParamFormat] = {
    "stochastic": eb.Stochastic(),
    "stochastic bfloat16 residual": eb.Kahan(rounding="stochastic"),
    "stochastic float16 residual": eb.Kahan("float16", rounding="stochastic"),
    "stochastic remainder": eb.Split(8, "stochastic"),
}
# Formats with a second part keep the first number exactly; the residual is in its coarsest binade, and stays there for a while.
COARSE, PLAIN = 1.0 + 2.0**-9 + 2.0**-10, 1.5


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_weight_moves_if_the_update_is_more_than_half_a_step_and_not_if_it_is_less(
    name: str, direction: float
) -> None:
    format, threshold = THRESHOLDS[name]
    start = torch.tensor([PLAIN if name == "bfloat16" else COARSE])
    for factor, moves in ((0.75, 0), (1.25, 1)):
        update = torch.tensor([direction * factor * threshold])
        end = constant_steps({name: format}, start, update, 8)[name]
        # A weight that moves does so by a whole step, twice the threshold, each time.
        assert float(end - start) == 8 * moves * direction * 2 * threshold


def test_what_arrives_of_small_updates_is_as_in_the_table() -> None:
    """Shares of 16 updates of one size, where residuals are coarsest: rounding to nearest makes nothing of them, or whole steps.

    In whole steps of 2**-16, 2**-19 and 2**-15; float32 itself moves in steps of 2**-23. Compare research/low_precision.md 7.2, whose
    weights start with a residual of zero, where a while goes by before it is coarse.
    """
    table: dict[str, dict[float, float]] = {
        "bfloat16": {2e-3: 0.0, 3.8e-3: 0.0, 4e-3: 2.0**-7 / 4e-3},
        "bfloat16 + bfloat16": {2e-6: 0.0, 5e-6: 0.0, 1e-5: 2.0**-16 / 1e-5, 3e-5: 2 * 2.0**-16 / 3e-5},
        "bfloat16 + float16": {1e-7: 0.0, 5e-7: 0.0, 2e-6: 2.0**-19 / 2e-6, 1e-5: 5 * 2.0**-19 / 1e-5},
        "bfloat16 + int8": {5e-6: 0.0, 1e-5: 0.0, 1.6e-5: 2.0**-15 / 1.6e-5, 3e-5: 2.0**-15 / 3e-5},
        "bfloat16 + int16": {5e-8: 0.0, 1e-7: 2.0**-23 / 1e-7, 1e-6: 8 * 2.0**-23 / 1e-6, 3e-5: 252 * 2.0**-23 / 3e-5},
    }
    for name, expected in table.items():
        updates = torch.tensor(list(expected))
        start = torch.full_like(updates, PLAIN if name == "bfloat16" else COARSE)
        end = constant_steps({name: THRESHOLDS[name][0]}, start, updates, 16)[name]
        shares = (end.double() - start.double()) / (16 * updates.double())
        # The float32 of 3e-5 and its like are within 2**-24 of what is written.
        torch.testing.assert_close(
            shares, torch.tensor(list(expected.values()), dtype=torch.float64), rtol=2.0**-24, atol=0
        )


def test_stochastic_formats_have_no_smallest_update() -> None:
    """Updates of 1e-7 and 1e-6, a thirtieth of the coarsest step and less, arrive on average, as they do in float32.

    n weights, T steps: each encode adds a deviation of at most half a step q, so q / 2 sqrt(T / n) to the mean. What float32 makes of
    p + 1e-7 is p + 2**-23, so the comparison is with the main copy, not with 1e-7.
    """
    weights, steps = 2**13, 192
    quanta = {"stochastic": 2.0**-7, "stochastic bfloat16 residual": 2.0**-16, "stochastic float16 residual": 2.0**-19}
    quanta["stochastic remainder"] = 2.0**-15
    start, update = torch.full((weights,), 1.5), torch.tensor([1e-7, 1e-6]).repeat_interleave(weights // 2)
    ends = constant_steps({**NO_THRESHOLD, "main": eb.Master()}, start, update, steps)
    intended = (ends.pop("main").double() - start).view(2, -1).mean(1)
    for name, end in ends.items():
        moved = (end.double() - start).view(2, -1).mean(1)
        deviation = quanta[name] / 2 * math.sqrt(steps / (weights / 2))
        assert ((moved - intended).abs() <= FIVE_SIGMA * deviation).all(), name


# (e) The second moment


@pytest.mark.exhaustive
def test_a_bfloat16_second_moment_follows_a_falling_gradient_if_it_is_not_rounded_to_nearest() -> None:
    """Gradients 1.0 for 200 steps, then 0.01 for 3800, beta2 = 0.999: 0.00415 in float32, and torch's own Adam stops at 0.196.

    Each stored square is within half a step, 2**-9 of itself, at random; the running mean averages 500 of them, and 4096 weights are
    averaged here, so that the mean is off by 2**-9 sqrt(500 / 4096) at most: five of these deviations are 0.4 %.
    """
    formats: dict[str, eb.StateFormat] = {
        "stochastic": eb.Stochastic(),
        "kahan": eb.Kahan(),
        "stochastic remainder": eb.Split(8, "stochastic"),
    }
    policies = {name: eb.Policy(variance=format) for name, format in formats.items()}
    opt = eb.with_policy(eb.adam(1e-3, b2=0.999), eb.by_label({name: name for name in formats}, policies))
    params = {name: torch.ones(4096 if name == "stochastic" else 64, dtype=torch.bfloat16) for name in formats}
    state = opt.init(params)
    theirs = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adam = torch.optim.Adam([theirs], lr=1e-3, betas=(0.9, 0.999))
    for size, count in ((1.0, 200), (0.01, 3800)):
        grads = {name: torch.full_like(p, size, dtype=torch.float32) for name, p in params.items()}
        theirs.grad = torch.full_like(theirs, size)
        for _ in range(count):
            params, state = opt.step(params, grads, state)
            adam.step()
    stored = state.inner.states[1].variance
    ends = {}
    for name, format in formats.items():
        parts = stored[name] if isinstance(stored[name], tuple) else (stored[name],)
        ends[name] = float(
            format.for_slot("non-negative", "float32").decode(parts, parts[0].shape, "float32").double().mean()
        )
    float64 = 0.0
    for size, count in ((1.0, 200), (0.01, 3800)):
        for _ in range(count):
            float64 = 0.999 * float64 + 0.001 * size * size
    assert float64 == pytest.approx(0.00415, rel=1e-2)
    assert float(adam.state[theirs]["exp_avg_sq"].max()) == pytest.approx(0.196, rel=0.01)
    for name, end in ends.items():
        assert end == pytest.approx(float64, rel=1e-2), name


# (f) Where an element lies does not matter


STOCHASTIC_POLICIES: dict[str, eb.Policy] = {
    "LEAN_BF16": eb.policies.LEAN_BF16,
    "TIGHT_BF16": eb.policies.TIGHT_BF16,
    "FLOOR_BF16": eb.policies.FLOOR_BF16,
    "all of it": eb.Policy(
        params=eb.Kahan(rounding="stochastic"),
        momentum=eb.Stochastic(),
        variance=eb.Split(8, "stochastic"),
    ),
}


def run(policy: eb.Policy, params: Any, gradients: list[Any], ctx: eb.Context | None = None) -> tuple[Any, Any]:
    """Parameters and state after a step for each of ``gradients``."""
    opt = eb.with_policy(eb.adamw(1e-3), policy, seed=3)
    ctx = eb.Context() if ctx is None else ctx
    state = opt.init(params, ctx)
    for grads in gradients:
        params, state = opt.step(params, grads, state, ctx)
    return params, state


@pytest.mark.parametrize("policy", STOCHASTIC_POLICIES.values(), ids=STOCHASTIC_POLICIES.keys())
def test_a_tree_its_flat_buffer_and_any_shards_of_it_are_rounded_alike(policy: eb.Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (), "c": (41,)}
    params = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    gradients = [{n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} for _ in range(10)]

    def flat(tree: Tree) -> Tensor:
        return torch.cat([leaf.reshape(-1) for leaf in tree.values()])

    def parts_of(found: tuple[Any, Any]) -> list[Tensor]:
        """Every stored tensor, each as one row of 57 or a piece of it, counters left out."""
        params, state = found
        adam = state.inner.states[0] if hasattr(state.inner.states[0], "momentum") else state.inner.states[1]
        rows = []
        for slot in (params, state.extra, adam.momentum, adam.variance):
            leaves = [slot] if not isinstance(slot, dict) else list(slot.values())
            columns = zip(*[leaf if isinstance(leaf, tuple) else (leaf,) for leaf in leaves], strict=True)
            rows += [torch.cat([part.reshape(-1) for part in column]) for column in columns]
        return rows

    whole = parts_of(run(policy, params, gradients))
    for row, other in zip(whole, parts_of(run(policy, flat(params), [flat(g) for g in gradients])), strict=True):
        assert_same_bits(other, row)
    for cuts in ([0, 57], [0, 1, 16, 57], [0, 20, 40, 57]):
        shards = [
            parts_of(run(policy, flat(params)[a:b], [flat(g)[a:b] for g in gradients], eb.Context(first_element=a)))
            for a, b in pairwise(cuts)
        ]
        for row, pieces in zip(whole, zip(*shards, strict=True), strict=True):
            assert_same_bits(torch.cat(pieces), row)
    # Without being told where it lies, the last shard draws the first one's bits.
    lost = parts_of(run(policy, flat(params)[20:], [flat(g)[20:] for g in gradients]))
    assert any(not torch.equal(piece, row[20:]) for piece, row in zip(lost, whole, strict=True))


def test_another_seed_rounds_otherwise_and_the_same_seed_alike() -> None:
    params, grads = torch.ones(512, dtype=torch.bfloat16), torch.ones(512)

    def first_step(seed: int) -> Tensor:
        opt = eb.with_policy(eb.sgd(1e-3), eb.policies.FLOOR_BF16, seed=seed)
        return opt.step(params, grads, opt.init(params))[0]

    assert_same_bits(first_step(1), first_step(1))
    assert not torch.equal(first_step(1), first_step(2))


# (g) How a user sees it


def test_metrics_tell_lost_updates_from_late_and_from_lucky_ones() -> None:
    """One step of lr 2**-12 on weights of 1 with gradients of 1, a fourth of them zero: what each format makes of it.

    The update is a 32nd of the distance 2**-7 to the next bfloat16 upwards, a 16th of that downwards, which is where it goes. So
    stochastic rounding moves one weight in 16, by 16 times the update: 15 of 16 are "lost", and the share that arrives is 1 on
    average, within five deviations of a binomial.
    """
    count = 2**14
    grads = torch.ones(count)
    grads[::4] = 0.0
    moving = count * 3 // 4
    expected = {
        "PURE_BF16": (1.0, 0.0),
        "KAHAN_BF16": (0.0, 1.0),
        "EXACT_BF16": (0.0, 1.0),
        "MIXED_BF16": (0.0, 1.0),
        "FP32": (0.0, 1.0),
    }
    for name, (lost, arrived) in expected.items():
        opt = eb.with_metrics(eb.with_policy(eb.sgd(2.0**-12), eb.policies.PRESETS[name]))
        params = torch.ones(count, dtype=torch.float32 if name == "FP32" else torch.bfloat16)
        metrics = opt.step(params, grads, opt.init(params))[1].metrics
        # 1 - 2**-12 has 12 bits: whatever keeps more keeps it exactly, and so are all the sums below.
        assert (float(metrics.lost_share), float(metrics.edq), int(metrics.moved)) == (lost, arrived, moving), name
        assert float(metrics.update_norm) == 2.0**-12 * math.sqrt(moving)
        assert float(metrics.gradient_norm) == math.sqrt(moving)
    opt = eb.with_metrics(eb.with_policy(eb.sgd(2.0**-12), eb.policies.FLOOR_BF16))
    start = torch.ones(count, dtype=torch.bfloat16)
    params, state = opt.step(start, grads, opt.init(start))
    deviation = math.sqrt(1 / 16 * 15 / 16 / moving)
    assert abs(float(state.metrics.lost_share) - 15 / 16) <= FIVE_SIGMA * deviation
    assert abs(float(state.metrics.edq) - 1.0) <= FIVE_SIGMA * deviation * 16
    # The same by hand, from what the model sees.
    went = (params.double() - start.double()).numpy()
    meant = -(2.0**-12) * grads.double().numpy()
    assert float(state.metrics.lost) == np.count_nonzero((went == 0) & (meant != 0))
    assert float(state.metrics.edq) == (went @ meant) / (meant @ meant)


@pytest.mark.parametrize("length", [7, 33, 1000, 4001, 100_000])
def test_a_sum_of_squares_does_not_depend_on_where_its_elements_lie(length: int) -> None:
    """A library that adds up by aligned vectors (MKL on AMD's processors) has other last bits at other addresses."""
    x, room = torch.randn(length, dtype=torch.float64), torch.empty(length + 16, dtype=torch.float64)
    found = set()
    for offset in range(16):
        found.add(float(barriers.sum_of_squares(room[offset : offset + length].copy_(x))))
    assert len(found) == 1
