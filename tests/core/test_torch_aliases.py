"""What the optimizers of torch's have beside torch's formulas: options of other implementations, and weights for evaluation.

That they follow torch itself is tested with the drop-in classes, in tests/torch/test_parity.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.transforms.adam import AmsgradState
from tests.core.test_transforms import FLOAT64_BOUND, STEPS, greatest_difference, run_ours, tensors


def run_formula(step: Any) -> list[Tensor]:
    """The parameters after steps of a formula of (number, parameter, gradient, its own memory), in float64."""
    params = tensors(0, torch.float64)
    memory: list[dict[str, Any]] = [{} for _ in params]
    for number in range(1, STEPS + 1):
        grads = tensors(number, torch.float64)
        params = [p + step(number, p, g, own) for p, g, own in zip(params, grads, memory, strict=True)]
    return params


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("threshold", [4.0, 5.0])
def test_radam_with_the_papers_threshold_and_optaxs_eps(threshold: float, after: bool) -> None:
    b1, b2, eps = 0.9, 0.99, 1e-2

    def step(t: int, p: Tensor, g: Tensor, own: dict[str, Tensor]) -> Tensor:
        m = own["m"] = b1 * own.get("m", torch.zeros_like(g)) + (1 - b1) * g
        v = own["v"] = b2 * own.get("v", torch.zeros_like(g)) + (1 - b2) * g**2
        longest = 2 / (1 - b2) - 1
        length = longest - 2 * t * b2**t / (1 - b2**t)
        mean = m / (1 - b1**t)
        if length <= threshold:
            return -0.01 * mean
        r = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
        root = math.sqrt(1 - b2**t)
        norm = v.sqrt() / root + eps if after else (v.sqrt() + eps) / root
        return -0.01 * r * mean / norm

    ours = eb.radam(0.01, b1=b1, b2=b2, eps=eps, threshold=threshold, eps_after_correction=after)
    assert greatest_difference(run_ours(ours, torch.float64), run_formula(step)) <= FLOAT64_BOUND


def test_adagrad_with_eps_inside_the_root() -> None:
    def step(t: int, p: Tensor, g: Tensor, own: dict[str, Tensor]) -> Tensor:
        s = own["s"] = own.get("s", torch.full_like(g, 0.1)) + g**2
        return -0.01 * g / (s + 1e-2).sqrt()

    ours = eb.adagrad(0.01, initial_accumulator_value=0.1, eps=1e-2, eps_inside_root=True)
    assert greatest_difference(run_ours(ours, torch.float64), run_formula(step)) <= FLOAT64_BOUND


def test_nadam_with_constant_momentum() -> None:
    b1, b2, eps = 0.9, 0.99, 1e-8

    def step(t: int, p: Tensor, g: Tensor, own: dict[str, Tensor]) -> Tensor:
        m = own["m"] = b1 * own.get("m", torch.zeros_like(g)) + (1 - b1) * g
        v = own["v"] = b2 * own.get("v", torch.zeros_like(g)) + (1 - b2) * g**2
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        return -0.01 * ahead / ((v / (1 - b2**t)).sqrt() + eps)

    ours = eb.nadam(0.01, b1=b1, b2=b2, eps=eps, momentum_decay=1e6)
    assert greatest_difference(run_ours(ours, torch.float64), run_formula(step)) <= FLOAT64_BOUND


def test_amsgrad_of_squares_whose_bias_is_corrected() -> None:
    b1, b2, eps = 0.9, 0.99, 1e-8

    def step(t: int, p: Tensor, g: Tensor, own: dict[str, Tensor]) -> Tensor:
        m = own["m"] = b1 * own.get("m", torch.zeros_like(g)) + (1 - b1) * g
        v = own["v"] = b2 * own.get("v", torch.zeros_like(g)) + (1 - b2) * g**2
        own["w"] = torch.maximum(own.get("w", torch.zeros_like(g)), v / (1 - b2**t))
        return -0.01 * m / (1 - b1**t) / (own["w"].sqrt() + eps)

    ours = eb.adam(0.01, b1=b1, b2=b2, eps=eps, amsgrad="corrected")
    assert greatest_difference(run_ours(ours, torch.float64), run_formula(step)) <= FLOAT64_BOUND
    as_torch = run_ours(eb.adam(0.01, b1=b1, b2=b2, eps=eps, amsgrad=True), torch.float64)
    assert greatest_difference(as_torch, run_formula(step)) > 1e-3
    with pytest.raises(ValueError, match=r"^amsgrad: got 'torch'; accepted are True, False and 'corrected'"):
        eb.adam(amsgrad="torch")  # type: ignore[arg-type]


def test_amsgrad_keeps_the_greatest_square() -> None:
    tx = eb.scale_by_adam(b2=0.5, amsgrad=True)
    params = [torch.zeros(1, dtype=torch.float64)]
    state = tx.init(params)
    for step, gradient in enumerate((4.0, 0.0, 0.0), start=1):
        _, state = tx.update([params[0] + gradient], state, params, eb.Context(step=torch.tensor(step)))
    assert isinstance(state, AmsgradState)
    assert [float(state.variance[0]), float(state.max_variance[0])] == [2.0, 8.0]


def test_asgd_evaluates_the_mean_of_the_weights_after_its_first_steps() -> None:
    optimizer = eb.with_policy(eb.asgd(0.5, lambd=0.0, t0=1.0), eb.policies.FP64)
    params = [torch.zeros(1, dtype=torch.float64)]
    state, passed = optimizer.init(params), []
    for gradient in (1.0, 2.0, -4.0, 8.0, 2.0):
        params, state = optimizer.step(params, [torch.full((1,), gradient, dtype=torch.float64)], state)
        passed.append(float(params[0]))
    # Shares of 1 up to step t0 + 2 = 3, then 1/2 and 1/3.
    assert float(optimizer.eval_params(params, state)[0]) == pytest.approx(sum(passed[2:]) / 3, abs=1e-15)


def test_a_sum_of_squares_is_refused_where_it_would_stop_growing() -> None:
    with pytest.raises(ValueError, match=r"sum_of_squares"):
        eb.with_policy(eb.adagrad(), eb.policies.PURE_BF16)
