"""A format with one number for a block of elements, on shards: whatever cuts the model, no bit differs from the whole's."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import TorchOptimizer, nonfinite_state
from everybit_torch.checkpoint.sharded import load_sharded, load_sharded_into, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.block_formats import Int8Blocks, Int8Residual
from tests.support.exact_models import whole_of
from tests.support.ranks import run

STRATEGIES: tuple[Strategy, ...] = ("no_shard", "optim", "optim_grads")
BLOCKS = eb.Policy(params=Int8Residual(), momentum=Int8Blocks(), variance=Int8Blocks(16))
DRAWING = eb.Policy(
    params=eb.Split(8, rounding="stochastic"),
    momentum=eb.Blockwise("float", block=32),
    variance=eb.Blockwise("float", 4, 32, scale="bfloat16"),
)


class Model(nn.Module):
    """Parameters that end inside a block, at one, and before the first; gradients that are sums of whole numbers on any ranks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7, 9), (9,), (64,), (3, 32), (), (5, 33)]
        self.values = nn.ParameterList(
            torch.sin(torch.arange(torch.Size(shape).numel()) + 1.0).view(shape) for shape in shapes
        )

    def forward(self, step: int) -> Tensor:
        terms = [
            (p * ((torch.arange(p.numel()).view(p.shape) * (number + 3) + step) % 13 - 6).to(p.dtype)).float().sum()
            for number, p in enumerate(self.values)
        ]
        return torch.stack(terms).sum()


def model() -> Model:
    return Model().to(torch.bfloat16)


def adamw() -> eb.Transform[Any]:
    return eb.adamw(0.01)


def whole(policy: eb.Policy, steps: int) -> tuple[Model, TorchOptimizer]:
    module = model()
    optimizer = TorchOptimizer(module.parameters(), adamw, policy=policy)
    for step in range(steps):
        optimizer.zero_grad()
        module(step).backward()
        optimizer.step()
    return module, optimizer


def stepped(stepper: FlatStepper, module: Model, steps: range) -> None:
    for step in steps:
        stepper.zero_grad()
        with stepper.microbatch(last=True):
            module(step).backward()
        stepper.step()


def weights(stepper: FlatStepper, module: Model) -> list[Tensor]:
    return [whole_of(p).clone() for p in module.values]


def exact(stepper: FlatStepper) -> int:
    """Bytes of what the optimizer keeps on this rank: slots and compensation."""
    states = [one.of.segment.state for one in stepper.engine.as_optimizer().own.stepped]
    return sum(x.nbytes for state in states for x in eb.tree.leaves((state.extra, state.inner)) if x.ndim)


def each_strategy(folder: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, policy in (("blocks", BLOCKS), ("drawing", DRAWING)):
        for strategy in STRATEGIES:
            module = model()
            stepper = FlatStepper(module, adamw(), policy=policy, strategy=strategy)
            stepped(stepper, module, range(3))
            plan = stepper.plan()
            kept = {use: plan.persistent[use] for use in ("compensation", "momentum", "variance")}
            found[name, strategy] = weights(stepper, module), sum(kept.values()), exact(stepper)
            if strategy == "optim_grads" and name == "blocks":
                save_sharded(stepper, folder)
    return found


def spoiled(strategy: Strategy) -> list[tuple[str, str, int]]:
    """What is told of an infinite gradient in the last parameter's last block, which has 5 elements."""
    module = model()
    stepper = FlatStepper(module, adamw(), policy=DRAWING, strategy=strategy)
    assert nonfinite_state(stepper) == ()
    with stepper.microbatch(last=True):
        loss = module(0) + torch.where(module.values[5][4, 30] < 9, torch.inf, 0.0) * module.values[5][4, 30].float()
        loss.backward()
    stepper.step()
    return [(one.name, one.entry, one.count) for one in nonfinite_state(stepper)]


def resumed(folder: str) -> list[Tensor]:
    module = model()
    stepper = FlatStepper(module, adamw(), policy=BLOCKS, strategy="optim_grads")
    load_sharded(stepper, folder)
    stepped(stepper, module, range(3, 5))
    return weights(stepper, module)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_shards_give_the_wholes_bits_and_a_checkpoint_of_three_ranks_goes_on_on_two() -> None:
    expected = {name: list(whole(policy, 3)[0].values) for name, policy in (("blocks", BLOCKS), ("drawing", DRAWING))}
    later = list(whole(BLOCKS, 5)[0].values)
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, 2, 3):
            for found in run(size, each_strategy, folder):
                for (name, strategy), (got, planned, measured) in found.items():
                    assert same(got, expected[name]), (size, name, strategy)
                    assert planned == measured, (size, name, strategy)
        for got in run(2, resumed, folder):
            assert same(got, later)
        # A plain model goes on, too, with every stored bit.
        module = model()
        optimizer = TorchOptimizer(module.parameters(), adamw, policy=BLOCKS)
        load_sharded_into(module, optimizer, folder)
        saved = whole(BLOCKS, 3)[1].state_dict()["state"]
        for number, entries in optimizer.state_dict()["state"].items():
            assert entries.keys() == saved[number].keys() >= {"param.codes", "param.scale", "momentum.scale"}
            assert all(torch.equal(value, saved[number][name]) for name, value in entries.items())
        for step in (3, 4):
            optimizer.zero_grad()
            module(step).backward()
            optimizer.step()
        assert same(list(module.values), later)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_a_number_that_is_not_finite_is_reported_by_name_on_every_rank(strategy: Strategy) -> None:
    """Of 165 elements the last five are a block; a step moves weights by moments that are not stored yet."""
    for found in run(2, spoiled, strategy):
        assert found == [
            ("values.5", "param", 1), ("values.5", "momentum.scale", 5), ("values.5", "variance.scale", 5),
        ]  # fmt: skip
