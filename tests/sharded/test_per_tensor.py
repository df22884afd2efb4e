"""Numbers of each whole parameter, random draws and periodic work on shards: the bits of the whole model, however it is sharded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.sharded.stepper import FlatStepper
from tests.support.exact_models import whole_of
from tests.support.programs import FLAT
from tests.support.ranks import run
from tests.support.transforms import EXAMPLES
from tests.support.weights import Weights, equal

POLICIES = {"FP32": eb.policies.FP32, "LEAN_BF16": eb.policies.LEAN_BF16}
STEPS = 3


class Layer(nn.Module):
    """Its gradients are multiples of a quarter, exact in every order of addition."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))
        self.bias = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.weight.reshape(-1)
        return (flat * x[: flat.numel()]).sum() + (self.bias * x[:1]).sum()


class Model(nn.Module):
    """Sizes that no number of ranks divides, so that parameters lie on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.linspace(-1, 1, 13))
        self.layers = nn.ModuleList([Layer(3, 5), Layer(2, 2, 3), Layer(17)])
        self.scale = nn.Parameter(torch.ones(1))
        # In the buffer of `entry` and `scale`, and not beside them in the model.
        self.exit = nn.ParameterList([nn.Parameter(torch.linspace(0.5, 1, 5))])

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = (self.entry * x[:13]).sum() + (self.scale * x[:1]).sum()
        for layer in self.layers:
            total = total + layer(x)
        exit: Tensor = self.exit[0]
        return total + (exit * x[:5]).sum()


def model_for(policy: str) -> Model:
    return Model() if policy == "FP32" else Model().bfloat16()


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(-8, 9, (20,), generator=generator).float() / 4).to(dtype)


def stored(policy: str) -> eb.Policy:
    return dataclasses.replace(POLICIES[policy], grads=eb.Grads(main="float32", comm="float32"))


def one_process(name: str, policy: str, size: int, steps: int = STEPS) -> Weights:
    """The torch optimizer on the whole model, with the mean of all ranks' gradients."""
    model = model_for(policy)
    optimizer = TorchOptimizer(
        model.named_parameters(),
        EXAMPLES[name],
        lr=1e-2,
        policy=dataclasses.replace(stored(policy), grads=eb.Grads(main="float32")),
        seed=5,
    )
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            model(inputs(step, rank, model.scale.dtype)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(size)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def a_step(model: nn.Module, stepper: FlatStepper, step: int, dtype: torch.dtype) -> None:
    with stepper.microbatch(last=True):
        model(inputs(step, dist.get_rank(), dtype)).backward()
    stepper.step()


def weights_of(stepper: FlatStepper) -> Weights:
    return {name: whole_of(p).clone() for name, p in stepper.model.named_parameters()}


def stepped(name: str, policy: str, **arguments: Any) -> Weights:
    model = model_for(policy)
    stepper = FlatStepper(
        model,
        EXAMPLES[name](1e-2),
        policy=stored(policy),
        units=[Layer],
        divisor=dist.get_world_size(),
        seed=5,
        **arguments,
    )
    for step in range(STEPS):
        a_step(model, stepper, step, model.scale.dtype)
    found = weights_of(stepper)
    stepper.close()
    return found


def every_way(names: list[str], policy: str) -> dict[tuple[str, str], Weights]:
    found: dict[tuple[str, str], Weights] = {}
    for name in names:
        for strategy in FLAT:
            found[name, strategy] = stepped(name, policy, strategy=strategy)
        found[name, "fsdp2"] = by_fsdp2(name, policy)
    return found


def by_fsdp2(name: str, policy: str) -> Weights:
    model = model_for(policy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = TorchOptimizer(
        model.named_parameters(), EXAMPLES[name], lr=1e-2, policy=POLICIES[policy], seed=5, compile=False
    )
    size = dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        # The mean of whole quarters over two ranks is exact in bfloat16, too.
        model(inputs(step, dist.get_rank(), torch.float32 if policy == "FP32" else torch.bfloat16)).backward()
        optimizer.step()
    assert size == 2
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("policy", ["LEAN_BF16", pytest.param("FP32", marks=pytest.mark.exhaustive)])
def test_shards_give_the_bits_of_the_whole_model(policy: str) -> None:
    names = [name for name in EXAMPLES if name != "factored"]
    expected = {name: one_process(name, policy, 2) for name in names}
    for found in run(2, every_way, names, policy):
        for (name, way), weights in found.items():
            assert equal(weights, expected[name]), (name, way)
