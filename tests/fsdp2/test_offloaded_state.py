"""State of FSDP2's rows in the host's memory has the bits of a step without it. Here without a device, and its copies."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from everybit_torch import TorchOptimizer, create
from everybit_torch.segments import host_state
from everybit_torch.torch_internals.dtensors import with_part
from tests.support.exact_models import mesh_of, weights_of
from tests.support.ranks import run
from tests.support.weights import equal


def stepped(name: Any, model: nn.Module, steps: int, **options: Any) -> TorchOptimizer:
    optimizer = create(name, model, lr=1e-2, policy="LEAN_BF16", **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient: Any = torch.randn(parameter.shape, generator=generator).bfloat16()
            placed: Any = parameter
            parameter.grad = distribute_tensor(gradient, placed.device_mesh, placed.placements)
        optimizer.step()
        if step == 2 and not options:
            optimizer.offload()
            with pytest.raises(RuntimeError, match="step: state was moved to the host"):
                optimizer.step()
            optimizer.reload()
    return optimizer


def on_rows() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).bfloat16()
    models = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for model in models:
        fully_shard(model, mesh=mesh_of((2,)))
    with patch.object(host_state, "IN_TESTS", True), patch.object(host_state, "LENGTH", 4):
        offloaded, moved = stepped("adamw", models[0], 4, offload="state"), stepped("adamw", models[1], 4)
        plain = stepped("adamw", models[2], 4, compile=False)
        for optimizer, model in ((offloaded, models[0]), (moved, models[1])):
            assert equal(weights_of(model), weights_of(models[2]))
            for mine, theirs in zip(
                optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True
            ):
                assert mine.keys() == theirs.keys()
                for key, x in theirs.items():
                    assert torch.equal(*(y.to_local() if isinstance(y, DTensor) else y for y in (mine[key], x)))
        with pytest.raises(ValueError, match="offload: got 'state' for a parameter that is stepped whole"):
            stepped("muon", models[0], 1, offload="state")
        stepped("muon", models[1], 4)
        stepped("muon", models[2], 4, compile=False)
        assert equal(weights_of(models[1]), weights_of(models[2]))
    weight: Any = models[0][0].weight
    part = torch.arange(float(weight.to_local().numel())).view(weight.to_local().shape)
    made = with_part(weight, part, weight.shape, weight.stride())
    assert made.placements == weight.placements
    assert made.to_local() is not None
    same = DTensor.from_local(part, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())
    assert torch.equal(made.full_tensor(), same.full_tensor())


def test_rows_have_the_bits_of_a_step_without_it() -> None:
    run(2, on_rows)
