"""The bytes that one rank sends in a step, if collectives are rings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from everybit_torch.collectives.reduction import Wire
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.report import Ranks
from everybit_torch.sharded.strategies import Sharding

AGREED = 4
"""Numbers beside one for each parameter in which ranks agree on a step."""

COMPARED = 5
"""Numbers in which ranks compare their ways through the units in a backward pass, where parameters are sharded."""


def agreed_bytes(groups: list[GroupPlan]) -> int:
    """Bytes of the numbers in which ranks agree on a step: who has gradients, and what they are like."""
    return (sum(len(one.group.placements) for one in groups) + AGREED) * torch.float64.itemsize


def sent_by_collective(
    groups: list[GroupPlan], kind: Sharding, ranks: Ranks, microbatches: int, reshard: bool, reductions: Sequence[int]
) -> dict[str, int]:
    """Bytes that one rank sends in a step, by collective.

    Args:
        groups: Of the layout.
        kind: What is sharded.
        ranks: How many there are.
        microbatches: Backward passes in the step.
        reshard: Whether weights are gathered again for the backward pass.
        reductions: How many float64 numbers each reduction has that the transforms ask for.
    """
    sent: Counter[str] = Counter()

    def all_reduce(nbytes: int, size: int) -> None:
        sent["all_reduce"] += 2 * (size - 1) * nbytes // size

    def exchange(kind: str, nbytes: int, size: int) -> None:
        sent[kind] += (size - 1) * nbytes // size

    def reduce(nbytes: int, main: int, wire: Wire, size: int, *, whole: bool) -> None:
        if wire.exact:
            exchange("all_to_all", nbytes, size)
            if whole:
                exchange("all_gather", main, size)
        elif whole:
            all_reduce(nbytes, size)
        else:
            exchange("reduce_scatter", nbytes, size)

    for one in groups:
        if kind.params:
            passes = microbatches * (2 if reshard and one.group.unit > 0 else 1)
            for _ in range(passes):
                exchange("all_gather", one.weights, ranks.inner)
        if one.resolved is None:
            continue
        for _ in range(microbatches if kind.grads else 1):
            reduce(one.bucket, one.group.padded * one.main.itemsize, one.wire, ranks.inner, whole=not kind.state)
        if ranks.outer > 1:
            reduced = one.group.padded // (ranks.inner if kind.state else 1)
            wire = one.outer_wire
            reduce(
                reduced * wire.dtype.itemsize,
                reduced * one.main.itemsize,
                wire,
                ranks.outer,
                whole=kind.outer != "optim",
            )
        if kind.outer == "optim":
            exchange("all_gather", one.weights // ranks.inner, ranks.outer)
        elif kind.state and not kind.params:
            exchange("all_gather", one.weights, ranks.inner)
    for size in (ranks.inner, ranks.outer):
        all_reduce(agreed_bytes(groups), size)
        for _ in range(microbatches if kind.params else 0):
            all_reduce(COMPARED * torch.int64.itemsize, size)
    if kind.state:
        for size in (ranks.inner, ranks.outer) if kind.outer == "optim" else (ranks.inner,):
            for numbers in reductions:
                all_reduce(numbers * torch.float64.itemsize, size)
    return {name: size for name, size in sent.items() if size}
