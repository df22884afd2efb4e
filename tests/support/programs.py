"""What ranks run in tests: small models trained in every way, and what came of them."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch.flat.buffer_stepper import BufferStepper
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import OuterStrategy, Strategy
from everybit_torch.torch_internals.dtensors import local
from tests.support import exact_models

FLAT: tuple[Strategy, ...] = ("no_shard", "optim", "optim_grads")
"""The strategies under which every rank has all weights."""


def on_buffers(stepper: FlatStepper) -> BufferStepper:
    """What is inside of a stepper on flat buffers."""
    assert isinstance(stepper.engine, BufferStepper)
    return stepper.engine


class Block(nn.Module):
    """A unit with an odd number of elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width + 2)
        self.outer = nn.Linear(width + 2, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


class Pair(nn.Module):
    """A unit with two units in it, and parameters of its own before and after them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)
        self.first, self.second = Block(width), Block(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.second(self.first(self.before(x))))
        return out


class Network(nn.Module):
    """Blocks between two layers that are in no block."""

    def __init__(self, width: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.entry = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.exit = nn.Linear(width, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

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
    strategy: Strategy,
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
        model,
        transform,
        policy=policy,
        strategy=strategy,
        units=[Block] if units else None,
        **arguments,
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
    """Copies of all weights, whole. Collective, where they are sharded."""
    return exact_models.weights_of(stepper.model)


class Addend(nn.Module):
    """Adds a weighted sum of its parameters: their gradients are the weights, whole numbers, whatever the parameters are."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
        self.number = 1

    def forward(self, x: Tensor) -> Tensor:
        for position, part in enumerate(self.parts):
            x = x + (part * (self.number + position)).sum()
        return x


class Sum(nn.Module):
    """Addends one after the other, and one of its own; none of their sizes is a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(7))
        self.addends = nn.ModuleList([Addend((3, 5), (1,)), Addend((2,), (1, 1, 3)), Addend((11,))])

    def forward(self, number: int) -> Tensor:
        x = (self.own * number).sum()
        for addend in self.addends:
            assert isinstance(addend, Addend)
            addend.number = number
            x = addend(x)
        return x


def integer_gradients(
    strategies: list[Strategy | Literal["optim_grads_params+outer"]],
    microbatches: list[int],
    grads: list[eb.Grads],
    patterns: list[str],
    dtype: torch.dtype,
    mesh: Any = None,
) -> list[tuple[Any, ...]]:
    """The cases in which the main gradient is not, bit for bit, the sum of everybody's gradients over the number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong: list[tuple[Any, ...]] = []
    for given in strategies:
        strategy: Strategy = "optim_grads_params" if given == "optim_grads_params+outer" else given
        outer: OuterStrategy = "optim" if given == "optim_grads_params+outer" else "no_shard"
        for one in grads:
            # One stepper for all of them: a cycle begins where the cycle before it, of another kind, ended.
            model = Sum().to(dtype)
            policy = eb.Policy(params=eb.Nearest() if dtype is torch.float32 else eb.Kahan(), grads=one)
            stepper = FlatStepper(
                model,
                eb.sgd(0.0),
                policy=policy,
                strategy=strategy,
                units=[Addend],
                mesh=mesh,
                outer=outer,
            )
            for count, pattern, cycle in itertools.product(microbatches, patterns, range(2)):
                for number in range(count):
                    last = number == count - 1
                    context: Any = contextlib.nullcontext()
                    if pattern == "microbatch":
                        context = stepper.microbatch(last=last)
                    elif pattern == "no_sync":
                        context = stepper.sync() if last else stepper.no_sync()
                    with context:
                        model(1 + rank + 5 * number + cycle).backward()
                stepper.finish_gradients()
                expected = sum(1 + r + 5 * number + cycle for r in range(size) for number in range(count))
                for group in stepper.as_optimizer().param_groups:
                    for name, parameter in zip(group["param_names"], group["params"], strict=True):
                        got = local(parameter.grad)
                        position = int(name.rsplit(".", 1)[1]) if "parts" in name else 0
                        total = expected + position * size * count
                        right = torch.tensor(float(total)) / torch.tensor(float(size))
                        if not torch.equal(torch.as_tensor(got), right.to(got.dtype).expand_as(got)):
                            wrong.append((strategy, outer, size, count, one, pattern, name, got.tolist(), float(right)))
                stepper.zero_grad()
            stepper.close()
    return wrong


def on_a_mesh(program: Any, outer: int, inner: int, *arguments: Any) -> Any:
    """``program`` with a two-dimensional mesh as its last argument."""
    return program(*arguments, exact_models.mesh_of((outer, inner)))
