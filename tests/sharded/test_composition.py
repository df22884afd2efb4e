"""Steppers beside tensor parallelism, pipelines and experts: the bits of one process, and every element counted once in what is global."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.ranks import run
from tests.support.transforms import EXAMPLES
from tests.support.weights import Weights, equal

STEPS = 3
MAIN = eb.Grads(main="float32", comm="float32")
TRANSFORMS: dict[str, Any] = {
    "clipped": lambda lr: eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(lr)),
    # Of which the norm of all gradients is not the first reduction.
    "clipped later": lambda lr: eb.chain(eb.scale(2.0), eb.clip_by_global_norm(0.5), eb.adamw(lr)),
    "lamb": EXAMPLES["lamb"],
}


def gradient(name: str, like: Tensor, step: int, rank: int) -> Tensor:
    """Multiples of a quarter, whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + sum(map(ord, name)))
    return (torch.randint(-8, 9, tuple(like.shape), generator=generator).float() / 4).to(like.dtype)


class Part(nn.Module):
    """A layer whose gradients are what :func:`gradient` says."""

    def __init__(self, name: str, dtype: torch.dtype, rows: int = 6) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * 5).view(rows, 5).to(dtype))
        self.bias = nn.Parameter(torch.linspace(0, 1, 3).to(dtype))
        self.scale = nn.Parameter(torch.ones(2).to(dtype))

    def forward(self, step: int, rank: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in self.named_parameters():
            if isinstance(parameter, DTensor):
                whole = gradient(f"{self.name}.{name}", parameter, step, rank)
                part = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                found = (parameter * part).double().sum().full_tensor()
            else:
                found = (parameter * gradient(f"{self.name}.{name}", parameter, step, rank)).double().sum()
            total = total + found
        return total


class Model(nn.Module):
    def __init__(self, names: list[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part(name, dtype) for name in names})

    def forward(self, step: int, rank: int) -> Tensor:
        return torch.stack([part(step, rank) for part in self.parts.values()]).sum()


def policy(name: str) -> eb.Policy:
    chosen: eb.Policy = getattr(eb.policies, name)
    return dataclasses.replace(chosen, grads=MAIN)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "FP32" else torch.bfloat16


def one_process(transform: str, stored: str, names: list[str], size: int) -> Weights:
    """The torch optimizer on the whole model, with the mean of all ranks' gradients."""
    model = Model(names, dtype_of(stored))
    given = dataclasses.replace(policy(stored), grads=eb.Grads(main="float32"))
    optimizer = TorchOptimizer(model.named_parameters(), TRANSFORMS[transform], lr=1e-2, policy=given, seed=5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            model(step, rank).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(size)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def weights_of(stepper: FlatStepper) -> Weights:
    with stepper.full_parameters() as model:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }


# -- tensor parallelism -----------------------------------------------------------------------------------------------------------


def cut(model: nn.Module, mesh: DeviceMesh, dimension: int) -> None:
    """Weights in parts, biases as copies, scales as they were."""
    for module in model.modules():
        for name, placement in (("weight", Shard(dimension)), ("bias", Replicate())):
            if isinstance(getattr(module, name, None), nn.Parameter):
                placements: list[Placement] = [placement]
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements))
                )


def with_tensor_parallelism(stored: str, names: list[str]) -> dict[tuple[str, str], Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: dict[tuple[str, str], Any] = {}
    for transform in names:
        for strategy in STRATEGIES:
            model = Model(["first", "second"], dtype_of(stored))
            cut(model, mesh["tensor"], 0)
            stepper = FlatStepper(
                model, TRANSFORMS[transform](1e-2), policy=policy(stored), mesh=mesh["data"], strategy=strategy,
                units=[Part], seed=5,
            )  # fmt: skip
            norms = []
            for step in range(STEPS):
                with stepper.microbatch(last=True):
                    model(step, mesh.get_local_rank("data")).backward()
                norms.append(float(stepper.step().grad_norm))
            found[transform, strategy] = weights_of(stepper), norms
            stepper.close()
    return found


@pytest.mark.parametrize("stored", ["LEAN_BF16", pytest.param("FP32", marks=pytest.mark.exhaustive)])
def test_a_tensor_parallel_model_has_the_bits_of_one_process(stored: str) -> None:
    names = list(TRANSFORMS)
    expected = {name: one_process(name, stored, ["first", "second"], 2) for name in names}
    for found in run(4, with_tensor_parallelism, stored, names):
        for (transform, strategy), (weights, _) in found.items():
            assert equal(weights, expected[transform]), (transform, strategy)
