"""The conditions under which the checks run a transform: a learning rate, the policies that store a step, the number of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everybit.base import Hyperparameter
from everybit.policies import Policy
from everybit.policies import presets as policies
from everybit.protocol import Context, Transform

Build = Callable[[Hyperparameter], Transform[Any]]
"""From a learning rate to a transform."""

LEARNING_RATE = 0.05
"""Large, so that a step is felt in every format."""

Stored = tuple[tuple[torch.dtype, Policy], ...]
"""Dtypes of parameters, each with a policy that stores them."""

# The policies of stored steps: all exact, all lossy, and all random.
STORED: Stored = (
    (torch.float32, policies.FP32),
    (torch.bfloat16, policies.LEAN_BF16),
    (torch.float16, policies.TIGHT_BF16),
)


def at_step(step: int) -> Context:
    """The context of a transform at this step."""
    return Context(step=torch.tensor(step))
