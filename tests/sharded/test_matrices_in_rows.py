"""Muon on parameters that FSDP2 has cut by rows, in a loop as one writes it; and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import everybit as eb
from everybit_torch import TorchOptimizer, enable_gradient_release
from tests.support.matrix_model import small
from tests.support.ranks import run
from tests.support.rows import cut, whole
from tests.support.weights import Weights, equal


def everyday() -> Weights:
    """A loop as one writes it, with a matrix that is whole on all ranks; sums of two equal numbers are exact."""
    model = small()
    if dist.is_initialized():
        cut(model, [model.qkv, model.ensemble], ignored=[model.ensemble.weight])
    optimizer = TorchOptimizer(
        model.named_parameters(), eb.muon, lr=0.02, matrices=eb.Matrices(views={"qkv": eb.heads(3)}), compile=False
    )
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


def parallel(model: nn.Module) -> None:
    """As tensor parallelism and fully_shard cut it together; the last layer by the latter alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def beside_tensor_parallelism(*, is_cut: bool) -> Weights:
    """Muon for what fully_shard alone cuts, and AdamW for what both cut, as the refusal says."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.Linear(6, 6, bias=False)
    )
    if is_cut:
        parallel(model)
        optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=1e-2, compile=False)
        model(torch.ones(2, 6)).sum().backward()
        with pytest.raises(
            ValueError, match=r"^0\.weight: .*tensor parallelism and fully_shard .*write Matrices\(others="
        ):
            optimizer.step()
        model.zero_grad()
    matrices = eb.Matrices(others=r"^[02]\.")
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=1e-2, matrices=matrices, compile=False)
    for step in range(3):
        model.zero_grad()
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step + parameter.numel()))
            placed: Any = parameter
            parameter.grad = distribute_tensor(gradient, placed.device_mesh, placed.placements) if is_cut else gradient
        optimizer.step()
    return whole(model)


def test_what_tensor_parallelism_and_fully_shard_cut_together_is_left_to_the_others() -> None:
    expected = beside_tensor_parallelism(is_cut=False)
    for found in run(4, partial(beside_tensor_parallelism, is_cut=True)):
        assert equal(found, expected)


def refused() -> str:
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    weight: Any = model.weight
    weight.grad = distribute_tensor(torch.ones(4, 4), mesh, weight.placements)
    before = weight.full_tensor()
    optimizer = TorchOptimizer(model.named_parameters(), eb.muon, lr=1e-2, others=None)
    with pytest.raises(ValueError, match="weight: ") as caught:
        optimizer.step()
    assert torch.equal(weight.full_tensor(), before)
    with pytest.raises(ValueError, match=r"optimizer: its transform must see whole tensors, of which"):
        enable_gradient_release(model, optimizer)
    listed: Any = nn.Linear(4, 4, bias=False)
    fully_shard(listed, mesh=mesh)
    twice = TorchOptimizer(listed.named_parameters(), eb.muon, lr=1e-2, others=None)
    twice.param_groups.append(twice.param_groups[0])
    listed.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, listed.weight.placements)
    before = listed.weight.full_tensor()
    with pytest.raises(RuntimeError, match="param_groups: got a group twice"):
        twice.step()
    assert torch.equal(listed.weight.full_tensor(), before)
    del twice.param_groups[1]
    twice.step()
    with pytest.raises(TypeError, match="a copy of the optimizer: parameters are stepped whole by owners"):
        copy.deepcopy(twice)
    return str(caught.value)


def test_what_cannot_be_stepped_in_rows_is_refused_before_anything_is_changed() -> None:
    for found in run(2, refused):
        assert "(Shard(dim=1),)" in found
        assert "accepted are Shard(0) along one dimension" in found


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
