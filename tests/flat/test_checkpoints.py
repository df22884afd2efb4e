"""A run that is saved under one strategy and number of ranks goes on under others with the bits of one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import load_sharded, save_sharded
from everybit_torch.sharded.strategies import Strategy
from tests.flat.steppers import flat_stepper
from tests.support.exact_models import Cells, mesh_of, seeds, weights_of
from tests.support.random_programs import TRANSFORMS
from tests.support.ranks import run
from tests.support.weights import Weights

RANKS = 4
"""Whose microbatches are trained on, however many ranks there are: each trains on those of several."""


def part(
    name: str, policy: str, strategy: Strategy, shape: tuple[int, ...], steps: tuple[int, int], folder: str
) -> Weights:
    """Some steps of a run that goes on from a checkpoint if they are not its first, and leaves one."""
    model = Cells(torch.bfloat16)
    size = torch.Size(shape).numel()
    mesh = mesh_of(shape) if size > 1 else None
    stepper = flat_stepper(model, TRANSFORMS[name], policy=eb.policies.PRESETS[policy], strategy=strategy, mesh=mesh)
    if steps[0]:
        load_sharded(stepper, f"{folder}/{steps[0]}")
    rank = torch.distributed.get_rank() if size > 1 else 0
    for step in range(*steps):
        own = range(rank, RANKS, size)
        for number, one in enumerate(own):
            ((seed, uses_some),) = seeds(step, one, 1)
            with stepper.microbatch(last=number == len(own) - 1):
                model(seed, uses_some).backward()
        stepper.step()
    save_sharded(stepper, f"{folder}/{steps[1]}")
    return weights_of(model)


@pytest.mark.parametrize(
    ("name", "policy", "before", "after"),
    [
        ("clipped", "LEAN_BF16", ("optim_grads", (4,)), ("no_shard", (1,))),
        ("clipped", "LEAN_8BIT", ("optim", (2,)), ("optim_grads", (4,))),
        ("lamb", "KAHAN_BF16", ("no_shard", (1,)), ("optim_grads", (2, 2))),
        ("muon", "EXACT_BF16", ("optim_grads", (2, 2)), ("optim", (2,))),
        ("soap", "LEAN_BF16", ("optim", (4,)), ("no_shard", (2,))),
        ("masked", "TIGHT_BF16", ("no_shard", (2,)), ("optim", (4,))),
    ],
)
@pytest.mark.sampled(3)
def test_a_run_goes_on_under_another_strategy(
    name: str, policy: str, before: tuple[Any, Any], after: tuple[Any, Any], tmp_path: Path
) -> None:
    def on(how: tuple[Strategy, tuple[int, ...]], steps: tuple[int, int], folder: Path) -> list[Weights]:
        strategy, shape = how
        found: list[Weights] = run(torch.Size(shape).numel(), part, name, policy, strategy, shape, steps, str(folder))
        return found

    (expected, *_) = on(("no_shard", (1,)), (0, 4), tmp_path / "whole")
    on(before, (0, 2), tmp_path / "cut")
    for weights in on(after, (2, 4), tmp_path / "cut"):
        assert [key for key in expected if not torch.equal(weights[key], expected[key])] == []
