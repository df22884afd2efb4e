"""An optimizer of parameters that FSDP2 shards has the bits of one process, whatever happens to it between steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import everybit as eb
from tests.support.exact_models import mesh_of
from tests.support.random_lives import Life, maker, sharded_life
from tests.support.ranks import run
from tests.support.weights import Weights, equal

TOGETHER = 24
"""Lives that the same processes carry out one after the other."""

GROUPS = 12
"""Of these `make test` has the first, and `make exhaustive` all."""

POLICIES: tuple[eb.PolicyName, ...] = (
    "FP32", "LEAN_BF16", "KAHAN_BF16", "EXACT_BF16", "FLOOR_BF16", "TIGHT_BF16", "MIXED_BF16", "LEAN_8BIT",
)  # fmt: skip


def kind_of(seed: int) -> tuple[Any, torch.dtype, str]:
    draw = random.Random(seed)
    name, policy, clips = draw.choice([*eb.optimizers()]), draw.choice(POLICIES), draw.random() < 0.25
    return maker(name, policy, clips), torch.float32 if policy == "FP32" else torch.bfloat16, f"{name} {policy} {clips}"


def is_refused(seed: int) -> bool:
    """Whether an optimizer cannot step such a model."""
    make, dtype, _ = kind_of(seed)
    try:
        model = Life.begin(seed, lambda groups: groups, dtype, sharded=True).model
        make([{"params": [*model.named_parameters()]}]).prepare()
    except (TypeError, ValueError):
        return True
    return False


def on_ranks(seeds: list[int], shape: tuple[int, ...]) -> list[list[tuple[str, Weights]]]:
    mesh = mesh_of(shape)
    return [sharded_life(seed, *kind_of(seed)[:2], mesh) for seed in seeds]


@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient any more")
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group == 0 else pytest.mark.exhaustive) for group in range(GROUPS)]
)
@pytest.mark.sampled(3)
def test_it_has_the_bits_of_one_process(group: int, shape: tuple[int, ...]) -> None:
    seeds = [seed for seed in range(group * TOGETHER, (group + 1) * TOGETHER) if not is_refused(seed)]
    assert len(seeds) > TOGETHER // 2
    holds(seeds, shape)


def test_lives_that_once_failed() -> None:
    """Factors of a matrix without elements, in a state dict in full precision."""
    holds([9000543], (2,))


def holds(seeds: list[int], shape: tuple[int, ...]) -> None:
    expected = [sharded_life(seed, *kind_of(seed)[:2], None) for seed in seeds]
    for each in run(torch.Size(shape).numel(), on_ranks, seeds, shape, timeout=60, limit=500.0):
        for seed, found, right in zip(seeds, each, expected, strict=True):
            happened = [event for event, _ in right]
            for (_, weights), (_, others) in zip(found, right, strict=True):
                assert equal(nan_as_zero(weights), nan_as_zero(others)), (seed, kind_of(seed)[2], happened)


def nan_as_zero(weights: Weights) -> Weights:
    return {name: x.nan_to_num() for name, x in weights.items()}
