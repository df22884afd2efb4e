"""A run that is saved, loaded and continued."""

from __future__ import annotations

import io

import torch

from everybit.base import tree
from everybit.stepping import with_policy
from everybit.testing.checks.conditions import LEARNING_RATE, STORED, Build, Stored
from everybit.testing.examples import assert_same_bits, example_grads, example_params


def check_resume_equals_continue(build: Build, stored: Stored = STORED) -> None:
    """Saved, loaded with ``weights_only=True`` into a state freshly made, and continued: the bits of a run never interrupted."""
    for dtype, policy in stored:
        optimizer, params = with_policy(build(LEARNING_RATE), policy, seed=7), example_params(dtype)
        state = optimizer.init(params)
        for step in range(1, 4):
            params, state = optimizer.step(params, example_grads(params, step), state)
        file = io.BytesIO()
        torch.save({"params": tree.leaves(params), "state": tree.leaves(state)}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        resumed = with_policy(build(LEARNING_RATE), policy, seed=7)
        other_params = tree.replace(example_params(dtype, seed=1), loaded["params"])
        other = tree.replace(resumed.init(other_params), loaded["state"])
        for step in range(4, 7):
            grads = example_grads(params, step)
            params, state = optimizer.step(params, grads, state)
            other_params, other = resumed.step(other_params, grads, other)
            what = f"resumed, against continued, after step {step}, {dtype}"
            assert_same_bits((other_params, other), (params, state), what)
