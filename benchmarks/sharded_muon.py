"""A step of Muon, NorMuon or SOAP on two processes over gloo: matrices packed by work, against ranks that each iterate on everything, and
against FSDP2, where rows of updates, and of what is kept for whole matrices, travel to an owner and back.

All contestants take turns in the same two processes, a step each. Medians are compared, and the least times, in which others that
use the processor count least. A step is a whole cycle: gradients, their
reduction, the update, and the new weights on every rank. Gradients cost little here: the loss is a sum of products with random numbers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer, plan
from machine import describe


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        layers: Blocks with the seven matrices of a decoder layer.
        width: Of the residual stream; the feed-forward network is four times as wide.
        rounds: Steps of each contestant that are timed, after one that is not. In that one SOAP finds its bases, which stay.
        out: Where the results go.
    """

    layers: int = 4
    width: int = 512
    rounds: int = 7
    out: Path | None = None


class Matrices(nn.Module):
    """The matrices of a decoder layer; its output is linear in each of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) * width**-0.5) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number, weight in enumerate(self.weights):
            total = total + (weight * x[number : number + 1] * torch.cos(x[number])).sum()
        return total


class Blocks(nn.Module):
    """Several of them."""

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Matrices(arguments.width) for _ in range(arguments.layers))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            total = total + block(x)
        return total


def muon(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.muon(learning_rate, others=None)


def normuon(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.normuon(learning_rate, others=None)


def soap(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.soap(learning_rate, period=1000)


Factory = Callable[[eb.Hyperparameter], eb.Transform[Any]]


def everybit(model: Blocks, strategy: Any, factory: Factory = muon) -> Callable[[Tensor], None]:
    stepper = FlatStepper(model, factory(1e-3), strategy=strategy, units=[Matrices])

    def step(x: Tensor) -> None:
        with stepper.microbatch(last=True):
            torch.autograd.backward(model(x))
        stepper.step()

    return step


def fsdp2(model: Blocks, optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Tensor], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    optimizer = optimizer_of(model.parameters())

    def step(x: Tensor) -> None:
        torch.autograd.backward(model(x))
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_muon(model: Blocks) -> Callable[[Tensor], None]:
    """Its operations on DTensors gather what they need."""
    return fsdp2(model, lambda params: torch.optim.Muon(params, lr=1e-3))


def everybit_in_rows(model: Blocks, factory: Factory) -> Callable[[Tensor], None]:
    """Rows of updates travel to an owner, and back; and so do those of what is kept for whole matrices."""
    return fsdp2(model, lambda params: TorchOptimizer(params, factory, lr=1e-3, compile=False))


CONTESTANTS: dict[str, Callable[[Blocks], Callable[[Tensor], None]]] = {
    "everybit, optim": lambda model: everybit(model, "optim"),
    "everybit, optim_grads_params": lambda model: everybit(model, "optim_grads_params"),
    "everybit, no_shard: each rank iterates on everything": lambda model: everybit(model, "no_shard"),
    "FSDP2, torch.optim.Muon on DTensors": torch_muon,
    "FSDP2, everybit.muon": lambda model: everybit_in_rows(model, muon),
    "everybit, optim, normuon": lambda model: everybit(model, "optim", normuon),
    "FSDP2, everybit.normuon": lambda model: everybit_in_rows(model, normuon),
    "everybit, optim, soap": lambda model: everybit(model, "optim", soap),
    "FSDP2, everybit.soap": lambda model: everybit_in_rows(model, soap),
}


def worker(rank: int, store: str, arguments: Arguments, out: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    steps = {}
    for name, make in CONTESTANTS.items():
        torch.manual_seed(0)
        steps[name] = make(Blocks(arguments))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):
        x = torch.randn(7, 1, generator=torch.Generator().manual_seed(2 * number + rank))
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(x)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        out.put({name: found[1:] for name, found in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Arguments) -> None:
    """Measure, and print a line for each contestant."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=worker, args=(rank, f"{folder}/store", arguments, out)) for rank in range(2)]
        for one in ranks:
            one.start()
        seconds = out.get()
        for one in ranks:
            one.join()
    first = seconds["everybit, optim"]
    for name, found in seconds.items():
        median, least = statistics.median(found), min(found)
        ratios = f"{median / statistics.median(first):.2f}, {least / min(first):.2f}"
        print(f"{name:56} median {1000 * median:7.1f} ms, least {1000 * least:7.1f} ms: {ratios}")
    with torch.device("meta"):
        model = Blocks(arguments)
    print(plan(model, eb.muon(1e-3, others=None), strategy="optim", ranks=2, units=[Matrices]).whole_tensors)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"machine": describe(), "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
