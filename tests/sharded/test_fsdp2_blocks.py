"""Formats with one number for a block of elements on parameters that FSDP2 shards: the bits of one process, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import everybit as eb
from everybit_torch import AdamW, TorchOptimizer, nonfinite_state
from everybit_torch.checkpoint.sharded import load_sharded_into, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.torch_internals.dtensors import local
from tests.support.ranks import run

Shapes = tuple[tuple[int, ...], ...]

EIGHT = eb.Policy(
    params=eb.Split(8, rounding="stochastic"),
    momentum=eb.Blockwise("float", block=32),
    variance=eb.Blockwise("dynamic", block=32, scale="bfloat16"),
)
FOUR = eb.Policy(params=eb.Split(8), momentum=eb.Blockwise("linear", 4, 32), variance=eb.Blockwise("float", 4, 32))
"""gloo, over which ``full_tensor`` goes, has no int16."""

# On two and on three ranks: equal shares, a shorter last one, one that ends inside a block, none for all ranks but the first, a vector.
UNEVEN: Shapes = ((8, 64), (7, 32), (11, 16), (1, 32), (192,))
EVEN: Shapes = ((8, 64), (4, 96), (128,))


class Model(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.values = nn.ParameterList(
            torch.sin(torch.arange(torch.Size(shape).numel()) + 1.0).view(shape) for shape in shapes
        )
        self.to(torch.bfloat16)


def sharded(shapes: Shapes, mesh: tuple[int, ...] | None = None) -> Model:
    module = Model(shapes)
    names = ("replicate", "shard") if mesh else ("shard",)
    fully_shard(module, mesh=init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names))
    return module


def train(module: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for number, p in enumerate(module.values):
            gradient = torch.cos(torch.arange(p.numel()) * (number + 1.5) + step).view(p.shape).bfloat16()
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient
        optimizer.step()


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def stored(module: Model, optimizer: TorchOptimizer) -> list[dict[str, Tensor]]:
    """The weights and the state of each parameter, whole."""
    state = optimizer.state_dict()["state"]
    return [
        {"weights": full(p).detach().clone()} | {name: full(x) for name, x in state[number].items()}
        for number, p in enumerate(module.values)
    ]


def made(module: Model, policy: eb.Policy, compile: bool = False) -> TorchOptimizer:
    return AdamW(module.named_parameters(), lr=0.01, betas=(0.9, 0.95), policy=policy, compile=compile)


def plain(shapes: Shapes, policy: eb.Policy, steps: int) -> list[dict[str, Tensor]]:
    module = Model(shapes)
    optimizer = made(module, policy)
    train(module, optimizer, range(steps))
    return stored(module, optimizer)


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def fsdp2(
    shapes: Shapes,
    policy: eb.Policy,
    folder: Path | None = None,
    mesh: tuple[int, ...] | None = None,
    compile: bool = False,
) -> list[dict[str, Tensor]]:
    """Train; save; take what is stored through a whole state dict, to another optimizer."""
    module = sharded(shapes, mesh)
    optimizer = made(module, policy, compile)
    train(module, optimizer, range(3))
    assert isinstance(optimizer.state_dict()["state"][0]["momentum.scale"], DTensor)
    if folder is not None:
        weights, saved = get_state_dict(module, optimizer)
        save({"model": weights, "optimizer": saved}, checkpoint_id=folder)
        whole = get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
        again = made(module, policy)
        again.zero_grad()  # else torch takes its state for settled
        set_optimizer_state_dict(module, again, whole, options=StateDictOptions(full_state_dict=True))
        assert same(stored(module, again), stored(module, optimizer))
    return stored(module, optimizer)


def resumed(shapes: Shapes, policy: eb.Policy, folder: Path) -> list[dict[str, Tensor]]:
    module = sharded(shapes) if dist.is_initialized() else Model(shapes)
    optimizer = made(module, policy)
    load_sharded_into(module, optimizer, folder)
    train(module, optimizer, range(3, 5))
    return stored(module, optimizer)


@pytest.mark.parametrize(("shapes", "policy"), [(UNEVEN, EIGHT), (EVEN, FOUR)], ids=["8 bits", "4 bits"])
def test_whole_blocks_on_every_rank_give_one_processes_bits_and_checkpoints_go_on_anywhere(
    shapes: Shapes, policy: eb.Policy, tmp_path: Path
) -> None:
    expected, later = plain(shapes, policy, 3), plain(shapes, policy, 5)
    assert all(same(found, expected) for found in run(2, fsdp2, shapes, policy, tmp_path))
    if policy is EIGHT:
        assert all(same(found, later) for found in run(3, resumed, shapes, policy, tmp_path))
    with pytest.warns(UserWarning, match="has no checksums"):
        assert same(resumed(shapes, policy, tmp_path), later)


def test_a_checkpoint_of_one_process_goes_on_in_fsdp2(tmp_path: Path) -> None:
    module = Model(UNEVEN)
    stepper = FlatStepper(module, eb.adamw(0.01, b1=0.9, b2=0.95, weight_decay=0.01), policy=EIGHT)
    for step in range(3):
        with stepper.microbatch(last=True):
            products = [
                (p * torch.cos(torch.arange(p.numel()) * (number + 1.5) + step).view(p.shape).bfloat16()).sum()
                for number, p in enumerate(module.values)
            ]
            torch.stack(products).sum().backward()  # type: ignore[no-untyped-call]
        stepper.step()
    save_sharded(stepper, tmp_path).result()
    later = plain(UNEVEN, EIGHT, 5)
    assert all(same(found, later) for found in run(2, resumed, UNEVEN, EIGHT, tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "mesh", "compile"), [(4, (2, 2), False), (3, None, False), (2, None, True)])
def test_on_other_meshes_and_compiled(size: int, mesh: tuple[int, ...] | None, compile: bool) -> None:
    expected = plain(UNEVEN, EIGHT, 3)
    assert all(same(found, expected) for found in run(size, fsdp2, UNEVEN, EIGHT, None, mesh, compile))


def refusals() -> list[tuple[str, str, int]]:
    """Shards that are no rows; and what is told of a number that is not finite."""
    columns = nn.Linear(64, 8, bias=False)
    fully_shard(columns, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: Shard(1))
    columns.weight.grad = torch.zeros_like(columns.weight)
    with pytest.raises(ValueError, match=r"weight: a parameter of shape \(8, 64\) has the placements \(Shard\(dim=1\)"):
        AdamW(columns.named_parameters(), policy=eb.Policy(momentum=eb.Blockwise())).step()
    module = sharded(EVEN)
    spoiled = made(module, EIGHT)
    if dist.get_rank() == 1:
        local(module.values[1]).detach()[1, 3] = torch.inf  # row 3
    train(module, spoiled, range(2))
    return [(one.name, one.entry, one.count) for one in nonfinite_state(spoiled)]


def test_shards_that_are_no_rows_are_refused_and_infinities_are_reported() -> None:
    for told in run(2, refusals):
        assert told[0][:2] == ("values.1", "param")


CUT: Shapes = ((8, 64), (6, 80), (9,), (7, 512))


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_whose_blocks_a_shards_edge_cuts_visit_and_keep_the_bits(size: int) -> None:
    policy = eb.Policy(momentum=eb.Blockwise("float", block=256), variance=eb.Blockwise("float", block=32))
    expected = plain(CUT, policy, 3)
    assert all(same(found, expected) for found in run(size, fsdp2, CUT, policy, None, None, False))


MATRICES: Shapes = ((8, 64), (7, 32), (192,))
MUON = eb.Policy(
    params=eb.Split(8, rounding="stochastic"),
    momentum=eb.Blockwise("linear", block=32),
    variance=eb.Blockwise("float", block=32),
)


def muon(module: Model, *, steps: int) -> list[dict[str, Tensor]]:
    optimizer = TorchOptimizer(module.named_parameters(), eb.muon, lr=0.01, policy=MUON, compile=False)
    train(module, optimizer, range(steps))
    return stored(module, optimizer)


def sharded_muon() -> list[dict[str, Tensor]]:
    return muon(sharded(MATRICES), steps=3)


def test_momentum_of_muon_is_stored_in_blocks_where_its_rows_are() -> None:
    expected = muon(Model(MATRICES), steps=3)
    assert expected[0]["momentum"].dtype == torch.int8
    for found in run(2, sharded_muon):
        assert same(found, expected)
