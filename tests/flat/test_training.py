"""Collectives of backends that take lists, as torch documents them, give a model on flat buffers the bits of one process."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import everybit as eb
from everybit_torch.collectives import Communicator
from tests.support.random_programs import Program, alone, on_ranks
from tests.support.ranks import run

PROGRAM = Program(
    seed=3, mesh=(3,), strategy="optim_grads", outer="no_shard", policy="LEAN_BF16", grads=eb.Grads(main="float32"), transform="muon",
    microbatches=1, pattern="microbatch", units=True, nested=False, frozen_step=None,
)  # fmt: skip


def all_gather_as_documented(parts: list[Tensor], own: Tensor, group: Any, async_op: bool) -> Any:
    assert async_op
    assert parts[dist.get_rank(group)].shape == own.shape
    parts[dist.get_rank(group)].copy_(own)
    works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
    for work in works:
        work.wait()
    return works[-1]


def reduce_scatter_as_documented(into: Tensor, parts: list[Tensor], group: Any, async_op: bool) -> Any:
    assert async_op
    assert parts[dist.get_rank(group)].shape == into.shape
    works = [dist.reduce(part, group=group, group_dst=rank, async_op=True) for rank, part in enumerate(parts)]
    for work in works:
        work.wait()
    into.copy_(parts[dist.get_rank(group)])
    return works[-1]


def as_if_over_nccl() -> tuple[Any, int]:
    """Lists of parts, which torch documents, in the place of what is done for gloo."""
    with (
        mock.patch.object(Communicator, "_takes_lists", return_value=True),
        mock.patch.object(Communicator, "_goes_over_gloo", return_value=False),
        mock.patch.object(dist, "all_gather", mock.Mock(side_effect=all_gather_as_documented)) as gathered,
        mock.patch.object(dist, "reduce_scatter", mock.Mock(side_effect=reduce_scatter_as_documented)) as reduced,
    ):
        (found,) = on_ranks([PROGRAM])
        return found, min(gathered.call_count, reduced.call_count)


def test_backends_that_take_lists_are_given_parts_of_different_lengths() -> None:
    weights, norms = alone(PROGRAM)
    for (found, theirs), calls in run(3, as_if_over_nccl):
        assert theirs == norms
        assert [key for key in weights if not torch.equal(found[key], weights[key])] == []
        assert calls >= 3
