"""A small model with what makes parameters awkward, and a gradient stream for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

import everybit as eb


class Awkward(nn.Module):
    """Matrices, vectors, a 0-d parameter, an empty one, odd sizes."""

    matrix: nn.Parameter
    vector: nn.Parameter
    scalar: nn.Parameter
    empty: nn.Parameter
    other: nn.Parameter

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        shapes = {"matrix": (7, 5), "vector": (13,), "scalar": (), "empty": (0, 3), "other": (3, 2, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def give_gradients(
    model: nn.Module, seed: int, *, scale: float = 1.0, without: Callable[[str], bool] = lambda name: False
) -> None:
    """Standard normal gradients, the same for every dtype up to rounding; none where ``without`` says so."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.grad = None if without(name) else gradient.to(parameter.dtype)


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    without: Callable[[int, str], bool] = lambda step, name: False,
) -> list[Tensor]:
    """Step through a fixed gradient stream."""
    for step in range(start, start + steps):
        give_gradients(model, 1000 + step, without=lambda name, step=step: without(step, name))  # type: ignore[misc]
        optimizer.step()
    return values(model)


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Equal, and of one dtype."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Whole:
    """A model's trained parameters, stepped as one tree by the core."""

    def __init__(self, factory: Callable[..., Any], model: nn.Module, policy: eb.Policy) -> None:
        self.optimizer = eb.with_policy(factory(1e-2), policy, seed=3)
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.state = self.optimizer.init(self.weights)

    def step(self, model: nn.Module) -> list[Tensor]:
        """Step with the model's gradients; returns the weights."""
        grads = {name: cast(Tensor, p.grad) for name, p in model.named_parameters() if p.requires_grad}
        self.weights, self.state = self.optimizer.step(self.weights, grads, self.state)
        return list(self.weights.values())
