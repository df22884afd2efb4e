"""Random tensors, and several steps of a transform on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def steps(tx: Any, params: Any, gradients: Sequence[Any], policy: Any = "FP32", seed: int = 0) -> tuple[Any, Any]:
    """Parameters and state after a step with each gradient."""
    optimizer = eb.with_policy(tx, policy, seed=seed)
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = optimizer.step(params, gradient, state)
    return params, state
