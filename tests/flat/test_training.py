"""A model on flat buffers trains as torch's loop in one process does, bit for bit, wherever sums of gradients are exact."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.flat.judging import judge
from everybit_torch.flat.stepper import BufferStepper
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import Cell, Cells, Pattern, mesh_of, seeds, train, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights

STRATEGIES: list[Strategy] = ["no_shard", "optim", "optim_grads"]
SHAPES = [(1,), (2,), (3,), (4,), (2, 2)]
PATTERNS: list[tuple[int, Pattern]] = [(1, "microbatch"), (3, "microbatch"), (3, "no_sync"), (3, "neither")]
POLICIES = ["FP32", "KAHAN_BF16", "EXACT_BF16", "LEAN_BF16", "TIGHT_BF16", "FLOOR_BF16", "MIXED_BF16", "LEAN_8BIT"]
TRANSFORMS: dict[str, eb.Transform[Any]] = {
    "clipped": eb.chain(eb.clip_by_global_norm(4.0), eb.adamw(0.03, weight_decay=0.1)),
    "lamb": eb.chain(eb.clip_by_global_norm(4.0), eb.lamb(0.03), eb.clip_by_global_norm(0.01)),
    "muon": eb.chain(eb.clip_by_global_norm(4.0), eb.muon(0.03)),
    "soap": eb.soap(0.03),
    "masked": eb.chain(eb.masked(eb.clip_by_global_norm(1.0), lambda _, p: p.ndim > 1), eb.sgd(0.03, momentum=0.9)),
}


def dtype_of(policy: str) -> torch.dtype:
    return torch.float32 if policy == "FP32" else torch.bfloat16


def stepper_of(model: Cells, transform: eb.Transform[Any], strategy: Strategy, **others: Any) -> BufferStepper:
    options = StepperOptions(strategy=strategy, units=[Cell], **{"divisor": 1.0} | others)
    return BufferStepper(model, judge(model, transform, options))


def on_ranks(name: str, policy: str, strategy: Strategy, shape: tuple[int, ...], number: int, pattern: Pattern) -> Any:
    model = Cells(dtype_of(policy))
    mesh = mesh_of(shape) if torch.Size(shape).numel() > 1 else None
    stepper = stepper_of(model, TRANSFORMS[name], strategy, policy=eb.policies.PRESETS[policy], mesh=mesh)
    norms = train(stepper, model, range(3), number, pattern)
    return weights_of(model), norms


def alone(name: str, policy: str, ranks: int, number: int) -> tuple[Weights, list[float]]:
    """torch's loop over the microbatches of all ranks, in float32 gradients."""
    model = Cells(dtype_of(policy))
    optimizer = TorchOptimizer(
        model.named_parameters(), lambda: TRANSFORMS[name], policy=eb.policies.PRESETS[policy], compile=False
    )
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(ranks):
            for seed, uses_some in seeds(step, rank, number):
                model(seed, uses_some).backward()
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()))
        optimizer.step()
    return weights_of(model), norms


def cases() -> Iterator[Any]:
    """All of them; `make test` has each policy under each strategy and mesh, and each of these in each pattern."""
    axes: list[list[Any]] = [list(TRANSFORMS), POLICIES, STRATEGIES, SHAPES, PATTERNS]
    for zero, one, two, three, four in product(*(range(len(x)) for x in axes)):
        chosen = zero == (one + two + three) % len(TRANSFORMS) and four == (one + 2 * two + 3 * three) % len(PATTERNS)
        marks = () if chosen else pytest.mark.exhaustive
        name, policy, strategy, shape, pattern = (
            axis[n] for axis, n in zip(axes, (zero, one, two, three, four), strict=True)
        )
        yield pytest.param(name, policy, strategy, shape, *pattern, marks=marks)


@pytest.mark.parametrize(("name", "policy", "strategy", "shape", "number", "pattern"), list(cases()))
def test_bits_of_one_process(
    name: str, policy: str, strategy: Strategy, shape: tuple[int, ...], number: int, pattern: Pattern
) -> None:
    ranks = torch.Size(shape).numel()
    weights, norms = alone(name, policy, ranks, number)
    for found, theirs in run(ranks, on_ranks, name, policy, strategy, shape, number, pattern):
        assert theirs == norms
        assert [key for key in weights if not torch.equal(found[key], weights[key])] == []


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
        found = on_ranks("muon", "LEAN_BF16", "optim_grads", (3,), 1, "microbatch")
        return found, min(gathered.call_count, reduced.call_count)


def test_backends_that_take_lists_are_given_parts_of_different_lengths() -> None:
    weights, norms = alone("muon", "LEAN_BF16", 3, 1)
    for (found, theirs), calls in run(3, as_if_over_nccl):
        assert theirs == norms
        assert [key for key in weights if not torch.equal(found[key], weights[key])] == []
        assert calls >= 3
