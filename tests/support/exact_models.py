"""A model whose gradients are whole numbers, whatever its weights are: sums of them are exact, in every order and in bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.weights import Weights

Pattern = Literal["microbatch", "no_sync", "neither"]
_NAMES = itertools.count()


class Cell(nn.Module):
    """A unit: rows that ranks cannot share out evenly, fewer rows than ranks, a weight with two names, and a frozen one."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        for name, shape in {"tall": (5, 3), "flat": (1, 4), "line": (7,), "some": (3, 2), "frozen": (2, 2)}.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=name != "frozen"))
        self.register_parameter("also_tall", self.get_parameter("tall"))
        self.number = number

    def forward(self, x: Tensor, seed: int, uses_some: bool) -> Tensor:
        for position, (name, parameter) in enumerate(self.named_parameters(recurse=False)):
            if name != "some" or uses_some:
                generator = torch.Generator().manual_seed(100 * seed + 10 * self.number + position)
                factor = torch.randint(-4, 5, tuple(parameter.shape), generator=generator).to(parameter.dtype)
                x = x + (parameter * factor).sum()
        return x + self.get_parameter("also_tall").sum()


class Cells(nn.Module):
    """Three units, of which one lies in another, and a parameter of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = Cell(1, dtype), Cell(2, dtype)
        self.second.inner = Cell(3, dtype)
        self.own = nn.Parameter(torch.ones(6, 2, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, seed: int, uses_some: bool = True) -> Tensor:
        x = (self.own * (seed % 5)).sum()
        x = self.second(self.first(x, seed, uses_some), seed, uses_some)
        out: Tensor = self.second.inner(x, seed, uses_some)  # type: ignore[operator]
        return out


def seeds(step: int, rank: int, microbatches: int) -> Iterator[tuple[int, bool]]:
    """Of one rank's microbatches: the seed of the gradients, and whether all parameters are used."""
    for number in range(microbatches):
        yield 1 + 7 * step + 3 * number + 2 * rank, (rank + number) % 2 == 0


def context_of(stepper: Any, pattern: Pattern, *, last: bool) -> AbstractContextManager[Any]:
    """What one microbatch's pass is in."""
    if pattern == "microbatch":
        return cast(AbstractContextManager[Any], stepper.microbatch(last=last))
    if pattern == "no_sync":
        return cast(AbstractContextManager[Any], stepper.sync() if last else stepper.no_sync())
    return nullcontext()


def train(
    stepper: Any, model: nn.Module, steps: range, microbatches: int, pattern: Pattern = "microbatch"
) -> list[float]:
    """Train on this rank's microbatches; the norms of the gradients."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    norms = []
    for step in steps:
        for number, (seed, uses_some) in enumerate(seeds(step, rank, microbatches)):
            with context_of(stepper, pattern, last=number == microbatches - 1):
                model(seed, uses_some).backward()
        norms.append(float(stepper.step().grad_norm))
    return norms


def train_alone(stepper: Any, model: nn.Module, steps: range, microbatches: int, ranks: int) -> list[float]:
    """Train one process on the microbatches of so many ranks."""
    norms = []
    for step in steps:
        for rank in range(ranks):
            for seed, uses_some in seeds(step, rank, microbatches):
                model(seed, uses_some).backward()
        norms.append(float(stepper.step().grad_norm))
    return norms


def whole_of(x: Tensor) -> Tensor:
    """All of a tensor. Collective, where it is sharded."""
    found: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found.detach()


def weights_of(model: nn.Module) -> Weights:
    """Copies of all weights, whole."""
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of these sizes. torch keeps what it knows of equal meshes of earlier programs in this process: no two have the same names."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"dim{next(_NAMES)}" for _ in shape))
