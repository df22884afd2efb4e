"""Ranks name the changes of their own shards: together those of one process, so that a receiver's copy stays equal bit for bit."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import FlatStepper, TorchOptimizer, create, load_sharded, save_sharded
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import Cells, mesh_of, train, weights_of
from tests.support.ranks import run
from tests.support.receiver import Receiver, as_exported, changed
from tests.support.small_models import Awkward

Found = tuple[dict[str, list[int]], dict[str, list[float]], tuple[str, ...]]
"""The indices and values that a rank names, and the parameters that are named whole."""


def taken(source: TorchOptimizer | FlatStepper) -> Found:
    changes = source.take_changed()
    rows = [(name, indices.tolist(), values.tolist()) for name, indices, values in changes]
    return {name: i for name, i, _ in rows}, {name: v for name, _, v in rows}, changes.whole


def sent(ranks: list[Found]) -> list[tuple[str, Tensor, Tensor]]:
    """The changes of all ranks as those of one process. Ranks with copies name the same; nobody names an element otherwise."""
    together: dict[str, dict[int, float]] = {}
    for indices, values, _ in ranks:
        for name, where in indices.items():
            own = together.setdefault(name, {})
            for index, value in zip(where, values[name], strict=True):
                assert own.setdefault(index, value) == value
    return [
        (name, torch.tensor(sorted(own)), torch.tensor([own[i] for i in sorted(own)], dtype=torch.bfloat16))
        for name, own in together.items()
    ]


# -- FSDP2's parameters --------------------------------------------------------------------------------------------------------------


def give(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        placed: Any = parameter
        parameter.grad = distribute_tensor(gradient, placed.device_mesh, placed.placements)


def on_rows(name: Literal["adamw", "muon", "soap"], policy: PolicyName, mesh: tuple[int, ...], dim: int) -> list[Any]:
    model = Awkward(torch.float32 if policy == "FP32" else torch.bfloat16)
    del model.scalar
    cut = mesh_of(mesh)
    ranks = mesh[-1]
    fully_shard(
        model, mesh=cut, shard_placement_fn=lambda p: Shard(dim if p.ndim > dim and p.shape[dim] % ranks == 0 else 0)
    )
    optimizer = create(name, model, lr=1e-2, policy=policy, watch="bfloat16")
    found = [(taken(optimizer), weights_of(model))]
    for step in range(6):
        give(model, step)
        optimizer.step()
        if step != 3:
            found.append((taken(optimizer), weights_of(model)))
    return found


@pytest.mark.parametrize(
    ("name", "policy", "mesh", "dim"),
    [
        ("adamw", "LEAN_BF16", (1,), 0),
        ("adamw", "FP32", (3,), 0),
        ("adamw", "EXACT_BF16", (2,), 1),
        ("adamw", "FLOOR_BF16", (2, 2), 0),
        ("muon", "LEAN_BF16", (3,), 0),
        ("soap", "FP32", (2,), 0),
        ("adamw", "LEAN_8BIT", (2,), 0),
    ],
)
def test_ranks_of_fsdp2_name_their_rows(name: str, policy: PolicyName, mesh: tuple[int, ...], dim: int) -> None:
    ranks = run(torch.Size(mesh).numel(), on_rows, name, policy, mesh, dim)
    receiver = before = None
    for number, moment in enumerate(zip(*ranks, strict=True)):
        founds, weights = [found for found, _ in moment], moment[0][1]
        now = as_exported(weights, torch.bfloat16)
        receiver = receiver or Receiver(weights, torch.bfloat16)
        names = receiver.take(sent(founds))
        assert receiver.has(now)
        assert {len(one[2]) for one in founds} == {0 if number else len(weights)}
        if before is not None:
            exact = changed(before, now)
            assert all({*where.tolist()} <= {*names[one].tolist()} for one, where in exact.items())
            assert number == 4 or all(len(names[one]) == len(where) for one, where in exact.items())
        before = now


# -- steppers ------------------------------------------------------------------------------------------------------------------------


def of_stepper(strategy: Strategy, outer: bool, policy: PolicyName, folder: str) -> list[Any]:
    model = Cells(torch.float32 if policy == "FP32" else torch.bfloat16)
    mesh = mesh_of((2, dist.get_world_size() // 2) if outer else (dist.get_world_size(),))
    options: dict[str, Any] = {"outer": "optim"} if outer and strategy == "optim_grads_params" else {}
    stepper = FlatStepper(
        model, eb.adamw(1e-2), policy=policy, strategy=strategy, mesh=mesh, units=[type(model.first)], watch="bfloat16",
        **options,
    )  # fmt: skip
    trained = [name for name, p in model.named_parameters() if p.requires_grad]

    def now() -> tuple[Found, dict[str, Tensor]]:
        found = taken(stepper)
        return found, {name: x for name, x in weights_of(model).items() if name in trained}

    found = [now()]
    for step in range(5):
        train(stepper, model, range(step, step + 1), 2)
        if step != 2:
            found.append(now())
        if step == 3:
            save_sharded(stepper, folder)
    load_sharded(stepper, folder)
    found.append(now())
    plan = stepper.plan()
    assert plan.persistent["changed"] == stepper.as_optimizer().bytes_table()["changed"]
    stepper.close()
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "outer", "policy"),
    [
        ("no_shard", 2, False, "LEAN_BF16"),
        ("optim", 3, False, "FLOOR_BF16"),
        ("optim_grads", 2, False, "FP32"),
        ("optim_grads", 4, True, "LEAN_BF16"),
        ("optim_grads_params", 3, False, "LEAN_BF16"),
        ("optim_grads_params", 4, True, "KAHAN_BF16"),
    ],
)
@pytest.mark.sampled(3)
def test_ranks_of_a_stepper_name_their_shares(
    strategy: Strategy, ranks: int, outer: bool, policy: PolicyName, tmp_path: Any
) -> None:
    moments = list(zip(*run(ranks, of_stepper, strategy, outer, policy, str(tmp_path)), strict=True))
    receiver = Receiver(moments[0][0][1], torch.bfloat16)
    for number, moment in enumerate(moments):
        founds, weights = [found for found, _ in moment], moment[0][1]
        receiver.take(sent(founds))
        assert receiver.has(as_exported(weights, torch.bfloat16))
        is_whole = number in (0, len(moments) - 1)
        assert all(bool(one[2]) is is_whole for one in founds)
        assert is_whole or sum(len(i) for one in founds for i in one[0].values()) > 0


def test_a_stepper_without_a_watch_refuses() -> None:
    stepper = FlatStepper(nn.Linear(2, 2), eb.adamw(1e-3), strategy="no_shard")
    with pytest.raises(RuntimeError, match="take_changed: changes are not noted"):
        stepper.take_changed()
    stepper.close()
