"""``destroy_process_group()`` ends every process group, also while steppers over it are alive."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everybit as eb
from everybit_torch import FlatStepper, save_sharded
from everybit_torch.sharded.strategies import Strategy
from tests.support.ranks import run


def train(folder: Path, strategy: Strategy) -> tuple[int, str]:
    """Return how many groups were left, and what a step after that says."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stepper = FlatStepper(model, eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3)), strategy=strategy)
    for _ in range(2):
        with stepper.microbatch(last=True):
            model(torch.ones(2, 4)).sum().backward()
        stepper.step()
    save_sharded(stepper, folder, asynchronous=True).result(60)
    alive = [weakref.ref(one) for one in dist.distributed_c10d._world.pg_map]
    assert len(alive) >= 2  # the world, and that of saves
    dist.destroy_process_group()
    gc.collect()
    left = len({id(one()) for one in alive if one() is not None})
    try:
        with stepper.microbatch(last=True):
            model(torch.ones(2, 4)).sum().backward()
        stepper.step()
    except RuntimeError as error:
        return left, str(error)
    return left, "no error"


def alone(folder: str, strategy: Strategy) -> tuple[int, str]:
    """The same in a world of its own, which the test's next program does not need."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    return train(Path(folder) / "checkpoints", strategy)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_no_group_outlives_its_destruction_and_a_step_after_it_says_so(strategy: Strategy) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for left, said in run(2, alone, os.path.realpath(folder), strategy):
            assert left == 0
            assert "was destroyed (destroy_process_group)" in said
