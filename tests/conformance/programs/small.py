"""A small bfloat16 model for the programs in this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def model() -> nn.Sequential:
    """Return the same model at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).bfloat16()


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[Tensor]:
    """Take steps, and return the weights."""
    for _ in range(steps):
        model(torch.linspace(-1, 1, 8).view(2, 4).bfloat16()).pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def require_policy(optimizer: Any, name: str = "LEAN_BF16") -> None:
    """Require that an optimizer of everybit stores its parameters under a policy."""
    assert type(optimizer).__module__.startswith("everybit_torch"), type(optimizer)
    assert name in repr(optimizer), optimizer


def require_same(first: list[Tensor], second: list[Tensor]) -> None:
    """Require equal bits."""
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
