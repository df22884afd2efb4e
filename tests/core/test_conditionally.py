"""Updates only while a condition holds, parameters that are frozen for a while, and the format of accumulated gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit import testing
from everybit.protocol import Context

Params = dict[str, Tensor]
SHAPES = {"body.weight": (5, 4), "body.bias": (3,), "head.weight": (4,), "scale": ()}
LABELS = eb.by_name({"body": "body"}, default="rest")


def draws(seed: int, dtype: torch.dtype = torch.float64) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def bits(values: object) -> list[bytes]:
    return [leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for leaf in eb.tree.leaves(values)]


# conditionally


def trained(tx: eb.Transform[Any], holds: list[bool], *, only_if: bool) -> tuple[Params, Any]:
    """The weights after an update for each entry; with ``only_if`` a loop of Python leaves out those that do not hold."""
    params = draws(0)
    state = tx.init(params)
    for step, here in enumerate(holds):
        if here or not only_if:
            updates, state = tx.update(draws(step + 1), state, params, Context(step=torch.tensor(step + 1)))
            params = eb.apply_updates(params, updates)
    return params, state


def test_where_a_condition_does_not_hold_it_is_as_if_the_step_had_not_been() -> None:
    """Counts included: the inner schedule and bias corrections see the updates that are made."""
    inner = eb.adamw(eb.linear_schedule(0.1, 0.0, 20), weight_decay=0.3)
    pattern = [step % 3 != 1 for step in range(20)]
    got, state = trained(eb.conditionally(inner, lambda done: done % 3 != 1), pattern, only_if=False)
    expected, expected_state = trained(inner, pattern, only_if=True)
    assert bits(got) == bits(expected)
    assert bits(state.inner) == bits(expected_state)
    assert int(state.step) == sum(pattern)


@pytest.mark.parametrize("value", [True, 1.0, 2, torch.tensor(True), torch.tensor(0.5)])
def test_a_number_or_a_tensor_holds_unless_it_is_zero(value: Any) -> None:
    every = [True] * 4
    expected = bits(trained(eb.adamw(0.1), every, only_if=True)[0])
    assert bits(trained(eb.conditionally(eb.adamw(0.1), value), every, only_if=False)[0]) == expected
    zero = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)
    assert bits(trained(eb.conditionally(eb.adamw(0.1), zero), every, only_if=False)[0]) == bits(draws(0))


def test_otherwise_updates_pass_or_are_zero() -> None:
    g, params = draws(1), draws(0)
    for otherwise, expected in (("zero", eb.tree.zeros_like(g)), ("pass", g)):
        tx = eb.conditionally(eb.scale(-1.0), lambda done: done > 5, otherwise=otherwise)  # type: ignore[arg-type]
        updates, _ = tx.update(g, tx.init(params), params, Context(step=torch.tensor(1)))
        assert all(torch.equal(u, e) for u, e in zip(updates.values(), expected.values(), strict=True))


def test_a_judge_of_updates_sees_those_of_all_shards() -> None:
    """Both have to hold if both are given, and the norm is that of the whole, not of a shard."""
    seen: list[float] = []

    class Doubled(eb.Local):
        @staticmethod
        def sum(value: Tensor) -> Tensor:
            return 2 * value

    def judge(updates: Any, ctx: Context) -> Tensor:
        def is_small(square: Tensor) -> Tensor:
            seen.append(float(square))
            return square < 10.0

        return ctx.request(eb.SumOfSquares(updates), is_small)

    tx = eb.conditionally(eb.scale(-1.0), lambda done: done < 1, judge=judge)
    assert tx.reduces
    g = torch.full((4,), 1.0)
    state = tx.init(g)
    moved, state = eb.fulfil(tx.update(g, state, g, Context(step=torch.tensor(1), pending=True)), Doubled())
    assert moved.tolist() == [-1.0] * 4
    for step, gradient in ((1, 2 * g), (2, g)):
        still, state = tx.update(gradient, state, g, Context(step=torch.tensor(step)))
        assert still.tolist() == [0.0] * 4
    assert seen == [8.0, 16.0, 4.0]
    assert int(state.step) == 1


def test_a_condition_is_a_hyperparameter_of_the_state() -> None:
    tx = eb.inject_hyperparameters(eb.conditionally(eb.adamw(0.1), 1.0), "when")
    opt = eb.with_policy(tx, "FP32")
    params = draws(0, torch.float32)
    state = opt.init(params)
    off = eb.tree.set(state, "when", 0.0)
    assert bits(opt.step(params, params, off)[0]) == bits(params)
    assert bits(opt.step(params, params, state)[0]) != bits(params)


@pytest.mark.parametrize(
    ("tx", "gradient"),
    [
        (eb.conditionally(eb.sgd(0.1), False), 1.0),
        (eb.freezable({"all": eb.sgd(0.1)}, "all", frozen=("all",)), 1.0),
        (eb.accumulate(eb.sgd(0.1), 2), 1.0),
        (eb.apply_if_finite(eb.sgd(0.1)), math.inf),
        (eb.skip_large_updates(eb.sgd(0.1), 1.0), 10.0),
    ],
    ids=["conditionally", "freezable", "accumulate", "apply if finite", "skip large updates"],
)
def test_a_step_that_does_not_count_keeps_the_sign_of_minus_zero(tx: Any, gradient: float) -> None:
    params = torch.tensor([-0.0, 0.0, 1.0])
    opt = eb.with_policy(tx, "FP32")
    after, _ = opt.step(params, torch.full((3,), gradient), opt.init(params))
    assert bits(after) == bits(params)


def test_what_is_no_condition_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^conditionally: give when=, a 0-d tensor"):
        eb.conditionally(eb.sgd(0.1))
    with pytest.raises(ValueError, match=r"^otherwise: got 'half'; accepted are 'zero', 'pass'\.$"):
        eb.conditionally(eb.sgd(0.1), True, otherwise="half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^when: got a tensor of shape \(2,\)"):
        eb.conditionally(eb.sgd(0.1), torch.ones(2))
    with pytest.raises(TypeError, match=r"^conditionally: got 3, which has no cut"):
        eb.conditionally(3, True)  # type: ignore[arg-type]
    g = torch.ones(2)
    several = eb.conditionally(eb.identity(), lambda done: torch.stack([done > 1, done > 2]))
    with pytest.raises(TypeError, match=r"^conditionally, when: gave tensor\(\[.*\]\); accepted is a 0-d tensor"):
        several.update(g, several.init(g), g, Context(step=torch.tensor(1)))
    uncounted = eb.conditionally(eb.identity(), lambda done: done > 1)
    with pytest.raises(ValueError, match=r"^conditionally depends on the step and nobody counts it"):
        uncounted.update(g, uncounted.init(g), g)


# freezable


def freezing(dtype: torch.dtype, policy: eb.PolicyName, frozen: dict[int, bool]) -> list[Any]:
    """Weights and state after each of 12 steps; ``frozen`` says from which step on the body is frozen, or not."""
    tx = eb.freezable({"body": eb.adamw(0.05), "rest": eb.adamw(0.05)}, LABELS)
    opt = eb.with_policy(tx, policy, seed=3)
    params = draws(0, dtype)
    state, found = opt.init(params), []
    for step in range(12):
        if step in frozen:
            state = eb.freeze(state, "body") if frozen[step] else eb.unfreeze(state, "body")
        params, state = opt.step(params, draws(step + 1, dtype), state)
        found.append((params, state))
    return found


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16", "MIXED_BF16"])
def test_frozen_parameters_keep_their_bits_and_state_and_others_get_theirs(policy: eb.PolicyName) -> None:
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    frozen, never = (freezing(dtype, policy, plan) for plan in ({4: True, 8: False}, {}))

    def of(pair: Any, label: str) -> list[bytes]:
        params, state = pair
        mine = {name: p for name, p in params.items() if ("body" in name) == (label == "body")}
        extra = {name: state.extra[name] for name in mine}
        return bits([mine, extra, state.inner.by_label[label].inner])

    for step in range(12):
        assert of(frozen[step], "rest") == of(never[step], "rest"), step
    for step in range(4, 8):
        assert of(frozen[step], "body") == of(frozen[3], "body"), step
    assert of(frozen[8], "body") != of(frozen[7], "body")
    assert int(frozen[-1][1].inner.by_label["body"].step) == 8


def test_freezing_and_unfreezing_follows_torch() -> None:
    """In float64, with weight decay: as ``requires_grad_(False)`` with no gradient, from the start too."""
    plan = {0: True, 3: False, 6: True, 9: False}
    opt = eb.with_policy(
        eb.freezable({"body": eb.adamw(0.05), "rest": eb.adamw(0.05)}, LABELS, frozen=("body",)), eb.policies.FP64
    )
    params = draws(0)
    state = opt.init(params)
    theirs = {name: torch.nn.Parameter(p.clone()) for name, p in params.items()}
    oracle = torch.optim.AdamW(theirs.values(), lr=0.05)
    for step in range(20):
        if step in plan:
            state = eb.freeze(state, "body") if plan[step] else eb.unfreeze(state, "body")
            for name, p in theirs.items():
                p.requires_grad_(not (plan[step] and "body" in name))
        grads = draws(step + 1)
        params, state = opt.step(params, grads, state)
        for name, p in theirs.items():
            p.grad = grads[name].clone() if p.requires_grad else None
        oracle.step()
        for name, own in params.items():
            # 20 steps of some 20 roundings of numbers of about 1.
            torch.testing.assert_close(own, theirs[name].detach(), rtol=1e-13, atol=1e-13)


def test_labels_that_are_not_there_are_refused() -> None:
    tx = eb.freezable({"body": eb.adamw(0.05), "rest": eb.adamw(0.05)}, LABELS)
    state = eb.with_policy(tx, "FP32").init(draws(0, torch.float32))
    with pytest.raises(
        ValueError,
        match=r"^labels: got 'boody'; accepted are those of freezable\(\.\.\.\) in this state: 'body', 'rest'",
    ):
        eb.freeze(state, "boody")
    with pytest.raises(ValueError, match=r"^labels: got none; accepted .*: there are none\."):
        eb.freeze(eb.with_policy(eb.adamw(0.1), "FP32").init(draws(0, torch.float32)))
    with pytest.raises(ValueError, match=r"^frozen: got \('boody',\); accepted are labels, of 'body', 'rest'"):
        eb.freezable({"body": eb.adamw(0.05), "rest": eb.adamw(0.05)}, LABELS, frozen=("boody",))


def test_all_labels_at_once_and_inside_of_a_chain() -> None:
    opt = eb.with_policy(
        eb.chain(eb.clip_by_global_norm(1.0), eb.freezable({"body": eb.sgd(0.1), "rest": eb.sgd(0.1)}, LABELS)), "FP32"
    )
    params = draws(0, torch.float32)
    state = eb.freeze(opt.init(params))
    assert bits(opt.step(params, params, state)[0]) == bits(params)
    assert bits(eb.unfreeze(state)) == bits(opt.init(params))


# accumulate


def accumulated(policy: eb.Policy, every: int) -> float:
    """The largest difference of a mean of gradients from float64's, relative to their largest magnitude."""
    generator = torch.Generator().manual_seed(0)
    # A small mean under a large noise, as of microbatches; of this the last gradients move the accumulator by least.
    gradients = [0.1 + torch.randn(4096, generator=generator) for _ in range(every)]
    opt = eb.with_policy(eb.accumulate(eb.sgd(1.0), every), policy, seed=1)
    params = torch.zeros(4096)
    state = opt.init(params)
    for gradient in gradients:
        params, state = opt.step(params, gradient, state)
    exact = torch.stack(gradients).double().mean(0)
    return float((params.double() + exact).square().mean().sqrt() / exact.square().mean().sqrt())


FORMATS: dict[str, tuple[eb.StateFormat, float, bool]] = {
    # The bits of a number's magnitude, and whether they are rounded to nearest.
    "float32": (eb.Nearest("float32"), 24, True),
    "bfloat16 to nearest": (eb.Nearest("bfloat16"), 8, True),
    "bfloat16 stochastic": (eb.Stochastic("bfloat16"), 8, False),
    "two bfloat16": (eb.Kahan(), 17, True),
}


@pytest.mark.parametrize("every", [2, 8, 32])
@pytest.mark.parametrize("name", FORMATS)
def test_the_accumulator_loses_the_bits_of_its_format(name: str, every: int) -> None:
    """An error of ulp / sqrt(12) for each rounding to nearest, and of ulp / sqrt(6) for a stochastic one.

    A unit in the last place is 2**(1/2 - bits) of a number, in the middle.

    Of k gradients the mean is of the size of 1 / sqrt(k), and its rounding fades to k / every of itself: together sqrt((every - 1) / 2)
    roundings, since the last mean is used as it is computed, which in float32 is another rounding. Half a bit is left for the other
    operations in float32, and for residuals that are small.
    """
    format, bits_kept, nearest = FORMATS[name]
    rounding = 2.0 ** (0.5 - bits_kept) / math.sqrt(12 if nearest else 6)
    expected = -math.log2(rounding * math.sqrt((every + (1 if name == "float32" else -1)) / 2))
    assert -math.log2(accumulated(eb.Policy(slots={"gradient": format}), every)) == pytest.approx(expected, abs=0.5)


def test_an_accumulator_that_would_stall_is_refused() -> None:
    """Rounded to nearest in bfloat16, more than 32 gradients leave one that moves it by less than half a unit unseen."""
    policy = eb.Policy(slots={"gradient": eb.Nearest("bfloat16")})
    eb.with_policy(eb.accumulate(eb.sgd(1.0), 32), policy)
    with pytest.raises(
        ValueError,
        match=r"^Policy\.slots\['gradient'\]: got Nearest\(dtype='bfloat16'\); 'gradient' has a decay rate of",
    ):
        eb.with_policy(eb.accumulate(eb.sgd(1.0), 33), policy)
    with pytest.warns(UserWarning, match=r"it would stop moving"):
        eb.with_policy(eb.accumulate(eb.sgd(1.0), 33), policy, unsafe="warn")
    eb.with_policy(eb.accumulate(eb.sgd(1.0), 1000), replace(policy, slots={"gradient": eb.Stochastic("bfloat16")}))


def test_an_accumulator_to_nearest_does_stall() -> None:
    """What the refusal is for: of 256 gradients, first of 1 and then of 1.5, the mean stays where the first ones left it."""
    gradients = [torch.full((64,), 1.0 if number < 128 else 1.5) for number in range(256)]

    def mean(format: eb.StateFormat) -> float:
        opt = eb.with_policy(eb.accumulate(eb.sgd(1.0), 256), eb.Policy(slots={"gradient": format}), unsafe="allow")
        params = torch.zeros(64)
        state = opt.init(params)
        for gradient in gradients:
            params, state = opt.step(params, gradient, state)
        return -float(params.mean())

    assert mean(eb.Nearest("bfloat16")) < 1.01
    # 64 elements, each a random walk of 256 steps of at most 2**-7, which fade.
    assert mean(eb.Stochastic("bfloat16")) == pytest.approx(1.25, abs=3 * math.sqrt(256 / 64) * 2.0**-7)
    assert mean(eb.Nearest("float32")) == pytest.approx(1.25, rel=1e-5)


def test_the_bytes_of_the_accumulator_are_counted_with_those_of_gradients() -> None:
    params = torch.zeros(100, dtype=torch.bfloat16)
    table = eb.with_policy(eb.accumulate(eb.sgd(1.0), 2), "LEAN_BF16").bytes_table(params)
    assert table["gradient"] == 100 * (2 + 4)


def test_the_registered_conditions_are_in_the_battery() -> None:
    assert {"conditionally", "conditionally by updates", "freezable", "accumulate"} <= set(testing.REGISTRY)
