"""optax as an oracle, in float64: the same gradients, the same numbers. Run by ``make conformance``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import everybit as eb
from tests.support.optax_positions import POSITIONS, VERSION

jax.config.update("jax_enable_x64", True)

SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": ()}

PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "sgd": (lambda: eb.sgd(0.1), lambda: optax.sgd(0.1)),
    "momentum": (lambda: eb.sgd(0.1, momentum=0.9), lambda: optax.sgd(0.1, momentum=0.9)),
    "nesterov": (
        lambda: eb.sgd(0.1, momentum=0.9, nesterov=True),
        lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (lambda: eb.adam(1e-2, b2=0.95), lambda: optax.adam(1e-2, b2=0.95)),
    "adam, eps_root": (lambda: eb.adam(1e-2, eps_root=1e-3), lambda: optax.adam(1e-2, eps_root=1e-3)),
    "amsgrad, corrected": (lambda: eb.adam(1e-2, b2=0.95, amsgrad="corrected"), lambda: optax.amsgrad(1e-2, b2=0.95)),
    "adamw": (lambda: eb.adamw(1e-2, weight_decay=0.1), lambda: optax.adamw(1e-2, weight_decay=0.1)),
    "lion": (lambda: eb.lion(1e-3, weight_decay=0.1), lambda: optax.lion(1e-3, weight_decay=0.1)),
    "rmsprop, eps outside": (
        lambda: eb.rmsprop(1e-2, decay=0.9),
        lambda: optax.rmsprop(1e-2, decay=0.9, eps_in_sqrt=False),
    ),
    "rmsprop, eps inside": (
        lambda: eb.rmsprop(1e-2, decay=0.9, eps_inside_root=True),
        lambda: optax.rmsprop(1e-2, decay=0.9),
    ),
    "rmsprop, centred": (
        lambda: eb.rmsprop(1e-2, decay=0.9, centered=True, eps_inside_root=True),
        lambda: optax.rmsprop(1e-2, decay=0.9, centered=True),
    ),
    "nadam, momentum constant": (lambda: eb.nadam(1e-2, momentum_decay=1e6), lambda: optax.nadam(1e-2)),
    "radam": (
        lambda: eb.radam(1e-2, b2=0.9, eps=1e-3, eps_after_correction=True),
        lambda: optax.radam(1e-2, b2=0.9, eps=1e-3),
    ),
    "adagrad": (
        lambda: eb.adagrad(1e-2, initial_accumulator_value=0.1, eps=1e-3, eps_inside_root=True),
        lambda: optax.adagrad(1e-2, eps=1e-3),
    ),
    "adamax": (lambda: eb.adamax(1e-2, b2=0.9), lambda: optax.adamax(1e-2, b2=0.9)),
    "adadelta": (lambda: eb.adadelta(0.5), lambda: optax.adadelta(0.5)),
    "clipped chain": (
        lambda: eb.chain(eb.clip_by_global_norm(1.0), eb.clip(0.3), eb.scale_by_adam(), eb.scale_by_learning_rate(0.1)),
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.clip(0.3), optax.scale_by_adam(), optax.scale_by_learning_rate(0.1)
        ),
    ),
    "sign": (
        lambda: eb.chain(eb.scale_by_sign(), eb.scale(-0.1)),
        lambda: optax.chain(optax.scale_by_sign(), optax.scale(-0.1)),
    ),
    "schedule": (
        lambda: eb.adamw(eb.warmup_cosine_decay_schedule(1e-2, 5, steps=30, end=1e-4), weight_decay=0.1),
        lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 30, 1e-4), weight_decay=0.1),
    ),
    "masked decay": (
        lambda: eb.adamw(1e-2, weight_decay=0.1, mask={"matrix": True, "vector": False, "scalar": False}),
        lambda: optax.adamw(1e-2, weight_decay=0.1, mask={"matrix": True, "vector": False, "scalar": False}),
    ),
    "corrected decay, as a scheduled one": (
        lambda: eb.chain(eb.add_corrected_decay(0.1, 0.02, 0.05), eb.scale_by_learning_rate(0.02)),
        lambda: optax.chain(optax.add_decayed_weights(0.1 * 0.02 / 0.05), optax.scale_by_learning_rate(0.02)),
    ),
    "adaptive gradient clipping": (
        lambda: eb.chain(eb.clip_by_unit_norm(0.3, 0.5, units="last"), eb.scale(-0.1)),
        lambda: optax.chain(optax.adaptive_grad_clip(0.3, 0.5), optax.scale(-0.1)),
    ),
    "block rms": (
        lambda: eb.chain(eb.clip_by_rms(0.8), eb.scale(-0.1)),
        lambda: optax.chain(optax.clip_by_block_rms(0.8), optax.scale(-0.1)),
    ),
    "centralized": (
        lambda: eb.chain(eb.centralize(), eb.scale(-0.1)),
        lambda: optax.chain(optax.centralize(), optax.scale(-0.1)),
    ),
    "normalized": (
        lambda: eb.chain(eb.normalize_by_global_norm(2.0, 0.1), eb.scale(-0.1)),
        lambda: optax.chain(optax.normalize_by_update_norm(2.0, 0.1), optax.scale(-0.1)),
    ),
    "accumulated": (lambda: eb.accumulate(eb.adam(1e-2), 3), lambda: optax.MultiSteps(optax.adam(1e-2), 3)),
}


# optax evaluates schedules of its int32 count, and keeps MultiSteps' mean, in float32 even under x64: 2**-24 of what these scale, in each
# of 60 steps of at most 1e-2.
FLOAT32_INSIDE = {"schedule": 60 * 1e-2 * 2.0**-24 * 4, "accumulated": 60 * 1e-2 * 2.0**-24 * 4}


@pytest.mark.parametrize("name", PAIRS)
def test_the_same_gradients_give_the_same_parameters(name: str) -> None:
    ours, theirs = (make() for make in PAIRS[name])
    rng = np.random.default_rng(0)
    start = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
    a = {key: torch.tensor(value) for key, value in start.items()}
    b = {key: jnp.asarray(value) for key, value in start.items()}
    state_a, state_b = ours.init(a), theirs.init(b)
    their_update = jax.jit(theirs.update)  # conditions are otherwise traced anew at every step
    for _ in range(60):
        gradient = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
        updates_a, state_a = ours.update({k: torch.tensor(v) for k, v in gradient.items()}, state_a, a)
        updates_b, state_b = their_update({k: jnp.asarray(v) for k, v in gradient.items()}, state_b, b)
        a, b = eb.apply_updates(a, updates_a), optax.apply_updates(b, updates_b)
    for key, value in a.items():
        np.testing.assert_allclose(value.numpy(), np.asarray(b[key]), rtol=1e-12, atol=FLOAT32_INSIDE.get(name, 1e-12))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (eb.constant_schedule(0.3), optax.constant_schedule(0.3)),
        (eb.linear_schedule(0.1, 0.9, 10), optax.linear_schedule(0.1, 0.9, 10)),
        (eb.cosine_decay_schedule(0.7, 20, end=0.07), optax.cosine_decay_schedule(0.7, 20, alpha=0.1)),
        (
            eb.warmup_cosine_decay_schedule(1.0, 4, steps=24, start=0.1, end=0.05),
            optax.warmup_cosine_decay_schedule(0.1, 1.0, 4, 24, 0.05),
        ),
        (
            eb.join_schedules([eb.linear_schedule(0.0, 1.0, 3), eb.constant_schedule(0.5)], [6]),
            optax.join_schedules([optax.linear_schedule(0.0, 1.0, 3), optax.constant_schedule(0.5)], [6]),
        ),
        (
            eb.cosine_decay_schedule(0.7, 20, end=0.07, exponent=1.5),
            optax.cosine_decay_schedule(0.7, 20, alpha=0.1, exponent=1.5),
        ),
        (eb.polynomial_schedule(0.7, 0.1, steps=25, power=2.5), optax.polynomial_schedule(0.7, 0.1, 2.5, 25)),
        (
            eb.join_schedules([eb.constant_schedule(0.7), eb.polynomial_schedule(0.7, 0.1, steps=25, power=2.5)], [6]),
            optax.polynomial_schedule(0.7, 0.1, 2.5, 25, transition_begin=6),
        ),
        (eb.exponential_decay_schedule(0.7, 0.5, 9), optax.exponential_decay(0.7, 9, 0.5)),
        (
            eb.exponential_decay_schedule(0.7, 0.5, 9, staircase=True, end=0.1),
            optax.exponential_decay(0.7, 9, 0.5, staircase=True, end_value=0.1),
        ),
        (
            eb.exponential_decay_schedule(0.1, 1.5, 9, end=0.3),
            optax.exponential_decay(0.1, 9, 1.5, end_value=0.3),
        ),
        (
            eb.warmup_exponential_decay_schedule(0.7, 5, rate=0.5, steps=9, start=0.1),
            optax.warmup_exponential_decay_schedule(0.1, 0.7, 5, 9, 0.5),
        ),
        (eb.warmup_constant_schedule(0.7, 6, start=0.1), optax.warmup_constant_schedule(0.1, 0.7, 6)),
        (
            eb.piecewise_constant_schedule(0.7, {20: 0.1, 7: 0.5}),
            optax.piecewise_constant_schedule(0.7, {20: 0.1, 7: 0.5}),
        ),
        (
            eb.piecewise_interpolate_schedule(0.7, {20: 0.1, 7: 0.5}),
            optax.piecewise_interpolate_schedule("linear", 0.7, {20: 0.1, 7: 0.5}),
        ),
        (
            eb.piecewise_interpolate_schedule(0.7, {20: 0.1, 7: 0.5}, interpolation="cosine"),
            optax.piecewise_interpolate_schedule("cosine", 0.7, {20: 0.1, 7: 0.5}),
        ),
        (eb.cosine_one_cycle_schedule(0.7, 33), optax.cosine_onecycle_schedule(33, 0.7)),
        (
            eb.linear_one_cycle_schedule(0.7, 33, warmup_share=0.2, cooldown_share=0.7, start_divisor=7.0, end_divisor=50.0),
            optax.linear_onecycle_schedule(33, 0.7, 0.2, 0.7, 7.0, 50.0),
        ),
        (
            eb.sgdr_schedule(
                [
                    {"peak": 0.7, "warmup_steps": 3, "steps": 12, "start": 0.1},
                    {"peak": 0.5, "warmup_steps": 0, "steps": 20, "end": 0.2, "exponent": 2.0},
                ]
            ),
            optax.sgdr_schedule(
                [
                    {"init_value": 0.1, "peak_value": 0.7, "warmup_steps": 3, "decay_steps": 12},
                    {
                        "init_value": 0.0, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 20, "end_value": 0.2,
                        "exponent": 2.0,
                    },
                ]
            ),
        ),
    ],
)  # fmt: skip
def test_schedules_agree_at_every_step(ours: eb.Schedule, theirs: Any) -> None:
    # Given a float64 count; of an integer optax computes some of them in float32, even under x64.
    for step in range(40):
        found = float(theirs(jnp.asarray(step, dtype=jnp.float64)))
        assert float(ours(torch.tensor(step))) == pytest.approx(found, rel=1e-12, abs=1e-15)


def test_lookahead_is_optaxs_fast_and_slow_weights() -> None:
    ours, theirs = (
        eb.chain(eb.lookahead(eb.sgd(0.1, momentum=0.9), 5, 0.3)),
        optax.lookahead(optax.sgd(0.1, 0.9), 5, 0.3),
    )
    rng = np.random.default_rng(0)
    start = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
    a = {key: torch.tensor(value) for key, value in start.items()}
    b = optax.LookaheadParams.init_synced({key: jnp.asarray(value) for key, value in start.items()})
    state_a, state_b = ours.init(a), theirs.init(b)
    for _ in range(200):
        gradient = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
        updates_a, state_a = ours.update({k: torch.tensor(v) for k, v in gradient.items()}, state_a, a)
        updates_b, state_b = theirs.update({k: jnp.asarray(v) for k, v in gradient.items()}, state_b, b)
        a, b = eb.apply_updates(a, updates_a), optax.apply_updates(b, updates_b)
        for found, expected in ((a, b.fast), (ours.eval_params(a, state_a), b.slow)):
            for key, value in found.items():
                np.testing.assert_allclose(value.numpy(), np.asarray(expected[key]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_zero_nans_is_optaxs(bad: float) -> None:
    g = np.array([1.0, bad, -2.0])
    tx = optax.zero_nans()
    expected, _ = tx.update(jnp.asarray(g), tx.init(jnp.asarray(g)))
    ours = eb.zero_nans()
    found, _ = ours.update(torch.tensor(g), ours.init(torch.tensor(g)), torch.tensor(g))
    np.testing.assert_array_equal(found.numpy(), np.asarray(expected))


@pytest.mark.parametrize("size", [0.5, 0.99, 1.0, 1.01, 7.0, np.nan])
def test_large_updates_are_skipped_where_optax_skips_them(size: float) -> None:
    g = np.array([0.6, 0.8]) * size
    theirs, _ = optax.skip_large_updates(jnp.asarray(g), 0, None, 1.0)
    tx = eb.skip_large_updates(eb.scale(-1.0), 1.0)
    _, state = tx.update(torch.tensor(g), tx.init(torch.tensor(g)), torch.tensor(g))
    # At the limit itself both compare a sum of two rounded squares, which is 1 in float64.
    assert int(state.skipped) == int(theirs)


def test_a_bfloat16_second_moment_follows_here_and_not_there() -> None:
    """Gradients of 1.0 for 200 steps, then of 0.01 for 3800: float32 ends at 0.00415."""
    theirs = optax.scale_by_adam(b2=0.999)
    b = jnp.zeros(4, dtype=jnp.bfloat16)
    state_b = theirs.init(b)
    step = jax.jit(lambda g, s: theirs.update(g, s, b))
    policy = eb.Policy(variance=eb.Stochastic("bfloat16"))
    ours = eb.with_policy(eb.chain(eb.scale_by_adam(b2=0.999), eb.scale(0.0)), policy)
    a = torch.zeros(512, dtype=torch.bfloat16)
    state_a = ours.init(a)
    for i in range(4000):
        size = 1.0 if i < 200 else 0.01
        _, state_b = step(jnp.full(4, size, dtype=jnp.bfloat16), state_b)
        a, state_a = ours.step(a, torch.full((512,), size, dtype=torch.bfloat16), state_a)
    inner: Any = state_a.inner
    assert float(np.asarray(state_b.nu[0], dtype=np.float64)) > 0.19
    assert float(inner.states[0].variance.double().mean()) == pytest.approx(0.00415, rel=0.02)


def test_what_optax_takes_by_position_is_what_the_table_says() -> None:
    assert optax.__version__ == VERSION
    for own, (path, names) in POSITIONS.items():
        module, _, name = path.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
        theirs = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        assert theirs == names.split(), own


def test_the_table_has_every_name_that_both_have() -> None:
    def functions(module: Any) -> set[str]:
        return {name for name in dir(module) if name[0].islower() and callable(getattr(module, name))}

    shared = functions(eb) & (functions(optax) | functions(optax.contrib))
    shared |= {f"tree.{name}" for name in functions(eb.tree) & functions(optax.tree)}
    assert shared == set(POSITIONS)
