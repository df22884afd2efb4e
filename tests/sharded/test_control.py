"""A cycle that its user directs: gradients that are summed over the ranks once, with the bits of strategies that always do so."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import Block, data, network, on_a_mesh, train, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

WIRES: list[tuple[eb.Policy | None, torch.dtype]] = [
    (None, torch.float32),
    (eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float32", comm="bfloat16", reduce="fp32")), torch.bfloat16),
    (eb.Policy(params=eb.Kahan(), grads=eb.Grads(main="float16", comm="float16")), torch.bfloat16),
]
CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))


# -- reduction deferred to the last backward pass ------------------------------------------------------------------------------------


def deferred(patterns: list[str], microbatches: list[int], mesh: Any = None) -> list[tuple[Any, ...]]:
    """The cases in which a sharded gradient whose reduction is deferred is not the one that is kept whole on every rank."""
    wrong: list[tuple[Any, ...]] = []
    for (number, (policy, dtype)), pattern, count in itertools.product(enumerate(WIRES), patterns, microbatches):
        arguments: dict[str, Any] = {"microbatches": count, "dtype": dtype, "pattern": pattern, "mesh": mesh}
        expected, norms = train("optim", policy, CLIPPED, **arguments)
        for strategy, keep in (("optim_grads", False), ("optim_grads_params", True)):
            weights, found = train(
                strategy, policy, CLIPPED, defer_reduction=True, keep_gradients=keep, **arguments  # type: ignore[arg-type]
            )  # fmt: skip
            if found != pytest.approx(norms, rel=1e-12) or not equal(weights, expected):
                wrong.append((number, pattern, count, strategy))
    return wrong


def test_gradients_whose_reduction_is_deferred_are_those_of_optim() -> None:
    """Added up in the main gradient's dtype on each rank, sent once, and divided once: the same sums, bit for bit."""
    for size, patterns in ((2, ["microbatch", "no_sync", "neither"]), (3, ["microbatch"])):
        for wrong in run(size, deferred, patterns, [1, 3] if size == 2 else [2]):
            assert not wrong


def test_deferred_reductions_on_a_mesh() -> None:
    for wrong in run(4, on_a_mesh, deferred, 2, 2, ["microbatch"], [2]):
        assert not wrong
