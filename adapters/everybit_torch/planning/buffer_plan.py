"""Predicts memory and traffic of a model on flat buffers: persistent and sent bytes exactly, and the largest temporaries."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, Scattered, dtype_name
from everybit.combinators import matrices_of
from everybit.policies import resolve, short
from everybit.stepping import Metrics, nbytes
from everybit_torch.collectives import GradientWires
from everybit_torch.compiled import is_number
from everybit_torch.flat import Buffer
from everybit_torch.planning.allocations import AllocationCounter
from everybit_torch.planning.report import Plan, PlannedRun, distribution, kept_by, placed
from everybit_torch.planning.traffic import sent_by_exchange, sent_by_reduction, sent_by_sum
from everybit_torch.segments import PIECE, Segment, Work, find_totals, indices, most_short, neighbours, piece_size
from everybit_torch.sharded.labelling import Labelled, LabelledTransform
from everybit_torch.sharded.numbers_inside import hyperparameters

COMPARED = 6 * torch.int64.itemsize
"""Bytes in which ranks compare what they begin: each microbatch whose gradients are summed, and a step."""

SMALL = 16
"""Rows or columns of a matrix that is not made smaller for a measurement."""


class _Part:
    """A buffer as the planned rank has it: its share, with positions in it, and whether other ranks have other elements."""

    def __init__(self, buffer: Buffer, labelled: Labelled, run: PlannedRun) -> None:
        where, spec = buffer.share(run.ranks.inner_rank if run.kind.state else 0), buffer.places[0].spec
        self.buffer, self.device = buffer, run.device
        self.share, self.places = where.stop - where.start, [place.within(where) for place in buffer.places]
        self.label: LabelledTransform = labelled.meaning[spec.label]
        self.resolved = resolve(self.label.policy, dtype_name(spec.dtype, field=spec.name))
        self.grads = GradientWires.of(self.resolved, run.ranks.inner, run.ranks.outer)
        self.is_shared = run.kind.state and run.ranks.inner > 1
        self.dtype, self.is_whole = spec.dtype, spec.is_whole

    def optimizer(self) -> eb.Optimizer[Any]:
        """The optimizer of its elements."""
        return eb.Optimizer(self.label.transform, self.label.policy)

    def stepped(self) -> Iterator[tuple[tuple[int, ...], int | Blocks | Scattered]]:
        """Yield the shapes that are stepped at once, with the indices of their elements."""
        if self.is_whole or self.optimizer().per_tensor:
            for place in self.places:
                shape = place.spec.shape if place.numel else (0, *place.spec.shape[1:])
                yield shape if self.is_whole else (place.numel,), place.first
            return
        block, draws = self.label.policy.block, self.optimizer().draws_bits
        lengths, firsts = [place.numel for place in self.places], [place.first for place in self.places]
        parts = neighbours(lengths, firsts, most_short(self.device)) if draws and block == 1 else [slice(None)]
        for where in parts:
            begin, end = self.places[where][0].start, self.places[where][-1].stop
            first: int | Blocks | Scattered = firsts[where][0]
            if draws or block > 1:
                first = indices(lengths[where], firsts[where], block, torch.device("meta"))
            yield (min(-(-(end - begin) // block) * block, max(self.share - begin, 0)),), first

    def segments(self) -> list[Segment]:
        """Make its segments, without memory."""
        optimizer = self.optimizer()
        stepped = [(torch.empty(shape, dtype=self.dtype, device="meta"), first) for shape, first in self.stepped()]
        return [Segment(optimizer, x, optimizer.init([x]), first) for x, first in stepped]


def plan_buffers(
    parameters: Mapping[str, Tensor], buffers: Sequence[Buffer], labelled: Labelled, run: PlannedRun
) -> Plan:
    """Plan one rank.

    Args:
        parameters: All that are managed, by name.
        buffers: The places of those that are trained.
        labelled: What these are stepped with.
        run: The run that is planned.
    """
    kind, ranks = run.kind, run.ranks
    parts = [_Part(buffer, labelled, run) for buffer in buffers]
    persistent: Counter[str] = Counter()
    state: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    segments: list[Segment] = []
    for name, p in parameters.items():
        if name not in labelled.of:
            persistent["parameters"] += p.nbytes
            weights["frozen"] += p.numel()
    for one in parts:
        persistent["parameters"] += one.buffer.numel * one.dtype.itemsize
        persistent["gradients"] += (one.share if kind.grads else one.buffer.numel) * one.grads.main.itemsize
        own = one.segments()
        segments += own
        for segment in own:
            state.update(kept_by(segment.state, one.resolved))
            persistent["bookkeeping"] += nbytes(segment.first_tensor)
            if run.watched:
                persistent["changed"] += segment.tensor.numel()
        weights[short(one.resolved.params)] += sum(place.numel for place in one.buffer.places)
    if run.compile:
        for label in {id(one.label): one.label for one in parts}.values():
            given = hyperparameters(label.transform).values()
            numbers = [n for value in given for n in (value if isinstance(value, tuple) else (value,))]
            persistent["bookkeeping"] += sum(map(is_number, numbers)) * torch.float64.itemsize
    if run.metrics:
        persistent["bookkeeping"] += nbytes(Metrics.zero(torch.device("meta")))
    transient = {"forward": 0, "backward": _under_way(parts, run), "step": _step(parts, run)}
    here, host = placed(persistent, state, segments, run)
    filled = sum(place.numel for buffer in buffers for place in buffer.places)
    return Plan(
        kind, ranks, sum(p.numel() for p in parameters.values()), sum(b.numel for b in buffers) - filled,
        here, transient, _wire(parts, run), run.microbatches, dict(weights),
        distribution(buffers, ranks.inner) if kind.state else None, host,
    )  # fmt: skip


def _wire(parts: Sequence[_Part], run: PlannedRun) -> dict[str, int]:
    """Bytes that this rank sends in a step, by collective."""
    kind, ranks, found = run.kind, run.ranks, Counter[str]()
    passes = run.microbatches if kind.grads else 1
    for one in parts:
        numel, main, wires = one.buffer.numel, one.grads.main, one.grads
        inner = sent_by_reduction(numel, main, wires.inner, ranks.inner, scatters=kind.state)
        found.update({name: passes * sent for name, sent in inner.items()})
        if ranks.outer > 1:
            share = one.share if kind.state else numel
            found.update(sent_by_reduction(share, main, wires.outer, ranks.outer, scatters=False))
        if kind.state:
            found.update(sent_by_exchange("all_gather", numel * one.dtype.itemsize, ranks.inner))
    flags, squares = sum(len(one.places) for one in parts), torch.float64.itemsize
    for agreed in (*(COMPARED,) * (passes + 1), flags, squares):
        for size in (ranks.inner, ranks.outer):
            found.update(sent_by_sum(agreed, size))
    return {name: size for name, size in found.items() if size}


def _under_way(parts: Sequence[_Part], run: PlannedRun) -> int:
    """Bytes of all reductions of a pass at once: copies that are sent, and the input of an exact sum."""
    nbytes = 0
    for one in parts:
        wire, numel = one.grads.inner, one.buffer.numel
        sent = numel if run.kind.grads or wire.dtype is not one.grads.main else 0
        received = (run.ranks.inner * one.share if run.kind.state else numel) if wire.exact else 0
        nbytes += (sent + received) * wire.dtype.itemsize
    return nbytes


def _step(parts: Sequence[_Part], run: PlannedRun) -> int:
    """The most bytes that the step of one segment takes. Compiled code has no temporaries where parameters are cut."""
    known: dict[tuple[str, torch.dtype, tuple[int, ...]], int] = {}
    for one in parts:
        if run.compile and not one.is_whole:
            continue
        for shape, first in one.stepped():
            size = shape if one.is_whole else (min(*shape, piece_size(run.device)),)
            key = one.buffer.places[0].spec.label, one.dtype, size
            if math.prod(size) and key not in known:
                known[key] = _measured(one, size, in_a_row=isinstance(first, int))
    return max(known.values(), default=0)


def _measured(one: _Part, shape: tuple[int, ...], *, in_a_row: bool) -> int:
    """Bytes of temporaries of a step; of a tensor longer than :data:`PIECE`, those of a shorter tensor times the elements.

    Temporaries have one number for each element, or few beside these: for each row, or one in all. Products of a matrix
    with itself grow as it does if it keeps its proportions.
    """
    smaller = _smaller(one, shape)
    optimizer, tensor = one.optimizer(), torch.zeros(smaller, dtype=one.dtype)
    first: int | Blocks | Scattered = 0
    if not in_a_row:
        block = one.label.policy.block
        half = tensor.numel() // (2 * block) * block
        first = indices([half, tensor.numel() - half], [half, 0], block, tensor.device)
    is_part = one.is_shared and optimizer.per_tensor and not one.is_whole
    segment, grad = Segment.new(optimizer, tensor, first, is_part), torch.zeros(smaller, dtype=one.grads.main)
    with torch.no_grad(), AllocationCounter() as counter:
        due = segment.due()
        (totals,) = find_totals([Work(segment, grad, due)])
        segment.step(grad, totals, due=due)
    return int(counter.peak) * math.prod(shape) // math.prod(smaller)


def _smaller(one: _Part, shape: tuple[int, ...]) -> list[int]:
    """A shape of :data:`PIECE` elements, or not many more: of both sides, or of one where a view says the size of the other."""
    last = range(len(shape))[-2:]
    for sides in (last, last[1:], last[:1]):
        smaller = list(shape)
        while math.prod(smaller) > PIECE:
            halved = [max(range(len(smaller)), key=smaller.__getitem__)]
            if len(shape) > 1 and min(smaller[side] for side in sides) > SMALL:
                halved = list(sides)
            elif len(sides) < len(last):
                break
            for dimension in halved:
                smaller[dimension] = -(-smaller[dimension] // 2)
        with suppress(ValueError):
            matrices_of(one.label.transform, "", smaller)
            return smaller
    return list(shape)
