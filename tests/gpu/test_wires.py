"""Collectives over NCCL in a group of one, the exact wire among them: dtypes that NCCL takes, and sums that are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import everybit as eb
from everybit.testing.examples import assert_same_bits
from everybit_torch import ExactReduceScatter, FlatStepper
from tests.support.devices import require_device, some
from tests.support.exact_models import whole_of

pytestmark = pytest.mark.cuda
require_device()

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_collectives_that_are_used_take_every_dtype(dtype: torch.dtype, group: torch.device) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(group, dtype)
    for call in (dist.all_to_all_single, dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
        into = torch.zeros_like(x)
        work: Any = call(into, x.clone(), async_op=True)
        work.wait()
        assert_same_bits(into, x, f"{call.__name__} of one rank")
    summed = x.clone()
    dist.all_reduce(summed)
    dist.broadcast(summed, src=0)
    assert_same_bits(summed, x, "all_reduce of one rank")


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_exact_wire_rounds_once(wire: Any, op: str, group: torch.device) -> None:
    exact = ExactReduceScatter(wire)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(group)
    into = torch.zeros_like(x)
    exact(into, x.clone(), dist.group.WORLD, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.AVG)  # type: ignore[arg-type]
    assert_same_bits(into, x.to(getattr(torch, wire)).float(), "sum of one")


def test_fsdp_takes_the_exact_wire(group: torch.device) -> None:
    """Its gradients are then those that one rounding to bfloat16 makes."""
    mesh = init_device_mesh(group.type, (1,))

    def gradients(*, exact: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(group)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        if exact:
            assert isinstance(model, FSDPModule)
            model.set_custom_reduce_scatter(ExactReduceScatter("bfloat16"))
            model.set_force_sum_reduction_for_comms(True)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(group)
        model(x).square().mean().backward()
        found: list[Any] = [p.grad for p in model.parameters()]
        return [grad.to_local().clone() for grad in found]

    got = gradients(exact=True)
    plain = gradients(exact=False)
    rounded = [grad.bfloat16().float() for grad in plain]
    # A world of one may be sent nothing: then nothing is rounded either.
    assert all(torch.equal(a, b) for a, b in zip(got, rounded, strict=True)) or all(
        torch.equal(a, b) for a, b in zip(got, plain, strict=True)
    )


@pytest.mark.parametrize("policy", some(["LEAN_BF16", "FLOOR_BF16", "MIXED_BF16"]))
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_stepper_in_a_group_of_one_is_one_alone(policy: str, strategy: Any, group: torch.device) -> None:
    found = []
    for mesh in (None, dist.new_group([0])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16().to(group)
        grads = eb.Grads(main="float32", comm="bfloat16", reduce="float32")
        stored = eb.Policy(
            params=eb.policies.PRESETS[policy].params, momentum=eb.Nearest("float32"), variance=eb.Nearest("float32"), grads=grads
        )  # fmt: skip
        stepper = FlatStepper(model, eb.adamw(0.01), policy=stored, strategy=strategy, units=[nn.Linear], mesh=mesh)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).bfloat16().to(group)
            for last in (False, True):
                with stepper.microbatch(last=last):
                    model(x).float().square().mean().backward()
            stepper.step()
        found.append([whole_of(p).clone() for p in model.parameters()])
        stepper.close()
    assert_same_bits(found[1], found[0], "in a group of one, against alone")
