"""Work that is not due at every step."""

from __future__ import annotations

from everybit.protocol import Context
from everybit.stepping import with_policy
from everybit.testing.checks.conditions import LEARNING_RATE, STORED, Build
from everybit.testing.examples import assert_same_bits, example_grads, example_params


def check_periodic_work(build: Build) -> None:
    """Where the host says which periodic work is due, a step gives the bits that it gives where the device decides."""
    for dtype, policy in STORED:
        optimizer, params = with_policy(build(LEARNING_RATE), policy), example_params(dtype)
        if not optimizer.due(1):
            return
        state = optimizer.init(params)
        for step in range(1, 7):
            grads = example_grads(params, step)
            told = optimizer.step(params, grads, state, Context(due=optimizer.due(step)))
            params, state = optimizer.step(params, grads, state)
            assert_same_bits(told, (params, state), f"decided on the host, against the device, step {step}, {dtype}")
