"""optax as an oracle, in float64: the same gradients, the same numbers. Run by ``make conformance``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import everybit as eb

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
        lambda: eb.adamw(eb.warmup_cosine_decay_schedule(1e-2, 5, 30, end=1e-4), weight_decay=0.1),
        lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 30, 1e-4), weight_decay=0.1),
    ),
    "masked decay": (
        lambda: eb.adamw(1e-2, weight_decay=0.1, mask={"matrix": True, "vector": False, "scalar": False}),
        lambda: optax.adamw(1e-2, weight_decay=0.1, mask={"matrix": True, "vector": False, "scalar": False}),
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
    for _ in range(60):
        gradient = {key: rng.standard_normal(shape) for key, shape in SHAPES.items()}
        updates_a, state_a = ours.update({k: torch.tensor(v) for k, v in gradient.items()}, state_a, a)
        updates_b, state_b = theirs.update({k: jnp.asarray(v) for k, v in gradient.items()}, state_b, b)
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
            eb.warmup_cosine_decay_schedule(1.0, 4, 24, start=0.1, end=0.05),
            optax.warmup_cosine_decay_schedule(0.1, 1.0, 4, 24, 0.05),
        ),
        (
            eb.join_schedules([eb.linear_schedule(0.0, 1.0, 3), eb.constant_schedule(0.5)], [6]),
            optax.join_schedules([optax.linear_schedule(0.0, 1.0, 3), optax.constant_schedule(0.5)], [6]),
        ),
    ],
)
def test_schedules_agree_at_every_step(ours: eb.Schedule, theirs: Any) -> None:
    for step in range(40):
        assert float(ours(torch.tensor(step))) == pytest.approx(float(theirs(step)), rel=1e-12, abs=1e-15)


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
