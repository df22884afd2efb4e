"""Matrix optimizers of parameters that FSDP2 has cut by rows: the bits of one process, whatever the number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import TorchOptimizer, enable_gradient_release
from everybit_torch.checkpoint.sharded import load_sharded_into, save_sharded
from everybit_torch.optim import visits
from everybit_torch.sharded.stepper import FlatStepper
from tests.support.matrix_model import small
from tests.support.ranks import run
from tests.support.rows import Layers, cut, mesh_of, new_model, train, whole
from tests.support.weights import Weights, equal

STEPS = 5
VIEWS = {"qkv": eb.row_blocks(8, 8, 5), "experts": eb.batched()}


def muon(learning_rate: eb.Hyperparameter, **arguments: Any) -> eb.Transform[Any]:
    return eb.muon(learning_rate, views=VIEWS, **arguments)


def clipped(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    around = muon(learning_rate, before="rows", after="columns_then_rows", decay_kind="coupled")
    return eb.chain(eb.clip_by_global_norm(0.5), around)


def centralized(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    parts: dict[str, eb.Transform[Any]] = {
        "centralize": eb.centralize(),
        "descent": eb.sgd(learning_rate, momentum=0.9),
    }
    return eb.named_chain(parts)


def beside_lamb(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    """Reductions over each parameter, among those of Muon too."""
    return eb.chain(eb.clip_by_global_norm(0.5), muon(learning_rate, arithmetic="float32", others=eb.lamb))


def accumulated(learning_rate: eb.Hyperparameter) -> eb.Transform[Any]:
    return eb.accumulate(eb.apply_if_finite(muon(learning_rate)), 2)


CASES: dict[str, tuple[Callable[[eb.Hyperparameter], eb.Transform[Any]], PolicyName]] = {
    "muon": (muon, "FP32"),
    "in 16 bits": (muon, "LEAN_BF16"),
    "clipped": (clipped, "FP32"),
    "centralized": (centralized, "KAHAN_BF16"),
    "beside lamb": (beside_lamb, "FP32"),
    "accumulated": (accumulated, "FP32"),
}


def make(model: Layers, name: str) -> TorchOptimizer:
    factory, policy = CASES[name]
    matrices = [(key, p) for key, p in model.named_parameters() if "experts" in key or "short" in key]
    others = [(key, p) for key, p in model.named_parameters() if "experts" not in key and "short" not in key]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": matrices, "lr": 3e-3}]
    return TorchOptimizer(groups, factory, lr=1e-2, policy=policy, seed=5, compile=False)


@cache
def one_process(name: str) -> tuple[Weights, eb.Metrics]:
    model = new_model(CASES[name][1])
    optimizer = make(model, name)
    optimizer.metrics_enabled = True
    train(model, optimizer, range(STEPS))
    return whole(model), optimizer.metrics()


def in_rows(shape: tuple[int, ...] | None, at_least: int) -> dict[str, tuple[Weights, eb.Metrics]]:
    found, mesh = {}, mesh_of(shape)
    with patch.object(visits, "ROUND", at_least):
        for name in CASES:
            model = new_model(CASES[name][1])
            cut(model, list(model.layers), mesh)
            optimizer = make(model, name)
            optimizer.metrics_enabled = True
            train(model, optimizer, range(STEPS))
            found[name] = whole(model), optimizer.metrics()
    return found


@pytest.mark.parametrize(
    ("size", "shape", "at_least"),
    [
        (2, None, 1),  # several buckets
        (3, None, 1 << 22),
        pytest.param(1, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(3, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(4, (2, 2), 1, marks=pytest.mark.exhaustive),
        pytest.param(4, (2, 2), 1 << 22, marks=pytest.mark.exhaustive),
        pytest.param(4, (4, 1), 1, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.exhaustive
def test_rows_give_the_bits_of_the_whole_model(size: int, shape: tuple[int, ...] | None, at_least: int) -> None:
    """With two param groups, a frozen parameter, and parameters without a gradient in some steps."""
    expected = {name: one_process(name) for name in CASES}
    for found in run(size, in_rows, shape, at_least):
        for name, (weights, metrics) in found.items():
            assert equal(weights, expected[name][0]), name
            assert metrics.moved == expected[name][1].moved


def everyday() -> Weights:
    """A loop as one writes it, with a matrix that is whole on all ranks; sums of two equal numbers are exact."""
    model = small()
    if dist.is_initialized():
        cut(model, [model.qkv, model.ensemble], ignored=[model.ensemble.weight])
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=0.02, views={"qkv": eb.heads(3)}, compile=False)
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
    return whole(model)


def test_a_loop_as_one_writes_it() -> None:
    expected = everyday()
    for found in run(2, everyday):
        assert equal(found, expected)


def compiled(name: str) -> Weights:
    model = new_model(CASES[name][1])
    cut(model, list(model.layers))
    optimizer = TorchOptimizer(
        model.named_parameters(), CASES[name][0], lr=1e-2, policy=CASES[name][1], seed=5, compile=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that is not compiled after all says so
        train(model, optimizer, range(STEPS))
    return whole(model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["in 16 bits", "clipped"])
def test_compiled_steps_have_the_same_bits(name: str) -> None:
    model = new_model(CASES[name][1])
    optimizer = TorchOptimizer(
        model.named_parameters(), CASES[name][0], lr=1e-2, policy=CASES[name][1], seed=5, compile=False
    )
    train(model, optimizer, range(STEPS))
    for found in run(2, compiled, name, limit=400.0):
        assert equal(found, whole(model))


def saved(place: Path, shape: tuple[int, ...] | None) -> Weights:
    mesh = mesh_of(shape)
    model = new_model("FP32")
    cut(model, list(model.layers), mesh)
    optimizer = make(model, "muon")
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=place)
    return whole(model)


def resumed(place: Path) -> Weights:
    model = new_model("FP32")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    cut(model, list(model.layers))
    optimizer = make(model, "muon")
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": state}, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    copied = make(model, "muon")
    copied.load_state_dict(optimizer.state_dict())
    train(model, copied, range(2, STEPS))
    return whole(model)


@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        (3, None, 2),
        pytest.param(2, None, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, None, 4, marks=pytest.mark.exhaustive),
        pytest.param(4, (2, 2), 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    before: int, shape: tuple[int, ...] | None, after: int, tmp_path: Path
) -> None:
    expected, _ = one_process("muon")
    run(before, saved, tmp_path, shape)
    for found in run(after, resumed, tmp_path):
        assert equal(found, expected)


def from_a_stepper(place: Path) -> tuple[Weights, Weights]:
    def step(model: nn.Module, number: int) -> None:
        model(torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(number))).square().mean().backward()

    model, other = small(), small()
    stepper = FlatStepper(model, eb.muon(0.02, views={"qkv": eb.heads(3)}), strategy="optim_grads")
    for number in range(4):
        if number == 2:
            save_sharded(stepper, place).result()
        with stepper.microbatch(last=True):
            step(model, number)
        stepper.step()
    cut(other, [other.qkv, other.ensemble])
    optimizer = TorchOptimizer(other.named_parameters(), eb.muon, lr=0.02, views={"qkv": eb.heads(3)}, compile=False)
    load_sharded_into(other, optimizer, place)
    for number in range(2, 4):
        optimizer.zero_grad()
        step(other, number)
        optimizer.step()
    return whole(model), whole(other)


@pytest.mark.exhaustive
def test_a_steppers_checkpoint_goes_on_here(tmp_path: Path) -> None:
    for expected, found in run(2, from_a_stepper, tmp_path):
        assert equal(found, expected)


FACTORIES: dict[str, Callable[[eb.Hyperparameter], eb.Transform[Any]]] = {
    "columns": lambda lr: eb.muon(lr, others=None),
}


def refused() -> dict[str, str]:
    found = {}
    for name, factory in FACTORIES.items():
        model = nn.Linear(4, 4, bias=False)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh, shard_placement_fn=(lambda _: Shard(1)) if name == "columns" else None)
        weight: Any = model.weight
        weight.grad = distribute_tensor(torch.ones(4, 4), mesh, weight.placements)
        before = weight.full_tensor()
        optimizer = TorchOptimizer(model.named_parameters(), factory, lr=1e-2)
        with pytest.raises(ValueError, match="weight: ") as caught:
            optimizer.step()
        assert torch.equal(weight.full_tensor(), before)
        found[name] = str(caught.value)
        with pytest.raises(ValueError, match=r"optimizer: its transform (must see whole tensors, of which|reduces)"):
            enable_gradient_release(model, optimizer)
    return found


def test_what_cannot_be_stepped_in_rows_is_refused_before_anything_is_changed() -> None:
    for found in run(2, refused):
        assert "(Shard(dim=1),)" in found["columns"]
        assert "accepted are Shard(0) along one dimension" in found["columns"]


def different_gradients() -> tuple[str, bool]:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    cut(model, [])
    for number, layer in enumerate(model):
        weight: Any = layer.weight
        weight.grad = distribute_tensor(torch.ones(4, 4), weight.device_mesh, weight.placements)
        if number == dist.get_rank():
            weight.grad = None
    before = whole(model)
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=1e-2, others=None, compile=False)
    with pytest.raises(RuntimeError, match="step: ranks have gradients for different parameters") as caught:
        optimizer.step()
    return str(caught.value), equal(whole(model), before)


def test_ranks_with_gradients_for_different_parameters_are_told() -> None:
    for number, (message, unchanged) in enumerate(run(2, different_gradients)):
        assert f"this one for param group 0, parameter {1 - number} of those" in message
        assert unchanged
