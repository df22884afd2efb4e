"""Predicts memory and traffic of a model that FSDP2 shards: ours to the byte, and FSDP2's own buffers as estimates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import dtype_name
from everybit.policies import resolve, short
from everybit.stepping import Metrics, OptimizerState, nbytes
from everybit_torch.collectives import GradientWires
from everybit_torch.placements import row_edges
from everybit_torch.planning.report import Plan, PlannedRun, Ranks, kept_by, placed
from everybit_torch.planning.traffic import sent_by_exchange, sent_by_reduction
from everybit_torch.segments import PIECE, Segment, most_short
from everybit_torch.sharded.labelling import Labelled
from everybit_torch.sharded.strategies import Sharding

STEPPED = 6
"""Temporary float32 tensors that a step of a piece has at once, as an estimate: weights, gradient, and both moments, old and new."""


def plan_units(parameters: Mapping[str, Tensor], homes: Mapping[str, str], labelled: Labelled, run: PlannedRun) -> Plan:
    """Plan one rank.

    Args:
        parameters: The parameters by name, with their whole shapes.
        homes: The unit of each.
        labelled: What those that are trained are stepped with.
        run: The run that is planned.
    """
    kind, ranks = run.kind, run.ranks
    persistent: Counter[str] = Counter()
    formats: Counter[str] = Counter()
    weights: Counter[str] = Counter()  # bytes of a unit, gathered
    gradients: Counter[str] = Counter()  # elements that a rank keeps of a unit's
    grads: dict[str, GradientWires] = {}
    state: Counter[str] = Counter()
    stepped = _PlannedSegments(run.device)
    largest = padding = 0
    for name, p in parameters.items():
        shape, unit = tuple(p.shape) or (1,), homes[name]
        row = math.prod(shape[1:])
        padded = -(-shape[0] // ranks.inner) * row
        padding += padded * ranks.inner - p.numel()
        persistent["parameters"] += padded * p.dtype.itemsize  # FSDP2 keeps as many rows on every rank
        weights[unit] += padded * ranks.inner * p.dtype.itemsize
        if name not in labelled.of:
            formats["frozen"] += p.numel()
            continue
        one = labelled.meaning[labelled.of[name]]
        resolved = resolve(one.policy, dtype_name(p.dtype, field=name))
        formats[short(resolved.params)] += p.numel()
        grads[unit] = GradientWires.of(resolved, ranks.inner, ranks.outer)
        gradients[unit] += padded
        whole, optimizer = torch.empty(shape, dtype=p.dtype, device="meta"), eb.Optimizer(one.transform, one.policy)
        state.update(kept_by(_state(optimizer, whole, kind, ranks), resolved))
        stepped.add(labelled.of[name], optimizer, whole, _rows(shape[0], kind, ranks))
        if run.watched:
            persistent["changed"] += _rows(shape[0], kind, ranks) * row
        largest = max(largest, _rows(shape[0], kind, ranks) * row)
    for unit, numel in gradients.items():
        persistent["gradients"] += ranks.outer * -(-numel // ranks.outer) * grads[unit].main.itemsize
    if run.metrics:
        persistent["bookkeeping"] += nbytes(Metrics.zero(torch.device("meta")))
    here, host = placed(persistent, state, stepped.segments(), run)
    own = weights[""]
    gathered = own + 2 * max((size for unit, size in weights.items() if unit), default=0)
    # The gradients that autograd has made and FSDP2's copy, in the model's dtype; the sent tensor; and the received tensor.
    sent = [2 * (weights[u] + n * ranks.inner * grads[u].inner.dtype.itemsize) for u, n in gradients.items()]
    step = own + STEPPED * 4 * min(largest, PIECE)
    transient = {"forward": gathered, "backward": gathered + max(sent, default=0), "step": step}
    total = sum(p.numel() for p in parameters.values())
    wire = _wire(weights, gradients, grads, run)
    return Plan(kind, ranks, total, padding, here, transient, wire, run.microbatches, dict(formats), host=host)


def _rows(count: int, kind: Sharding, ranks: Ranks) -> int:
    """How many of so many rows the planned rank steps."""
    low, high = row_edges(count, ranks.inner)[ranks.inner_rank : ranks.inner_rank + 2]
    if kind.outer == "optim":
        low, high = row_edges(high - low, ranks.outer)[ranks.outer_rank : ranks.outer_rank + 2]
    return high - low


def _state(optimizer: eb.Optimizer[Any], whole: Tensor, kind: Sharding, ranks: Ranks) -> OptimizerState[Any]:
    """The rank's state of a parameter, without memory: of its rows, or its rows of the state at an owner."""
    if not optimizer.needs_whole:
        return optimizer.init([whole[: _rows(len(whole), kind, ranks)].flatten()])
    return eb.tree.map(lambda x: x[: _rows(len(x), kind, ranks)] if x.ndim else x, optimizer.init([whole]))


class _PlannedSegments:
    """The segments of a rank: long rows by themselves, short rows together, and whole tensors at their owners.

    Args:
        device: The device of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self._most_short = most_short(device)
        self._alone: list[tuple[eb.Optimizer[Any], Tensor]] = []
        self._together: dict[tuple[str, torch.dtype], tuple[eb.Optimizer[Any], int]] = {}

    def add(self, label: str, optimizer: eb.Optimizer[Any], whole: Tensor, rows: int) -> None:
        """Add a parameter, of which the rank has some rows."""
        here = whole if optimizer.needs_whole else whole[:rows].flatten()
        if optimizer.needs_whole or optimizer.per_tensor or here.numel() >= self._most_short:
            self._alone.append((optimizer, here))
            return
        _, elements = self._together.get((label, whole.dtype), (optimizer, 0))
        (stored,) = optimizer.formats([here])
        numel = -(-here.numel() // stored.block) * stored.block
        self._together[label, whole.dtype] = optimizer, elements + numel

    def segments(self) -> Iterator[Segment]:
        """Yield them, without memory."""
        short = [
            (one, torch.empty(numel, dtype=dtype, device="meta")) for (_, dtype), (one, numel) in self._together.items()
        ]
        for one, x in (*self._alone, *short):
            yield Segment(one, x, one.init([x]))


def _wire(
    weights: Mapping[str, int], gradients: Mapping[str, int], grads: Mapping[str, GradientWires], run: PlannedRun
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by collective."""
    kind, ranks, microbatches, found = run.kind, run.ranks, run.microbatches, Counter[str]()
    for unit, size in weights.items():
        times = microbatches * (2 if unit else 1)  # the model's own unit stays between its two passes
        found.update({name: times * n for name, n in sent_by_exchange("all_gather", size, ranks.inner).items()})
    for unit, numel in gradients.items():
        one, kept = grads[unit], ranks.outer * -(-numel // ranks.outer)
        inner = sent_by_reduction(numel * ranks.inner, one.main, one.inner, ranks.inner, scatters=True)
        found.update({name: microbatches * n for name, n in inner.items()})
        found.update(sent_by_reduction(kept, one.main, one.outer, ranks.outer, scatters=kind.outer == "optim"))
    if kind.outer == "optim":
        found.update(sent_by_exchange("all_gather", sum(weights.values()) // ranks.inner, ranks.outer))
    return {name: size for name, size in found.items() if size}
