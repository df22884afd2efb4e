"""Gradient release on a model that FSDP2 shards: the bits, norms and metrics of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from everybit_torch import AdamW, enable_gradient_release
from tests.support.exact_models import Cell, Cells, mesh_of, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights

LIMIT = 4.0
"""Below the norm of every gradient, so that each step but the first is clipped."""


def sharded(model: nn.Module, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(shape)
    for module in [one for one in model.modules() if isinstance(one, Cell)][::-1]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def released(shape: tuple[int, ...] | None) -> tuple[Weights, list[float], float]:
    """Weights, norms, and the first gradient's norm as metrics have it. Gradients are whole numbers, and their sums exact."""
    model = Cells(torch.bfloat16)
    if shape is not None:
        sharded(model, shape)
    trained = [(name, p) for name, p in model.named_parameters() if name != "unused"]
    optimizer = AdamW(trained, lr=0.01, policy="LEAN_BF16", metrics=True, compile=False)
    release = enable_gradient_release(model, optimizer, max_norm=LIMIT)
    norms: list[float] = []
    measured = 0.0
    for step in range(4):
        model(step + 1).backward()
        norms.append(float(release.clip_grad_norm_(LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
        assert release.norm is not None
        norms.append(float(release.norm))
        measured = measured or float(optimizer.metrics().gradient_norm)
    return weights_of(model), norms, measured


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (2, 1)])
@pytest.mark.sampled(2)
def test_a_clipped_release_has_the_bits_and_the_norms_of_one_process(shape: tuple[int, ...]) -> None:
    weights, norms, measured = released(None)
    assert min(norms) > LIMIT
    for found, theirs, theirs_measured in run(torch.Size(shape).numel(), released, shape):
        assert (theirs, theirs_measured) == (norms, measured)
        assert [name for name in weights if not torch.equal(found[name], weights[name])] == []


def with_blocks() -> None:
    model: Any = nn.Linear(30, 17, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh_of((2,)))
    optimizer = AdamW(model.parameters(), policy="LEAN_8BIT")
    with pytest.raises(ValueError, match=r"optimizer: its policy keeps one number for a block of elements, and ranks"):
        enable_gradient_release(model, optimizer)


def test_blocks_that_ranks_hold_in_parts_are_refused() -> None:
    run(2, with_blocks)
