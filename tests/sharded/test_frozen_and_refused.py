"""A stage of a pipeline that is frozen as a whole is never stepped; policies that cannot work are refused when things are made."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer, load_sharded, save_sharded
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from everybit_torch.torch_internals.dtensors import is_dtensor
from tests.support.ranks import run


def frozen(strategy: Strategy) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    transform = eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3))
    stepper = FlatStepper(model, transform, strategy=strategy, nan="param")
    schedule = torch.optim.lr_scheduler.LambdaLR(stepper.as_optimizer(), lambda step: 1 / (1 + step))
    found, inputs = [], torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        with stepper.microbatch(last=True):
            model(inputs).sum().backward()
        report = stepper.step()
        schedule.step()
        found.append(f"{report.skipped} {report.nonfinite} {report.untouched} {float(report.grad_norm)}")
    place: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(place)
    save_sharded(stepper, place[0])
    load_sharded(stepper, place[0])
    now = [p.full_tensor() if is_dtensor(p) else p for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    assert inputs.grad is not None
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_is_frozen_as_a_whole_passes_gradients_on_and_is_not_stepped(strategy: Strategy) -> None:
    assert run(2, frozen, strategy) == [["False () () 0.0"] * 2] * 2


def cut_twice(name: str) -> tuple[str, bool]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    mesh, policy = init_device_mesh("cpu", (2, 2)), eb.policies.PRESETS[name]
    try:
        FlatStepper(model, eb.adamw(1e-3), policy=policy, mesh=mesh, strategy="optim_grads_params", outer="optim")
    except ValueError as error:
        return str(error), any(map(is_dtensor, model.parameters()))
    return "", True


@pytest.mark.parametrize("name", ["LEAN_8BIT", "LEAN_4BIT"])
def test_blocks_that_two_dimensions_of_a_mesh_would_cut_are_refused_before_the_model_is_sharded(name: str) -> None:
    for said, changed in run(4, cut_twice, name):
        assert said.startswith("outer: got 'optim', and 0.weight is stored with a number for each block")
        assert not changed


@pytest.mark.parametrize("factory", [eb.adafactor, eb.came])
def test_factors_in_four_bits_are_refused_when_an_optimizer_or_a_stepper_is_made(factory: Any) -> None:
    model = nn.Sequential(nn.Linear(256, 256)).bfloat16()
    with pytest.raises(
        ValueError, match=r"param group 0, parameter '0.weight': state.variance\[0\]: got .*bits=4.* for factors"
    ):
        TorchOptimizer(model.named_parameters(), factory, lr=1e-3, policy="LEAN_4BIT")
    with pytest.raises(ValueError, match=r"state.variance\[0\]: got .*bits=4.* for factors"):
        FlatStepper(model, factory(1e-3), policy="LEAN_4BIT")
    vectors = nn.LayerNorm(256).bfloat16()  # which have no factors
    TorchOptimizer(vectors.named_parameters(), factory, lr=1e-3, policy="LEAN_4BIT")
