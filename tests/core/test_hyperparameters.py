"""Hyperparameters: floats, tensors, schedules; what is refused, and that none is ever rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import everybit as eb
import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eb.scale_by_learning_rate(NAN), r"learning_rate: got nan; accepted is a finite number in \[0, inf\)"),
        (lambda: eb.scale_by_learning_rate(-1e-3), r"learning_rate: got -0.001"),
        (lambda: eb.adamw(INF), r"learning_rate: got inf"),
        (lambda: eb.scale_by_adam(b1=1.0), r"b1: got 1.0; accepted is a finite number in \[0, 1\)"),
        (lambda: eb.scale_by_adam(b2=-0.1), r"b2: got -0.1"),
        (lambda: eb.scale_by_adam(eps=-1e-8), r"eps: got -1e-08"),
        (lambda: eb.scale_by_lion(b2=1.5), r"b2: got 1.5"),
        (lambda: eb.scale_by_rms(decay=1.0), r"decay: got 1.0"),
        (lambda: eb.trace(1.1), r"decay: got 1.1; accepted is a finite number in \[0, 1\]"),
        (lambda: eb.trace(0.9, dampening=0.1, nesterov=True), r"dampening: got 0.1 with nesterov=True"),
        (lambda: eb.sgd(0.1, nesterov=True), r"nesterov: got True without momentum"),
        (lambda: eb.add_decayed_weights(-1.0), r"weight_decay: got -1.0"),
        (lambda: eb.adamw(1e-3, max_learning_rate=1e-3), r"max_learning_rate: got 0.001 without fully_decoupled=True"),
        (lambda: eb.subtract_decayed_weights(1e-4, 1e-3), r"max_learning_rate: .* needs both or neither"),
        (
            lambda: eb.subtract_decayed_weights(1e-4, 1e-3, 0.0),
            r"max_learning_rate: got 0.0; accepted is a number above",
        ),
        (lambda: eb.clip(-1.0), r"limit: got -1.0"),
        (lambda: eb.clip_by_global_norm(NAN), r"limit: got nan"),
        (lambda: eb.scale(INF), r"factor: got inf"),
        (lambda: eb.accumulate(eb.sgd(0.1), 0), r"every: got 0; accepted is a whole number of gradients, at least 1"),
        (lambda: eb.apply_if_finite(eb.sgd(0.1), -1), r"max_consecutive: got -1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.1", r"learning_rate: got '0.1'; accepted are a number, a 0-d tensor or a schedule"),
        (True, r"learning_rate: got True"),
        (None, r"learning_rate: got None"),
        (torch.tensor(0.1, dtype=torch.bfloat16), r"0-d and float32 or float64 \(a lower precision would round it"),
        (torch.tensor([0.1]), r"got a tensor of shape \(1,\) and torch.float32"),
        (torch.tensor(1), r"torch.int64"),
    ],
)
def test_things_that_are_no_hyperparameters_are_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        eb.adamw(value)


def run(transform: eb.Transform[Any], steps: int = 5, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    opt = eb.with_policy(transform, eb.policies.FP32 if dtype is torch.float32 else eb.policies.FP64)
    params = {"w": torch.randn(7, generator=generator).to(dtype), "s": torch.tensor(0.5, dtype=dtype)}
    state = opt.init(params)
    for _ in range(steps):
        grads = {name: torch.randn(p.shape, generator=generator).to(dtype) for name, p in params.items()}
        params, state = opt.step(params, grads, state)
    return eb.tree.leaves((params, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_float_a_tensor_and_a_constant_schedule_give_the_same_bits(dtype: torch.dtype) -> None:
    def constant(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64)

    floats = run(eb.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1), dtype=dtype)
    tensors = run(
        eb.adamw(constant(1e-2), b1=constant(0.9), b2=constant(0.95), eps=constant(1e-8), weight_decay=constant(0.1)),
        dtype=dtype,
    )
    schedule = eb.constant_schedule
    schedules = run(
        eb.adamw(schedule(1e-2), b1=schedule(0.9), b2=schedule(0.95), eps=schedule(1e-8), weight_decay=schedule(0.1)),
        dtype=dtype,
    )
    assert all(torch.equal(a, b) for a, b in zip(floats, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(floats, schedules, strict=True))


def test_betas_are_not_rounded_to_the_models_dtype() -> None:
    # bfloat16(0.999) is 1, and the bias correction would divide by zero.
    opt = eb.with_policy(eb.adam(1e-2, b2=0.999), eb.policies.KAHAN_BF16)
    params = torch.ones(64, dtype=torch.bfloat16)
    new, state = opt.step(params, torch.full((64,), 0.5, dtype=torch.bfloat16), opt.init(params))
    torch.testing.assert_close(opt.export_fp32(new, state), torch.full((64,), 1 - 1e-2), rtol=1e-4, atol=0)


def test_a_float16_gradients_square_does_not_underflow() -> None:
    opt = eb.with_policy(eb.adam(1e-2), eb.policies.MIXED_BF16)
    params = torch.zeros(8, dtype=torch.float16)
    new, state = opt.step(params, torch.full((8,), 1e-4, dtype=torch.float16), opt.init(params))
    torch.testing.assert_close(opt.export_fp32(new, state), torch.full((8,), -1e-2), rtol=1e-3, atol=0)


def test_the_first_update_sees_step_zero_of_a_schedule() -> None:
    seen: list[int] = []

    def schedule(step: Tensor) -> Tensor:
        seen.append(int(step))
        return torch.tensor(1.0, dtype=torch.float64)

    tx = eb.chain(eb.scale_by_learning_rate(schedule))
    params = torch.ones(2)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
    assert seen == [0, 1, 2]


def test_a_learning_rate_of_zero_moves_nothing_and_divides_nothing() -> None:
    before = [torch.randn(7, generator=torch.Generator().manual_seed(0)), torch.tensor(0.5)]
    after = run(eb.adamw(0.0, weight_decay=0.1))[:2]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_counts_steps_says_so_when_nobody_does() -> None:
    params = torch.ones(2)
    bare = eb.scale_by_adam()
    with pytest.raises(
        ValueError, match=r"scale_by_adam depends on the step and nobody counts it: use it inside eb.chain"
    ):
        bare.update(params, bare.init(params), params)
    updates, _ = bare.update(params, bare.init(params), params, eb.Context(step=torch.tensor(1)))
    torch.testing.assert_close(updates, torch.ones(2))


def test_transforms_print_compare_and_hash_by_their_hyperparameters() -> None:
    tx = eb.adamw(3e-4, b2=0.95, weight_decay=0.1)
    assert tx == eb.adamw(3e-4, b2=0.95, weight_decay=0.1)
    assert tx != eb.adamw(3e-4, b2=0.96, weight_decay=0.1)
    assert hash(tx) == hash(eb.adamw(3e-4, b2=0.95, weight_decay=0.1))
    assert "ScaleByAdam(b1=0.9, b2=0.95, eps=1e-08" in repr(tx)


def test_the_gradient_of_a_step_with_respect_to_the_learning_rate_is_the_direction() -> None:
    params, grads = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 3.0]).double()

    def after(learning_rate: Tensor) -> Tensor:
        opt = eb.with_policy(eb.sgd(learning_rate), eb.policies.FP64)
        return opt.step(params, grads, opt.init(params))[0].sum()

    derivative = torch.func.grad(after)(torch.tensor(0.1, dtype=torch.float64))
    torch.testing.assert_close(derivative, -grads.sum())
