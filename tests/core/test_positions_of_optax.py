"""A call of optax's, by position, means the same here or is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import everybit as eb
from tests.support.optax_positions import POSITIONS

# What optax calls an argument that has another name here and the same meaning.
SAME = {
    ("start", "init_value"), ("end", "end_value"), ("steps", "transition_steps"), ("steps", "decay_steps"),
    ("factors", "boundaries_and_scales"), ("cycles", "cosine_kwargs"), ("transform", "inner"), ("transform", "fast_optimizer"),
    ("max_consecutive", "max_consecutive_errors"), ("period", "sync_period"), ("share", "slow_step_size"), ("labels", "param_labels"),
    ("limit", "max_delta"), ("limit", "max_norm"), ("factor", "step_size"), ("shrink", "eta_minus"), ("grow", "eta_plus"),
    ("min_step", "min_step_size"), ("max_step", "max_step_size"), ("yes", "tree_x"), ("no", "tree_y"), ("state", "tree"),
    ("name", "key"),
}  # fmt: skip

ONE = torch.ones(())

# Where the first or second means something else: a call of optax's, which is refused.
REFUSED: dict[str, tuple[Any, ...]] = {
    "bias_correction": (ONE, 0.9, 3),
    "piecewise_interpolate_schedule": ("linear", 1.0, {3: 0.5}),
    "prodigy": (1.0, (0.9, 0.999)),
    "scale_by_factored_rms": (True, 0.8),
    "scale_by_trust_ratio": (0.0, 1.0, 0.0),
    "schedule_free": (eb.scale_by_adam(), 1e-3),
    "skip_large_updates": (ONE, 3, ONE, 1.0),
    "trace": (0.9, True),
    "tree.set": ({"w": ONE}, None),
    "warmup_constant_schedule": (0.0, 1e-3, 10),
    "warmup_cosine_decay_schedule": (0.0, 1e-3, 10, 100),
    "warmup_exponential_decay_schedule": (0.0, 1e-3, 10, 100, 0.9),
}


def ours(name: str) -> Any:
    value: Any = eb
    for part in name.split("."):
        value = getattr(value, part)
    return value


def positions(function: Any) -> list[str]:
    return [
        one.name for one in inspect.signature(function).parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD
    ]


def means_the_same(own: str, theirs: str) -> bool:
    return own == theirs or (own, theirs) in SAME


@pytest.mark.parametrize("name", POSITIONS)
def test_what_has_a_name_of_optaxs_takes_by_position_what_optax_takes_there(name: str) -> None:
    pairs = list(zip(positions(ours(name)), POSITIONS[name][1].split(), strict=False))
    first = 2 if name in REFUSED else 0  # refused calls may differ in the first two
    for own, theirs in pairs[first:]:
        assert means_the_same(own, theirs), f"{name}: {own} stands where optax has {theirs}"


@pytest.mark.parametrize("name", REFUSED)
def test_where_the_first_two_differ_a_call_of_optaxs_is_refused(name: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        ours(name)(*REFUSED[name])


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("cosine_decay_schedule", (3e-4, 100, 0.1), {"end": 3e-5}),  # optax: alpha, a share of the first value
        ("warmup_cosine_decay_schedule", (1.0, 4, 12), {"steps": 12}),
        ("polynomial_schedule", (1.0, 0.1, 20), {"steps": 20}),
        ("warmup_exponential_decay_schedule", (1.0, 4, 0.5, 9), {"rate": 0.5, "steps": 9}),
        ("piecewise_interpolate_schedule", (1.0, {3: 0.5}, "cosine"), {"interpolation": "cosine"}),
    ],
)
def test_where_optax_has_another_argument_a_value_is_taken_by_name(
    name: str, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        ours(name)(*given)
    assert callable(ours(name)(*given[:2], **named))
