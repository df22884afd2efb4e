"""A transform under ``torch.func``: batched over a population, and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from everybit.base import tree
from everybit.policies import Policy
from everybit.policies import presets as policies
from everybit.protocol import any_draws
from everybit.stepping import with_policy
from everybit.testing.examples import LEARNING_RATE, Build, assert_close, at_step, example_grads, example_params


def check_vmap(build: Build) -> None:
    """``torch.func.vmap`` over a population, each member with its own learning rate, is the loop over the population.

    The bound is 1e-12 of the greatest magnitude in float64, since batched code may take powers from another library, and 1e-6 in float32.
    """

    def step(rate: Tensor, params: Any, sequence: list[Any], policy: Policy) -> Any:
        optimizer = with_policy(build(rate), policy)
        state = optimizer.init(params)
        for grads in sequence:
            params, state = optimizer.step(params, grads, state)
        # Not the compensation by itself, with a float32 weight's last place as its unit: the weights have it.
        return optimizer.export_fp32(params, state), state.step, state.inner

    def update(rate: Tensor, params: Any, sequence: list[Any], _policy: Policy) -> Any:
        transform = build(rate)
        state = transform.init(params)
        for number, grads in enumerate(sequence, start=1):
            updates, state = transform.update(grads, state, params, at_step(number))
            params = tree.map(torch.add, params, updates)
        return params, state

    for what, function, dtype, policy, relative in (
        ("update", update, torch.float64, policies.FP64, 1e-12),
        ("Optimizer.step", step, torch.float64, policies.FP64, 1e-12),
        ("Optimizer.step", step, torch.bfloat16, policies.EXACT_BF16, 1e-6),
    ):
        rates = torch.tensor([0.01, 0.03, 0.1], dtype=torch.float64)
        params = [example_params(dtype, seed=seed) for seed in range(len(rates))]
        grads = [[example_grads(member, number, seed=seed) for number in (1, 2)] for seed, member in enumerate(params)]

        # Leaves go in and out: torch's own trees have no holes, and vmap refuses None.
        def on_leaves(
            rate: Tensor,
            leaves: list[Tensor],
            function: Callable[..., Any] = function,
            example: Any = (params[0], grads[0]),
            policy: Policy = policy,
        ) -> list[Tensor]:
            return tree.leaves(function(rate, *tree.replace(example, leaves), policy))

        members = [tree.leaves(member) for member in zip(params, grads, strict=True)]
        try:
            batched = torch.func.vmap(on_leaves)(rates, _stack(members))
        except RuntimeError as error:
            raise AssertionError(f"{what} under vmap, {dtype} parameters: {error}") from error
        looped = _stack([on_leaves(rate, member) for rate, member in zip(rates, members, strict=True)])
        assert_close(batched, looped, relative, f"{what} under vmap, {dtype} parameters")


def check_differentiable(build: Build) -> None:
    """``torch.func.grad`` through several updates, by the learning rate and by the gradients, agrees with finite differences.

    In float64, to 1e-5 relative: central differences with a step of 1e-6 have an error of about 1e-12 by curvature, and of 1e-10 by
    rounding. And the derivative by the learning rate of stored weights is that of float32 weights, to a tenth: rounding differentiates as
    the identity.
    """
    params = example_params(torch.float64)
    sequence = [example_grads(params, step) for step in range(4)]
    # The learning rate, and how far the gradients are moved along a fixed direction.
    where = torch.tensor([LEARNING_RATE, 0.0], dtype=torch.float64)
    direction = [example_grads(params, step, seed=1) for step in range(4)]

    def outcome(where: Tensor) -> Tensor:
        transform, values = build(where[0]), params
        state = transform.init(values)
        for step, (grad, way) in enumerate(zip(sequence, direction, strict=True), start=1):
            moved = tree.map(lambda g, d: g + where[1] * d, grad, way)
            updates, state = transform.update(moved, state, values, at_step(step))
            values = tree.map(torch.add, values, updates)
        weights = example_grads(params, 0, seed=2)
        return torch.stack(
            [(w * p).sum() for w, p in zip(tree.leaves(weights), tree.leaves(values), strict=True)]
        ).sum()

    got = torch.func.grad(outcome)(where)
    for index, name in enumerate(("the learning rate", "the gradients")):
        nudge = torch.zeros_like(where)
        nudge[index] = 1e-6
        expected = float((outcome(where + nudge) - outcome(where - nudge)) / 2e-6)
        found = float(got[index])
        if not abs(found - expected) <= 1e-5 * abs(expected) + 1e-7:
            raise AssertionError(
                f"derivative by {name}: torch.func.grad gives {found!r}, finite differences give {expected!r}."
            )
    # Elements of another dtype draw other bits, so that a transform that draws does not go the same way under another policy.
    if not any_draws([build(LEARNING_RATE)]):
        _check_stored_derivative(build)


def _check_stored_derivative(build: Build) -> None:
    start = example_params(torch.bfloat16)

    def outcome(rate: Tensor, policy: Policy, dtype: torch.dtype) -> Tensor:
        optimizer, params = (
            with_policy(build(rate), policy, unsafe="allow"),
            tree.map(lambda leaf: leaf.to(dtype), start),
        )
        state = optimizer.init(params)
        for step in range(3):
            params, state = optimizer.step(params, example_grads(start, step), state)
        weights = zip(tree.leaves(example_grads(start, 0, seed=2)), tree.leaves(params), strict=True)
        return torch.stack([(w.float() * p.float()).sum() for w, p in weights]).sum()

    rate = torch.tensor(LEARNING_RATE, dtype=torch.float64)
    expected = float(torch.func.grad(outcome)(rate, policies.FP32, torch.float32))
    for policy in (policies.LEAN_BF16, policies.FLOOR_BF16, policies.MIXED_BF16):
        found = float(torch.func.grad(outcome)(rate, policy, torch.bfloat16))
        if not abs(found - expected) <= 0.1 * abs(expected) + 1e-7:
            raise AssertionError(
                f"derivative by the learning rate of stored weights: torch.func.grad gives {found!r}, and {expected!r} of float32 weights."
            )


def _stack(members: list[Any]) -> Any:
    return tree.map(lambda *leaves: torch.stack(leaves), members[0], *members[1:])
