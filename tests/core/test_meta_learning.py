"""Training as a function: its derivatives unrolled, forward and by finite differences, and populations in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import everybit as eb
from everybit import testing

Params = dict[str, Tensor]
Make = Callable[[Tensor, Tensor], eb.Transform[Any]]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS, HELD_OUT = normal(16, 5, seed=0), normal(16, 5, seed=1)
START: Params = {"w": normal(5, 6, seed=2) / 2, "b": normal(6, seed=3) / 2, "v": normal(6, 1, seed=4) / 2}
WAY: Params = {name: normal(*p.shape, seed=5 + p.ndim) for name, p in START.items()}


def loss(params: Params, x: Tensor) -> Tensor:
    target = (x[:, 0] * x[:, 1] + x[:, 2]).unsqueeze(1)
    return (torch.tanh(x @ params["w"] + params["b"]) @ params["v"] - target).square().mean()


# From a learning rate and a weight decay. The squares of no gradient vanish here, so that roots have derivatives.
OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "sgd": (lambda rate, decay: eb.sgd(rate, momentum=0.9, nesterov=True, weight_decay=decay), 0.05),
    "adamw": (lambda rate, decay: eb.adamw(rate, weight_decay=decay), 0.01),
    "lamb": (lambda rate, decay: eb.lamb(rate, weight_decay=decay), 0.02),
    "adafactor": (lambda rate, decay: eb.torch_adafactor(rate, weight_decay=decay), 0.02),
    "schedule-free": (lambda rate, decay: eb.schedule_free_adamw(rate, weight_decay=decay), 0.02),
    "prodigy": (lambda rate, decay: eb.prodigy(rate, d0=1e-2, weight_decay=decay), 0.5),
}


def after_training(name: str, where: Tensor, steps: int = 6) -> Tensor:
    """The held-out loss of the weights for evaluation, by (learning rate, weight decay, how far the start is moved)."""
    optimizer = eb.with_policy(OPTIMIZERS[name][0](where[0], where[1]), eb.policies.FP64)
    params = {key: p + where[2] * WAY[key] for key, p in START.items()}
    state = optimizer.init(params)
    for _ in range(steps):
        params, state = optimizer.step(params, grad(loss)(params, INPUTS), state)
    return loss(optimizer.eval_params(params, state), HELD_OUT)


def point(name: str) -> Tensor:
    return torch.tensor([OPTIMIZERS[name][1], 0.1, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unrolled_training_has_the_derivative_of_finite_differences(name: str) -> None:
    """Through ``step``: by a learning rate, a weight decay and the start, in float64.

    Central differences by 1e-5 are off by 1e-10 of the third derivative, and by some 1e-16 / 1e-5 of the loss through rounding.
    """
    here = point(name)
    found = grad(lambda where: after_training(name, where))(here)
    for index in range(len(here)):
        nudge = torch.zeros_like(here)
        nudge[index] = 1e-5
        with torch.no_grad():
            high, low = (after_training(name, here + sign * nudge) for sign in (1, -1))
        expected = float((high - low) / 2e-5)
        assert float(found[index]) == pytest.approx(expected, rel=1e-6, abs=1e-10), index
        assert abs(expected) > 1e-5, index


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_forward_mode_through_steps_is_reverse_mode(name: str) -> None:
    """The same sums and products in another order: six steps of some 100 roundings of 2**-53 each, and two digits lost to cancellation."""
    here = point(name)
    reverse = grad(lambda where: after_training(name, where))(here)
    for index in range(len(here)):
        direction = torch.zeros_like(here)
        direction[index] = 1.0
        forward: Tensor = jvp(lambda where: after_training(name, where), (here,), (direction,))[1]
        assert float(forward) == pytest.approx(float(reverse[index]), rel=100 * 600 * 2.0**-53, abs=1e-14)


def test_forward_mode_has_the_derivative_of_the_stored_state_too() -> None:
    """How the moments depend on the learning rate: by way of the weights, at which gradients are taken."""

    def moments(rate: Tensor) -> Tensor:
        optimizer = eb.with_policy(eb.adamw(rate), eb.policies.FP64)
        params, state = START, optimizer.init(START)
        for _ in range(3):
            params, state = optimizer.step(params, grad(loss)(params, INPUTS), state)
        return torch.cat([leaf.reshape(-1) for leaf in eb.tree.leaves(eb.tree.get(state, "momentum"))])

    rate = torch.tensor(0.01, dtype=torch.float64)
    tangent: Tensor = jvp(moments, (rate,), (torch.ones_like(rate),))[1]
    torch.testing.assert_close(tangent, (moments(rate + 1e-6) - moments(rate - 1e-6)) / 2e-6, rtol=1e-6, atol=1e-9)


# populations


def gradients(dtype: torch.dtype, steps: int) -> tuple[Params, list[Params]]:
    start = {name: p.to(dtype) for name, p in START.items()}
    return start, [testing.example_grads(start, step) for step in range(steps)]


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16"])
@pytest.mark.parametrize("make", [eb.adamw, eb.lamb, eb.schedule_free_adamw])
@pytest.mark.sampled(3)
def test_32_learning_rates_in_one_call_have_the_bits_of_32_runs(make: Any, policy: eb.PolicyName) -> None:
    """Under stochastic rounding each member draws its own bits, by its own seed."""
    start, sequence = gradients(torch.float32 if policy == "FP32" else torch.bfloat16, 4)

    def trained(rate: Tensor, seed: Tensor | int) -> Any:
        optimizer = eb.with_policy(make(rate), policy, seed=seed)
        params, state = start, optimizer.init(start)
        for grads in sequence:
            params, state = optimizer.step(params, grads, state)
        return params, state

    rates, seeds = torch.logspace(-4, -1, 32, dtype=torch.float64), torch.arange(32)
    batched = vmap(trained)(rates, seeds)
    for index in range(32):
        mine = eb.tree.map(lambda leaf, index=index: leaf[index], batched)
        testing.assert_same_bits(mine, trained(rates[index], index), f"member {index}")


def with_holes() -> dict[str, eb.Transform[Any]]:
    matrix: Any = lambda path, p: p.ndim > 1  # noqa: E731
    return {
        "masked": eb.chain(eb.scale_by_adam(), eb.masked(eb.trace(0.9), where=matrix), eb.scale_by_learning_rate(0.1)),
        "partition": eb.partition(
            {"matrix": eb.adamw(0.1), "other": eb.set_to_zero()}, lambda path, p: "matrix" if p.ndim > 1 else "other"
        ),
        "masked twice": eb.chain(
            eb.masked(eb.masked(eb.trace(0.5), where=matrix), where=lambda path, p: "w" in path), eb.scale(-0.1)
        ),
    }


@pytest.mark.parametrize("policy", ["FP32", "KAHAN_BF16"])
@pytest.mark.parametrize("name", with_holes())
def test_states_with_holes_are_batched(name: str, policy: eb.PolicyName) -> None:
    """``torch.func.vmap`` itself, which refuses None, over states whose slots have None where a mask leaves a parameter out."""
    optimizer = eb.with_policy(with_holes()[name], policy)
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    members = [{key: (p * (1 + number)).to(dtype) for key, p in START.items()} for number in range(3)]
    population = eb.tree.map(lambda *leaves: torch.stack(leaves), *members)
    states = vmap(optimizer.init)(population)
    for _ in range(2):
        population, states = vmap(optimizer.step)(population, population, states)
    for number, member in enumerate(members):
        params, state = member, optimizer.init(member)
        for _ in range(2):
            params, state = optimizer.step(params, params, state)
        mine = eb.tree.map(lambda leaf, number=number: leaf[number], (population, states))
        testing.assert_same_bits(mine, (params, state), f"member {number}")


def test_a_field_that_is_none_says_that_it_has_no_batch() -> None:
    """``in_dims`` may be a state: its counters are the same for all members here."""
    optimizer = eb.with_policy(with_holes()["partition"], "FP32")
    members = [{key: (p * (1 + number)).float() for key, p in START.items()} for number in range(2)]
    population = eb.tree.map(lambda *leaves: torch.stack(leaves), *members)
    states = vmap(optimizer.init)(population)
    shared: Any = eb.OptimizerState(states.step[0], states.extra, states.inner)
    no_batch: Any = None
    dims: Any = eb.OptimizerState(no_batch, 0, 0)
    params, _ = vmap(optimizer.step, in_dims=(0, 0, dims))(population, population, shared)
    expected, _ = vmap(optimizer.step)(population, population, states)
    testing.assert_same_bits(params, expected, "counted once, against counted by each")
