"""State of shards in the host's memory has the bits of a step without it. Here without a device, and its copies."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import FlatStepper, TorchOptimizer, create, load_sharded, save_sharded
from everybit_torch.segments import host_state
from everybit_torch.sharded.strategies import Strategy
from everybit_torch.torch_internals.dtensors import with_part
from tests.support.exact_models import Cells, mesh_of, train, weights_of
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
        owned = stepped("muon", models[0], 4, offload="state")
        assert owned.bytes_table()["host"] > 0
        stepped("muon", models[1], 4)
        stepped("muon", models[2], 4, compile=False)
        assert equal(weights_of(models[0]), weights_of(models[2]))
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


def make(name: str) -> Any:
    of = {
        "adamw": eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2)),
        "muon": eb.chain(eb.muon(1e-2), eb.clip_by_global_norm(0.5)),
        "lamb": eb.lamb(1e-2),
    }
    return of[name]


def of_steppers(strategy: Strategy, name: str, policy: PolicyName, shape: tuple[int, ...], folder: str) -> None:
    """One with state on the host steps as one without, and each reads what the other saved."""
    steppers = []
    models = [Cells(torch.float32 if policy == "FP32" else torch.bfloat16) for _ in range(2)]
    options: dict[str, Any] = {"policy": policy, "strategy": strategy, "units": [type(models[0].first)]}
    options |= {"outer": "optim"} if len(shape) == 2 and strategy == "optim_grads_params" else {}
    with patch.object(host_state, "IN_TESTS", True), patch.object(host_state, "LENGTH", 4):
        for model, offload in zip(models, (None, "state"), strict=True):
            steppers.append(FlatStepper(model, make(name), mesh=mesh_of(shape), offload=offload, **options))  # type: ignore[arg-type]
        for step in range(6):
            for stepper, model in zip(steppers, models, strict=True):
                train(stepper, model, range(step, step + 1), 2)
            assert equal(weights_of(models[0]), weights_of(models[1]))
            if step in (1, 3):
                one, other = steppers if step == 1 else reversed(steppers)
                save_sharded(one, f"{folder}/{step}")
                load_sharded(other, f"{folder}/{step}")
        optimizer = steppers[1].as_optimizer()
        assert optimizer.bytes_table()["host"] > 0


@pytest.mark.parametrize(
    ("strategy", "name", "policy", "shape"),
    [
        ("no_shard", "adamw", "LEAN_BF16", (2,)),
        ("optim", "muon", "FLOOR_BF16", (3,)),
        ("optim_grads", "lamb", "LEAN_8BIT", (2,)),
        ("optim_grads", "adamw", "KAHAN_BF16", (2, 2)),
        ("optim_grads_params", "adamw", "LEAN_8BIT", (2,)),
        ("optim_grads_params", "muon", "LEAN_BF16", (3,)),
        ("optim_grads_params", "lamb", "FP32", (2, 2)),
    ],
)
@pytest.mark.sampled(8)
def test_steppers_have_the_bits_of_a_step_without_it(
    strategy: Strategy, name: str, policy: PolicyName, shape: tuple[int, ...], tmp_path: Path
) -> None:
    run(math.prod(shape), of_steppers, strategy, name, policy, shape, str(tmp_path))
