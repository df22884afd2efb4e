"""The peak of transient bytes, found by following the stepper through a forward pass, a backward pass and a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.transform import any_per_tensor
from everybit_torch import reductions
from everybit_torch.collectives.reduction import accumulate_bytes, install_bytes
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.gradient_norm import scratch_bytes
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.reductions import no_members, reduced_numbers, totals_of, unit_of
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.sharded.strategies import Sharding
from everybit_torch.stepping import PIECE, step_in_place

SMALLEST = 64
"""Transient tensors of fewer bytes are not counted."""


class _Meter:
    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> int:
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return nbytes

    def briefly(self, nbytes: int) -> None:
        self.add(nbytes)
        self.live -= nbytes


def forward_peak(units: list[list[GroupPlan]], kind: Sharding, reshard: bool) -> int:
    """The model's own unit, the one that computes and the next; or all, if they are kept."""
    if not kind.params:
        return 0
    sizes = [sum(one.weights for one in unit) for unit in units]
    if not reshard:
        return sum(sizes)
    pairs = [sum(sizes[number : number + 2]) for number in range(1, len(sizes))]
    return sizes[0] + max(pairs, default=0)


def backward_peak(units: list[list[GroupPlan]], kind: Sharding, microbatches: int, reshard: bool, *, lazy: bool) -> int:
    """Follows the last backward pass of a step, from the last unit to the model's own."""
    meter = _Meter()
    opens = lazy and microbatches == 1  # main gradients are not there yet
    if lazy and not opens:
        meter.add(sum(one.main_bytes for unit in units for one in unit))
    sizes = [sum(one.weights for one in unit) for unit in units]
    trained = [[one for one in unit if one.resolved is not None] for unit in units]
    if kind.params:
        meter.add(sizes[0] if reshard else sum(sizes))
    buckets = {id(one): meter.add(one.bucket) for one in trained[0] if kind.grads}
    if opens and not kind.grads:
        meter.add(sum(one.main_bytes for one in trained[0]))
    in_flight: list[tuple[GroupPlan, int]] = []

    def finish() -> None:
        for one, sent in in_flight:
            # What was received is added up; natively that is where what was sent is.
            needed = one.received or sent
            meter.live -= sent + one.received - needed
            meter.briefly(_install_bytes(one))
            meter.live -= needed
            if one.ranks.outer > 1:
                meter.briefly(_outer_bytes(one))
        in_flight.clear()

    for number in range(len(units) - 1, -1, -1):
        if kind.params and 0 < number < len(units) - 1:
            meter.live -= sizes[number + 1]  # which the pass has left
        if kind.params and reshard and number > 0:
            meter.add(sizes[number] if number == len(units) - 1 else 0)
            meter.add(sizes[number - 1] if number > 1 else 0)
        if kind.grads and number > 0:
            buckets |= {id(one): meter.add(one.bucket) for one in trained[number]}
        if opens and not kind.grads and number > 0:
            meter.add(sum(one.main_bytes for one in trained[number]))
        for one in trained[number]:
            largest = max(placement.spec.numel for placement in one.group.placements)
            into = one.wire.dtype if kind.grads else one.main
            adds = not kind.grads and microbatches > 1
            meter.briefly(
                accumulate_bytes(
                    largest,
                    into,
                    one.group.dtype,
                    adds=adds,
                    scale=one.wire.prescale if kind.grads else 1.0,
                    chunk=one.chunk,
                )
            )
        for one in reversed(trained[number]):
            finish()
            if opens and kind.grads:
                meter.add(one.main_bytes)
            sent = buckets.pop(id(one), 0)
            if not kind.grads and one.wire.dtype is not one.main:
                sent = meter.add(one.bucket)
                meter.briefly(
                    accumulate_bytes(
                        one.group.padded, one.wire.dtype, one.main, adds=False, scale=one.wire.prescale, chunk=one.chunk
                    )
                )
            meter.add(one.received)
            in_flight.append((one, sent))
    finish()
    return meter.peak


def _install_bytes(one: GroupPlan) -> int:
    whole = not one.kind.state
    numel = one.group.padded // (1 if whole and not one.wire.exact else one.ranks.inner)
    same = one.wire.dtype is one.main and not one.kind.grads
    divides = one.ranks.outer == 1
    parts = one.ranks.inner if one.wire.exact else 1
    return install_bytes(
        numel,
        one.main,
        parts,
        in_place=same and not one.wire.exact,
        divides=divides,
        scale=1 / one.wire.prescale,
        chunk=one.chunk,
    )


def _outer_bytes(one: GroupPlan) -> int:
    wire, outer = one.outer_wire, one.ranks.outer
    reduced = one.group.padded // (one.ranks.inner if one.kind.state else 1)
    scattered = one.kind.outer == "optim"
    sent = reduced * wire.dtype.itemsize
    cast = sent if wire.dtype is not one.main else 0
    received = sent if wire.exact else 0
    numel = reduced // outer if scattered or wire.exact else reduced
    parts = outer if wire.exact else 1
    scratch = install_bytes(
        numel,
        one.main,
        parts,
        in_place=not cast and not wire.exact,
        divides=True,
        scale=1 / wire.prescale,
        chunk=one.chunk,
    )
    return cast + received + scratch


Numbers = Mapping[ParameterSpec, int]
"""The number of each parameter that is trained, among all of them."""


def step_peak(
    groups: list[GroupPlan], labelled: Mapping[str, LabelledTransform], numbers: Numbers, compile: bool, piece: int
) -> int:
    """Return the peak temporary bytes of stepping one piece, over all runs."""
    if compile:
        return 0
    # All totals are there while one piece is stepped.
    sizes = [count * torch.float64.itemsize for count in reduced_numbers(labelled, len(numbers))]
    totals = sum(size for size in sizes if size >= SMALLEST)
    return totals + _peak_of_pieces(groups, labelled, numbers, piece, PIECE, _step_one)


def asked_peak(
    groups: list[GroupPlan], labelled: Mapping[str, LabelledTransform], numbers: Numbers, device: torch.device
) -> int:
    """Return the peak temporary bytes of what a transform that reduces is asked for, a chunk at a time, over all runs."""
    reducing = [one for one in groups if one.resolved is not None and labelled[one.group.label].transform.reduces]
    chunk = reductions.PIECE if device.type in ("cpu", "meta") else reductions.DEVICE_PIECE
    return _peak_of_pieces(reducing, labelled, numbers, chunk, reductions.PIECE, _ask_one)


Run = Callable[[eb.Optimizer[Any], Tensor, Tensor, eb.Members], int]


def _peak_of_pieces(
    groups: list[GroupPlan],
    labelled: Mapping[str, LabelledTransform],
    numbers: Numbers,
    piece: int,
    largest: int,
    run: Run,
) -> int:
    """Return the peak temporary bytes of ``run``, over pieces of at most ``piece`` elements; of ``largest`` it is measured."""
    peak = 0
    known: dict[tuple[str, torch.dtype, int, int], int] = {}
    for one in groups:
        if one.resolved is None:
            continue
        label = labelled[one.group.label]
        asks = any_per_tensor([label.transform])
        nobody = no_members(torch.zeros(len(numbers), dtype=torch.float64))
        runs = one.runs(labelled)
        for numel, members in zip(runs, one.members(labelled, numbers) if asks else [nobody] * len(runs), strict=True):
            block = one.resolved.policy.block
            size = min(numel, max(piece // block, 1) * block)
            key = (one.group.label, one.group.dtype, size, len(members.numbers))
            if size and key not in known:
                known[key] = _piece_bytes(one, label, members, size, largest, run)
            peak = max(peak, known.get(key, 0))
    return peak


def norm_peak(groups: list[GroupPlan], agreed: int, device: torch.device) -> int:
    """What finding the norm of the gradient takes: the ``agreed`` bytes on which ranks agree, and what gradients are widened in."""
    trained = [one for one in groups if one.resolved is not None and one.counts]
    scratch = max((scratch_bytes(one.stepped, one.main, device) for one in trained), default=0)
    return sum(size for size in (agreed, scratch) if size >= SMALLEST)


def _piece_bytes(
    one: GroupPlan, label: LabelledTransform, members: eb.Members, size: int, largest: int, run: Run
) -> int:
    assert one.resolved is not None
    block = one.resolved.policy.block
    known = max(largest // block, 1) * block
    if size > known:
        # What is computed on the way grows with the piece, element by element.
        return _piece_bytes(one, label, members, known, largest, run) * size // known
    optimizer = eb.Optimizer(label.transform, label.policy)
    tensor, gradient = torch.zeros(size, dtype=one.group.dtype), torch.zeros(size, dtype=one.main)
    return run(optimizer, tensor, gradient, members)


def _step_one(optimizer: eb.Optimizer[Any], tensor: Tensor, gradient: Tensor, members: eb.Members) -> int:
    state, totals = optimizer.init([tensor]), totals_of(optimizer, members.sizes)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        here = (members.cut(0, len(tensor)) if len(tensor) < members.edges[-1] else members,)
        step_in_place(optimizer, [tensor], [gradient], state, 0, metrics=False, totals=totals, members=here)
    peak: int = counter.peak
    return peak


def _ask_one(optimizer: eb.Optimizer[Any], tensor: Tensor, gradient: Tensor, members: eb.Members) -> int:
    unit = unit_of(optimizer, tensor, members)
    reads = reductions.Reads()
    reductions.find_totals([reductions.Part(optimizer, unit, gradient)], eb.Local, reads)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        reductions.find_totals([reductions.Part(optimizer, unit, gradient)], eb.Local, reads)
    peak: int = counter.peak
    return peak
