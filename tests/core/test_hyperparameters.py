"""Hyperparameters: what is accepted, what is refused and how, and that it does not matter in which shape they come."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

import everybit as eb
from everybit import testing
from everybit.base import AtMostZero, FixedAboveZero, Options, Rate, RateConstant
from everybit.base.scalars import Range, Whole
from everybit.protocol import accepting
from everybit.protocol.traversal import transforms_in
from everybit.testing import REGISTRY

AT_LEAST_ZERO: dict[str, Any] = {
    "learning_rate": eb.scale_by_learning_rate,
    "eps": eb.scale_by_adam,
    "weight_decay": eb.add_decayed_weights,
    "limit": eb.clip,
}
BELOW_ONE: dict[str, Any] = {"b1": eb.scale_by_adam, "b2": eb.scale_by_lion, "decay": eb.scale_by_rms}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-30])
@pytest.mark.parametrize("name", AT_LEAST_ZERO)
def test_what_must_be_finite_and_at_least_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got {value!r}; accepted is a finite number in \[0, inf\)"):
        AT_LEAST_ZERO[name](**{name: value})


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.0, 2])
@pytest.mark.parametrize("name", BELOW_ONE)
def test_what_must_be_below_one(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: got {value!r}; accepted is a finite number in \[0, 1\)"):
        BELOW_ONE[name](**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.adamw(math.nan), r"^learning_rate: got nan"),
        (lambda: eb.adamw(1e-3, b1=1.0), r"^b1: got 1\.0"),
        (lambda: eb.adam(1e-3, eps=-1e-8), r"^eps: got -1e-08"),
        (lambda: eb.adam(1e-3, eps_root=-1.0), r"^eps_root: got -1\.0"),
        (lambda: eb.sgd(-0.1), r"^learning_rate: got -0\.1"),
        (lambda: eb.sgd(0.1, momentum=1.5), r"^decay: got 1\.5; accepted is a finite number in \[0, 1\]"),
        (lambda: eb.sgd(0.1, nesterov=True), r"^nesterov: got True without momentum"),
        (lambda: eb.sgd(0.1, momentum=0.9, dampening=0.5, nesterov=True), r"^dampening: got 0\.5 with nesterov=True"),
        (lambda: eb.lion(1e-4, weight_decay=-1.0), r"^weight_decay: got -1\.0"),
        (lambda: eb.rmsprop(1e-2, decay=1.0), r"^decay: got 1\.0"),
        (lambda: eb.nadam(momentum_decay=-1.0), r"^momentum_decay: got -1\.0"),
        (lambda: eb.radam(threshold=3.0), r"^threshold: got 3\.0; accepted is a finite number in \[4, inf\)"),
        (lambda: eb.adagrad(lr_decay=-1.0), r"^lr_decay: got -1\.0"),
        (lambda: eb.adagrad(initial_accumulator_value=-1.0), r"^initial_accumulator_value: got -1\.0"),
        (lambda: eb.adamax(b2=1.0), r"^b2: got 1\.0"),
        (lambda: eb.adadelta(rho=1.5), r"^rho: got 1\.5"),
        (
            lambda: eb.torch_adafactor(beta2_decay=0.5),
            r"^beta2_decay: got 0\.5; accepted is a finite number in \(-inf, 0\]",
        ),
        (lambda: eb.torch_adafactor(eps1=-1.0), r"^eps1: got -1\.0"),
        (lambda: eb.torch_adafactor(d=0.5), r"^d: got 0\.5"),
        (lambda: eb.rprop(shrink=1.5), r"^shrink: got 1\.5"),
        (lambda: eb.rprop(grow=0.5), r"^grow: got 0\.5"),
        (lambda: eb.asgd(lambd=-1.0), r"^lambd: got -1\.0"),
        (lambda: eb.adamw(1e-3, max_learning_rate=1.0), r"^max_learning_rate: got 1\.0 without fully_decoupled"),
        (
            lambda: eb.subtract_decayed_weights(0.1, 0.1, 0.0),
            r"^max_learning_rate: got 0\.0; accepted is a number above zero",
        ),
        (lambda: eb.subtract_decayed_weights(0.1, 0.1), r"needs both or neither"),
        (lambda: eb.scale(math.inf), r"^factor: got inf"),
    ],
)
def test_numbers_out_of_range_are_refused_when_they_are_given(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.1", r"^learning_rate: got '0\.1'; accepted are a number, a 0-d tensor or a schedule"),
        (None, r"^learning_rate: got None"),
        (True, r"^learning_rate: got True"),
        (torch.tensor([0.1]), r"a tensor of shape \(1,\) and torch\.float32; a tensor hyperparameter is 0-d"),
        (
            torch.tensor(0.1, dtype=torch.bfloat16),
            r"torch\.bfloat16; .*a lower precision would round it: bfloat16\(0\.999\) is 1",
        ),
        (torch.tensor(0.1, dtype=torch.float16), r"torch\.float16"),
        (torch.tensor(1), r"torch\.int64"),
    ],
)
def test_what_is_no_number_is_refused_when_it_is_given(value: Any, message: str) -> None:
    for make in (eb.sgd, eb.adamw, eb.lion, eb.rmsprop):
        with pytest.raises(TypeError, match=message):
            make(value)


def test_max_learning_rate_is_a_number_because_it_is_the_schedules_greatest_value() -> None:
    wrong: Any = eb.constant_schedule(1e-3)
    with pytest.raises(TypeError, match=r"^max_learning_rate: got .*; accepted are a number, a 0-d tensor\.$"):
        eb.adamw(1e-3, fully_decoupled=True, max_learning_rate=wrong)


HYPERPARAMETERS: dict[str, tuple[Any, dict[str, float]]] = {
    "adamw": (eb.adamw, {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}),
    "adam": (eb.adam, {"learning_rate": 0.01, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}),
    "sgd": (eb.sgd, {"learning_rate": 0.01, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "undampened": (eb.sgd, {"learning_rate": 0.01, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}),
    "lion": (eb.lion, {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99, "weight_decay": 0.1}),
    "rmsprop": (eb.rmsprop, {"learning_rate": 0.01, "decay": 0.9, "eps": 1e-8, "weight_decay": 0.1}),
    "nadam": (
        eb.nadam,
        {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "momentum_decay": 0.01},
    ),
    "radam": (
        eb.radam,
        {"learning_rate": 0.01, "b1": 0.9, "b2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "threshold": 4.0},
    ),
    "adagrad": (eb.adagrad, {"learning_rate": 0.01, "eps": 1e-8, "weight_decay": 0.1, "lr_decay": 0.1}),
    "adamax": (eb.adamax, {"learning_rate": 0.01, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "weight_decay": 0.1}),
    "adadelta": (eb.adadelta, {"learning_rate": 0.5, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.1}),
    "torch_adafactor": (
        eb.torch_adafactor,
        {"learning_rate": 0.1, "beta2_decay": -0.5, "eps1": 0.1, "eps2": 0.01, "d": 1.5, "weight_decay": 0.1},
    ),
    "rprop": (eb.rprop, {"learning_rate": 0.01, "shrink": 0.6, "grow": 1.3, "min_step": 0.001, "max_step": 0.1}),
    "asgd": (eb.asgd, {"learning_rate": 0.01, "lambd": 0.1, "alpha": 0.5, "t0": 1.0, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
@pytest.mark.parametrize("policy", ["FP32", "EXACT_BF16", "FP64"])
@pytest.mark.sampled(3)
def test_a_number_a_tensor_and_a_schedule_give_the_same_bits(name: str, policy: str) -> None:
    make, numbers = HYPERPARAMETERS[name]
    shapes: dict[str, dict[str, Any]] = {
        "number": numbers,
        "tensor": {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()},
        "schedule": {key: eb.constant_schedule(value) for key, value in numbers.items()},
    }
    dtype = {"FP32": torch.float32, "EXACT_BF16": torch.bfloat16, "FP64": torch.float64}[policy]
    outcomes = {}
    for shape, hyperparameters in shapes.items():
        optimizer = eb.with_policy(make(**hyperparameters), eb.policies.PRESETS[policy])
        params = testing.example_params(dtype)
        state = optimizer.init(params)
        for step in range(1, 11):
            params, state = optimizer.step(params, testing.example_grads(params, step), state)
        outcomes[shape] = (params, state)
    testing.assert_same_bits(outcomes["tensor"], outcomes["number"], "tensor, against number")
    testing.assert_same_bits(outcomes["schedule"], outcomes["number"], "schedule, against number")


def test_a_beta_close_to_one_is_not_rounded_to_it_by_bfloat16_parameters() -> None:
    beta = torch.tensor(0.999, dtype=torch.float64)
    optimizer = eb.with_policy(eb.adamw(0.1, b2=beta), eb.policies.EXACT_BF16)
    params = torch.ones(4, dtype=torch.bfloat16)
    params, state = optimizer.step(params, torch.ones(4, dtype=torch.bfloat16), optimizer.init(params))
    expected = torch.full((4,), 1 - 0.1 - 0.1 * 0.01)
    torch.testing.assert_close(optimizer.export_fp32(params, state), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("transform", "who"),
    [
        (eb.scale_by_adam(), "scale_by_adam"),
        (eb.scale_by_learning_rate(eb.constant_schedule(0.1)), "learning_rate"),
        (eb.trace(0.9, dampening=0.5), "trace with dampening"),
        (eb.scale_by_lion(b1=eb.constant_schedule(0.9)), "b1"),
        (eb.masked(eb.scale(eb.constant_schedule(0.9)), True), "factor"),
    ],
)
def test_a_step_that_nobody_counts_is_missed(transform: Any, who: str) -> None:
    g = torch.ones(2)
    with pytest.raises(ValueError, match=rf"^{who} depends on the step and nobody counts it: use it inside eb\.chain"):
        transform.update(g, transform.init(g), g)
    transform.update(g, transform.init(g), g, eb.Context(step=torch.tensor(1)))
    eb.chain(transform).update(g, eb.chain(transform).init(g), g)


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda step: 0.1, r"^learning_rate: its schedule gave 0\.1; accepted is a 0-d float32 or float64 tensor"),
        (lambda step: step, r"^learning_rate, from its schedule: got a tensor of shape \(\) and torch\.int64"),
        (lambda step: torch.ones(1), r"^learning_rate, from its schedule: got a tensor of shape \(1,\)"),
        (lambda step: torch.tensor(0.1).bfloat16(), r"^learning_rate, from its schedule: .*torch\.bfloat16"),
    ],
)
def test_a_schedule_that_gives_something_else_is_caught_at_its_first_step(gives: Any, message: str) -> None:
    transform = eb.sgd(gives)
    g = torch.ones(2)
    with pytest.raises(TypeError, match=message):
        transform.update(g, transform.init(g), g)


def test_the_square_of_a_float16_gradient_does_not_underflow() -> None:
    optimizer = eb.with_policy(eb.adam(1e-2), eb.policies.MIXED_BF16)
    params = torch.zeros(8, dtype=torch.float16)
    params, state = optimizer.step(params, torch.full((8,), 1e-4, dtype=torch.float16), optimizer.init(params))
    torch.testing.assert_close(optimizer.export_fp32(params, state), torch.full((8,), -1e-2), rtol=1e-3, atol=0)


def test_the_derivative_of_a_step_by_the_learning_rate_is_the_direction() -> None:
    params, grads = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 3.0]).double()

    def after(learning_rate: torch.Tensor) -> torch.Tensor:
        optimizer = eb.with_policy(eb.sgd(learning_rate), eb.policies.FP64)
        return optimizer.step(params, grads, optimizer.init(params))[0].sum()

    derivative = torch.func.grad(after)(torch.tensor(0.1, dtype=torch.float64))
    torch.testing.assert_close(derivative, -grads.sum())


OPTIONS = (eb.NewtonSchulz(), eb.Grafting(), eb.Kronecker())
DECLARING = [
    *OPTIONS,
    *(node for build in REGISTRY.values() for node in transforms_in(build(1e-3)) if hasattr(node, "accepts")),
]
DECLARED = {
    f"{type(node).__name__}.{field}": (node, field, one) for node in DECLARING for field, one, _ in node.accepts
}


def outside(one: object) -> list[Any]:
    """Values that a field with such a declaration does not accept."""
    if isinstance(one, Range):
        low = one.low if one.open_low else one.low - 1e-3
        return [math.nan, math.inf, low, one.high if one.open_high else one.high + 1e-3, "1"]
    return [one.least - 1, 1.5, True] if isinstance(one, Whole) else ["no such word"]


def test_what_a_field_does_not_accept_is_refused_by_name() -> None:
    for node, field, one in DECLARED.values():
        for value in outside(one):
            with pytest.raises((TypeError, ValueError), match=rf"^{field}: got "):
                replace(node, **{field: value})


def declares(hint: object) -> bool:
    """Whether an annotation says what is accepted."""
    kinds = [one for one in get_args(hint) if one is not NoneType] if get_origin(hint) in (Union, UnionType) else [hint]
    metadata = getattr(kinds[0], "__metadata__", ())
    is_options = isinstance(kinds[0], type) and issubclass(kinds[0], Options)
    is_declared = is_options or get_origin(kinds[0]) is Literal or any(isinstance(x, (Range, Whole)) for x in metadata)
    return len(kinds) == 1 and is_declared


def test_every_declaration_is_found() -> None:
    """Those that ``typing`` finds, which evaluates all annotations."""
    assert len(DECLARED) > 180
    for kind in {type(node) for node in DECLARING}:
        hints = get_type_hints(kind, include_extras=True)
        declared = {one.name for one in fields(kind) if declares(hints[one.name])}
        assert declared == {name for name, _, _ in kind.accepts}, kind


def test_of_a_class_inside_of_a_function_the_same_fields_accept_tensors() -> None:
    class Unknown:
        """A name that nobody can look up, so that no annotation of the class below can be evaluated."""

    @dataclass(frozen=True)
    class Inside:
        unknown: Unknown | None = None
        low: AtMostZero = 0.0
        fixed: FixedAboveZero = 1.0
        rate: Rate | None = None
        constant: RateConstant = 0.5
        name: str = ""

    assert accepting(Inside) == {"low", "fixed", "rate"}
