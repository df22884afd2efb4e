"""Optimizers that must see whole tensors, on shards that are cut between tensors: the bits of one process, whatever the number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import whole_of
from tests.support.programs import FLAT
from tests.support.ranks import run
from tests.support.weights import Weights, equal

TRANSFORMS: dict[str, Callable[[eb.Hyperparameter], eb.Transform[Any]]] = {
    "adafactor": lambda lr: eb.torch_adafactor(lr),
    "clipped": lambda lr: eb.chain(eb.clip_by_global_norm(0.5), eb.novograd(lr, weight_decay=0.1)),
    "units": lambda lr: eb.chain(eb.clip_by_unit_norm(0.1), eb.adamw(lr)),
    "masked": lambda lr: eb.chain(eb.masked(eb.centralize(), lambda path, p: p.ndim > 1), eb.sgd(lr, momentum=0.9)),
    "muon": lambda lr: eb.muon(lr, views={r"layers\.1\.weight": eb.batched()}, others=eb.adamw),
    "normuon": lambda lr: eb.normuon(lr, views={r"layers\.1\.weight": eb.batched()}, before="rows", others_rate=0.5),
    "soap": lambda lr: eb.soap(lr, period=2),
    "kron": lambda lr: eb.kron(lr, period=2),
    "apollo": lambda lr: eb.apollo(lr, rank=1, period=2),
    "lion of low rank": lambda lr: eb.chain(
        eb.low_rank(eb.scale_by_lion(), rank=1, period=2), eb.scale_by_learning_rate(lr)
    ),
}
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


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(-8, 9, (20,), generator=generator).float() / 4).to(dtype)


def stored(policy: str) -> eb.Policy:
    return dataclasses.replace(eb.policies.PRESETS[policy], grads=eb.Grads(main="float32", comm="float32"))


def new_model(policy: str) -> Model:
    return Model() if policy == "FP32" else Model().bfloat16()


def one_process(name: str, policy: str, size: int, steps: int = STEPS) -> Weights:
    """The torch optimizer on the whole model, with the mean of all ranks' gradients."""
    model = new_model(policy)
    optimizer = TorchOptimizer(model.named_parameters(), TRANSFORMS[name], lr=1e-2, policy=stored(policy), seed=5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            model(inputs(step, rank, model.scale.dtype)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(size)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def new_stepper(model: nn.Module, name: str, policy: str, **given: Any) -> FlatStepper:
    return FlatStepper(
        model,
        TRANSFORMS[name](1e-2),
        policy=stored(policy),
        units=[Layer],
        divisor=dist.get_world_size(),
        seed=5,
        **given,
    )


def train(model: Model, stepper: FlatStepper, steps: range) -> Weights:
    for step in steps:
        with stepper.microbatch(last=True):
            model(inputs(step, dist.get_rank(), model.scale.dtype)).backward()
        stepper.step()
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}


def every_strategy(policy: str) -> dict[tuple[str, str], Weights]:
    found: dict[tuple[str, str], Weights] = {}
    for name in TRANSFORMS:
        for strategy in FLAT:
            model = new_model(policy)
            stepper = new_stepper(model, name, policy, strategy=strategy)
            found[name, strategy] = train(model, stepper, range(STEPS))
            stepper.close()
    return found


@pytest.mark.parametrize(
    ("size", "policy"),
    [
        (2, "LEAN_BF16"),
        pytest.param(2, "FP32", marks=pytest.mark.exhaustive),
        pytest.param(3, "KAHAN_BF16", marks=pytest.mark.exhaustive),
        pytest.param(4, "LEAN_BF16", marks=pytest.mark.exhaustive),  # more ranks than a unit has tensors
    ],
)
def test_shards_give_the_bits_of_the_whole_model(size: int, policy: str) -> None:
    expected = {name: one_process(name, policy, size) for name in TRANSFORMS}
    for found in run(size, every_strategy, policy):
        for (name, strategy), weights in found.items():
            assert equal(weights, expected[name]), (name, strategy)


def saved(place: str, strategy: Strategy, name: str) -> tuple[Weights, Weights]:
    """The weights at a save, and three steps after it, in which this number of ranks has the same gradients each."""
    model = new_model("LEAN_BF16")
    stepper = new_stepper(model, name, "LEAN_BF16", strategy=strategy)
    before = train(model, stepper, range(2))
    save_sharded(stepper, place)
    return before, alike(model, stepper)


def alike(model: Model, stepper: FlatStepper) -> Weights:
    for step in range(2, 4):
        with stepper.microbatch(last=True):
            model(inputs(step, 0, model.scale.dtype)).backward()
        stepper.step()
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}


def loaded(place: str, strategy: Strategy, name: str) -> tuple[Weights, Weights]:
    model = new_model("LEAN_BF16")
    stepper = new_stepper(model, name, "LEAN_BF16", strategy=strategy)
    load_sharded(stepper, place)
    before = {name: whole_of(p).clone() for name, p in model.named_parameters()}
    return before, alike(model, stepper)


@pytest.mark.parametrize("name", ["adafactor", "muon", "soap"])
@pytest.mark.sampled(3)
def test_a_checkpoint_goes_on_with_another_number_of_ranks_and_another_strategy(name: str, tmp_path: Path) -> None:
    (before, after), *_ = run(2, saved, str(tmp_path), "optim_grads", name)
    for size, strategy in ((1, "optim"), (3, "optim_grads")):
        for found in run(size, loaded, str(tmp_path), strategy, name):
            assert equal(found[0], before)
            assert equal(found[1], after), (size, strategy)


class Two(nn.Module):
    """A matrix, whose rank has all to do, and a part without any tensor for the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def one_tensor() -> Weights:
    model = Two()
    stepper = FlatStepper(model, TRANSFORMS["clipped"](1e-2), strategy="optim_grads", divisor=2)
    for step in range(STEPS):
        with stepper.microbatch(last=True):
            model(torch.full((3, 4), 1.0 + step + dist.get_rank())).backward()
        stepper.step()
    return {"weight": model.weight.detach().clone()}


def test_a_rank_without_a_tensor_takes_part_in_the_reductions() -> None:
    model = Two()
    optimizer = TorchOptimizer(model.parameters(), TRANSFORMS["clipped"], lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.5 + step)).backward()
        optimizer.step()
    for found in run(2, one_tensor):
        assert equal(found, {"weight": model.weight.detach()})


def untouched() -> tuple[Weights, list[str]]:
    """The last layer has a gradient in every second step only."""
    model = new_model("FP32")
    stepper = new_stepper(model, "clipped", "FP32", strategy="optim_grads")
    names: list[str] = []
    for step in range(4):
        with stepper.microbatch(last=True):
            x = inputs(step, 0, torch.float32)
            (model(x) if step % 2 else sum(layer(x) for layer in list(model.layers)[:2])).backward()
        names = list(stepper.step().untouched)
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}, names


def test_tensors_without_a_gradient_are_left_as_they_are() -> None:
    model = new_model("FP32")
    optimizer = TorchOptimizer(model.named_parameters(), TRANSFORMS["clipped"], lr=1e-2, seed=5)
    for step in range(4):
        optimizer.zero_grad()
        x = inputs(step, 0, torch.float32)
        (model(x) if step % 2 else sum(layer(x) for layer in list(model.layers)[:2])).backward()
        optimizer.step()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found, _ in run(2, untouched):
        assert equal(found, expected)
