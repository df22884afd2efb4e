"""What ranks run in tests: small models trained in every way, and what came of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper


class Block(nn.Module):
    """A unit with an odd number of elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 2)
        self.outer = nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


class Network(nn.Module):
    """Blocks between two layers that are in no block."""

    def __init__(self, width: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.exit = nn.Linear(width, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(x) * self.scale
        return out


def network(dtype: torch.dtype = torch.float32, seed: int = 0) -> Network:
    """The same one everywhere."""
    torch.manual_seed(seed)
    return Network().to(dtype)


def data(step: int, rank: int, microbatch: int, dtype: torch.dtype) -> Tensor:
    """One rank's part of one microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randn(4, 3, generator=generator).to(dtype)


def train(
    strategy: str,
    policy: eb.Policy | None,
    transform: Any,
    steps: int = 3,
    microbatches: int = 2,
    dtype: torch.dtype = torch.float32,
    units: bool = True,
    pattern: str = "microbatch",
    **arguments: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on this rank's data; the weights on every rank, and the norms of the gradients."""
    model = network(dtype)
    stepper = FlatStepper(
        model, transform, policy=policy, strategy=strategy, units=[Block] if units else None, **arguments  # type: ignore[arg-type]
    )
    rank = dist.get_rank()
    norms = []
    for step in range(steps):
        for number in range(microbatches):
            last = number == microbatches - 1
            x = data(step, rank, number, dtype)
            if pattern == "microbatch":
                with stepper.microbatch(last=last):
                    model(x).float().square().mean().backward()
            elif pattern == "no_sync":
                with stepper.sync() if last else stepper.no_sync():
                    model(x).float().square().mean().backward()
            else:
                model(x).float().square().mean().backward()
        norms.append(float(stepper.step().grad_norm))
    return weights_of(stepper), norms


def weights_of(stepper: FlatStepper) -> dict[str, Tensor]:
    """Copies of all weights."""
    with stepper.full_parameters() as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}
