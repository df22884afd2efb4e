"""The temporary bytes of a step: of finding the norm, and of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import everybit as eb
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.reductions import reductions_of
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.sharded.squares import scratch_bytes
from everybit_torch.stepping import PIECE, step_in_place

SMALLEST = 64
"""Transient tensors of fewer bytes are not counted."""


def step_peak(groups: list[GroupPlan], labelled: Mapping[str, LabelledTransform], compile: bool, piece: int) -> int:
    """Return the peak temporary bytes of stepping one piece, over all runs."""
    peak = 0
    known: dict[tuple[str, torch.dtype, int], int] = {}
    for one in groups:
        if one.resolved is None or compile:
            continue
        for numel in one.runs(labelled):
            block = one.resolved.policy.block
            size = min(numel, max(piece // block, 1) * block)
            key = (one.group.label, one.group.dtype, size)
            if size and key not in known:
                known[key] = _piece_bytes(one, labelled, size)
            peak = max(peak, known.get(key, 0))
    return peak


def norm_peak(groups: list[GroupPlan], agreed: int, device: torch.device) -> int:
    """What finding the norm of the gradient takes: the ``agreed`` bytes on which ranks agree, and what gradients are widened in."""
    trained = [one for one in groups if one.resolved is not None and one.counts]
    trained = [one for one in trained if one.squares_as_written(device) is None]
    scratch = max((scratch_bytes(one.stepped, one.main, device) for one in trained), default=0)
    return sum(size for size in (agreed, scratch) if size >= SMALLEST)


def _piece_bytes(one: GroupPlan, labelled: Mapping[str, LabelledTransform], size: int) -> int:
    assert one.resolved is not None
    block = one.resolved.policy.block
    known = max(PIECE // block, 1) * block
    if size > known:
        # What is computed on the way grows with the piece, element by element.
        return _piece_bytes(one, labelled, known) * size // known
    transform, policy = labelled[one.group.label].transform, labelled[one.group.label].policy
    optimizer = eb.Optimizer(transform, policy)
    tensor = torch.zeros(size, dtype=one.group.dtype)
    state = optimizer.init([tensor])
    gradient = torch.zeros(size, dtype=one.main)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        step_in_place(
            optimizer, [tensor], [gradient], state, 0, metrics=False, totals=reductions_of(labelled[one.group.label])
        )
    peak: int = counter.peak
    return peak
