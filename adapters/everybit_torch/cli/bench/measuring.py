"""One optimizer against torch fused in float32: steps of both in turn, on the same shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch.cli.device import timed
from everybit_torch.cli.optimizers import Chosen
from everybit_torch.creating import CLASSES
from everybit_torch.optim.optimizer import TorchOptimizer

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
BOTH_DTYPES = (torch.float32, torch.bfloat16)
FEWEST_TURNS = 5
UNTIMED_TURNS = 2  # they allocate and fill caches

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Contestant:
    """An optimizer to time.

    Args:
        name: It is shown under.
        dtype: Of the weights and gradients.
        make: The optimizer of some parameters.
    """

    name: str
    dtype: torch.dtype
    make: Make


@dataclass(frozen=True, slots=True)
class Timing:
    """The measurements of one optimizer.

    Attributes:
        name: Of the contestant.
        first_seconds: Of the first step, with compilation.
        seconds: Median of the others.
        baseline_seconds: Median of the baseline's, in turn with them.
        weight_bytes: Per parameter.
        gradient_bytes: Likewise.
        state_bytes: Likewise: moments, residuals, main copies.
        turns: How many steps of each were timed.
    """

    name: str
    first_seconds: float
    seconds: float
    baseline_seconds: float
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    turns: int

    @property
    def ratio(self) -> float:
        """Time relative to the baseline's; below 1 is faster."""
        return self.seconds / self.baseline_seconds

    @property
    def total_bytes(self) -> float:
        """Bytes per parameter, all uses."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


def torch_contestants(optimizer: Chosen) -> list[Contestant]:
    """Torch's optimizers; the first, AdamW, is the baseline of all. Beside it stands torch's optimizer of the same name, if it has one."""

    def adamw(**arguments: Any) -> Make:
        return lambda params: torch.optim.AdamW(params, **HYPERPARAMETERS, **arguments)

    if optimizer.name == "adamw":
        return [
            Contestant("torch fused, float32", torch.float32, adamw(fused=True)),
            Contestant("torch foreach, float32", torch.float32, adamw(foreach=True)),
            Contestant("torch fused, bfloat16", torch.bfloat16, adamw(fused=True)),
        ]
    found = [Contestant("torch AdamW fused, float32", torch.float32, adamw(fused=True))]
    own: Any = getattr(CLASSES.get(optimizer.entry.name), "torch_class", None)
    if own is not None:
        name = f"torch {own.__name__}"
        found += [Contestant(f"{name}, {str(one).removeprefix('torch.')}", one, own) for one in BOTH_DTYPES]
    return found


def everybit_contestant(
    name: str, policy: eb.Policy, optimizer: Chosen, names: Sequence[str], *, compile: bool
) -> Contestant:
    """Ours, under a policy, with the names of the parameters: by them some optimizers tell embeddings and the head from other matrices."""
    usual = HYPERPARAMETERS if optimizer.shown == "adamw" else {}

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        named = list(zip(names, params, strict=True))
        return optimizer.create(named, **usual, policy=policy, compile=compile)

    return Contestant(name, getattr(torch, policy.model_dtype), make)


class Entry:
    """Parameters with gradients, and an optimizer of them.

    Args:
        contestant: Whose.
        shapes: Of the parameters.
        device: Where they are.
    """

    def __init__(self, contestant: Contestant, shapes: Sequence[torch.Size], device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device, contestant.dtype))
            for shape in shapes
        ]
        self.optimizer = contestant.make(self.parameters)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
        self.first_seconds = self.step()

    def step(self) -> float:
        """Take a step; returns the seconds that it took, with what it started on the device."""
        return timed(self.optimizer.step, self.parameters[0].device)

    def bytes_per_parameter(self) -> tuple[float, float, float]:
        """Of weights, gradients, and everything else that the optimizer keeps."""
        elements = sum(parameter.numel() for parameter in self.parameters)
        if isinstance(self.optimizer, TorchOptimizer):
            table = dict(self.optimizer.bytes_table())
            weights, gradients = table.pop("parameter"), table.pop("gradient", 0)
            return weights / elements, gradients / elements, sum(table.values()) / elements
        state = [x for one in self.optimizer.state.values() for x in one.values() if isinstance(x, Tensor)]
        return (
            sum(parameter.nbytes for parameter in self.parameters) / elements,
            sum(parameter.grad.nbytes for parameter in self.parameters if parameter.grad is not None) / elements,
            sum(x.nbytes for x in state) / elements,
        )


def measure(contestant: Contestant, baseline: Entry, shapes: Sequence[torch.Size], seconds: float) -> Timing:
    """Time a contestant and the baseline in turn, each first every other time, for about so many seconds."""
    device = baseline.parameters[0].device
    entry = Entry(contestant, shapes, device)
    for _ in range(UNTIMED_TURNS):
        entry.step()
        baseline.step()
    pair: list[tuple[Entry, list[float]]] = [(entry, []), (baseline, [])]
    ours, theirs = pair[0][1], pair[1][1]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < FEWEST_TURNS:
        pair.reverse()
        for one, samples in pair:
            samples.append(one.step())
    weights, gradients, state = entry.bytes_per_parameter()
    return Timing(
        contestant.name, entry.first_seconds, statistics.median(ours), statistics.median(theirs), weights, gradients, state, len(ours)
    )  # fmt: skip
