"""The most that is allocated while a stepper is made, added up over the events of :mod:`..scheduling.construction` and what comes next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

import everybit as eb
from everybit.base import ComputeDType, torch_dtype
from everybit.stepping import nbytes
from everybit_torch.full_precision import PIECE, begin_at
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.offload import Offload
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.planning.runs import Shape, elements, indices, remembered, state_of
from everybit_torch.sharded.scheduling.construction import ConstructionEvent, Tensors
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.units import init_state

LOOKED_AT = 1 << 20
"""Elements of a tensor that are looked at, at a time, after it was initialized."""


def construction_peak(
    events: Iterable[ConstructionEvent],
    tensors: Tensors,
    groups: Sequence[GroupPlan],
    labelled: Mapping[str, LabelledTransform],
    *,
    given: bool,
    chunk: int,
    later: Sequence[int],
    keep_gradients: bool,
    offload: Offload,
) -> int:
    """Return the most bytes of weights, gradients and state while a stepper is made, less those that persist.

    Tensors of fewer than :data:`SMALLEST` bytes are left out, and so are the model's buffers, what initializers allocate for themselves,
    and the bytes of files that are read at a time.

    Args:
        events: Of the weights.
        tensors: To which these refer.
        groups: Of the layout.
        labelled: What the labels mean.
        given: Whether the model has its values, whose bytes are counted too.
        chunk: Bytes that are sent at a time, where the first rank sends values; else 0.
        later: Groups that are read when they have their state, in the dtype in which steps are computed.
        keep_gradients: Whether main gradients are kept from one step to the next.
        offload: What lies on the host, and is not counted.
    """
    weights = _Weights(tensors, groups, given=given, chunk=chunk, on_host=offload.weights)
    for event in events:
        weights.follow(event)
    live, peak = weights.live, weights.peak
    for one in groups if not offload.gradients else ():
        peak = max(peak, live + _seen(one.main_bytes))
        live += _seen(one.main_bytes) if keep_gradients else 0
    known: dict[tuple[str, torch.dtype, Shape], tuple[int, int]] = {}
    for label in labelled:
        for one in groups:
            if one.resolved is None or one.group.label != label:
                continue
            for shape in one.runs(labelled):
                key = (label, one.group.dtype, shape)
                if key not in known:
                    known[key] = _state_bytes(one, labelled[label], shape, one.block(labelled), offload)
                kept, most = known[key]
                peak, live = max(peak, live + most), live + kept
    for number in later:
        one = groups[number]
        assert one.resolved is not None
        wide = torch_dtype(one.resolved.policy.compute).itemsize
        staged = _seen((one.high - one.low) * wide)
        sent = _sent(one, wide, chunk)
        of_label, block = labelled[one.group.label], one.block(labelled)
        stored = max((_stored_bytes(one, of_label, shape, block) for shape in one.runs(labelled)), default=0)
        peak = max(peak, live + staged + max(sent, stored))
    numbers = sum(len(one.group.placements) for one in groups) * torch.int64.itemsize  # counts of non-finite gradients
    return max(peak - live - _seen(numbers), 0)


def _sent(one: GroupPlan, itemsize: int, chunk: int) -> int:
    """The most bytes of a group that are sent at a time."""
    return _seen(max((min(place.spec.whole_numel * itemsize, chunk) for place in one.group.placements), default=0))


class _Weights:
    """The bytes allocated for the model's weights, after each event."""

    def __init__(
        self, tensors: Tensors, groups: Sequence[GroupPlan], *, given: bool, chunk: int, on_host: bool
    ) -> None:
        self._tensors, self._groups, self._given, self._chunk = tensors, groups, given, chunk
        self._on_host = on_host
        self._sizes = {
            member: place.spec.numel * one.group.dtype.itemsize
            for one, members in zip(groups, tensors.members, strict=True)
            for member, place in zip(members, one.group.placements, strict=True)
        }
        self._whole_sizes = {
            member: place.spec.whole_numel * one.group.dtype.itemsize
            for one, members in zip(groups, tensors.members, strict=True)
            for member, place in zip(members, one.group.placements, strict=True)
        }
        self.live = sum(map(_seen, self._sizes.values())) if given else 0
        self.peak = self.live

    def follow(self, event: ConstructionEvent) -> None:
        """Take note of an event."""
        if event.kind == "lay out":
            one = self._groups[event.number]
            self._add(0 if self._on_host else one.weights // (one.ranks.inner if one.kind.params else 1))
        elif event.kind == "materialize":
            self._add(self._sizes.get(event.number, 0))
        elif event.kind == "stand in":
            self._add(self._whole_sizes[event.number])
        elif event.kind == "cut":
            self._briefly(self._looked_at(event.number, self._whole_sizes))
            if not self._tensors.is_in_buffer(event.number):
                self._add(self._sizes[event.number])
            self.live -= _seen(self._whole_sizes[event.number])
        elif event.kind in ("take", "settle"):
            if not self._given:
                self._briefly(self._looked_at(event.number, self._sizes))
            if event.kind == "take":
                self.live -= _seen(self._sizes.get(event.number, 0))
        elif event.kind == "read":
            one = self._groups[event.number]
            self._briefly(_sent(one, one.group.dtype.itemsize, self._chunk))
        elif event.kind == "read others":
            for one, has in zip(self._groups, self._tensors.in_buffers, strict=True):
                self._briefly(0 if has else _sent(one, one.group.dtype.itemsize, self._chunk))

    def _looked_at(self, number: int, sizes: Mapping[int, int]) -> int:
        """Bytes in which it is noted which elements of a tensor were written: one for each of those that are looked at, at a time."""
        if number not in self._tensors.group_of:
            return 0
        itemsize = self._groups[self._tensors.group_of[number]].group.dtype.itemsize
        return _seen(min(sizes[number] // itemsize, LOOKED_AT))

    def _briefly(self, size: int) -> None:
        self.peak = max(self.peak, self.live + size)

    def _add(self, size: int) -> None:
        self.live += _seen(size)
        self.peak = max(self.peak, self.live)


def _seen(size: int) -> int:
    return size if size >= SMALLEST else 0


def _state_bytes(
    one: GroupPlan, label: LabelledTransform, shape: Shape, numbered: int, offload: Offload
) -> tuple[int, int]:
    """The bytes of a run's first state, and the most that is allocated while it is made."""
    if offload.weights:
        return 0, 0  # it is computed where the weights are
    optimizer = eb.Optimizer(label.transform, label.policy, unsafe="allow")
    dtype = one.group.dtype
    numel = math.prod(shape)
    if one.whole or (numel <= PIECE and not offload.state):
        return _made(optimizer, dtype, shape, numbered)
    block = label.policy.block
    size = max(PIECE // block, 1) * block
    kept = sum(_seen(nbytes(leaf)) for leaf in eb.tree.leaves(state_of(optimizer, dtype, shape)))
    pieces = {min(size, numel), numel % size} - {0}
    kept = 0 if offload.state else kept
    return kept, kept + max((_made(optimizer, dtype, (length,), numbered)[1] for length in pieces), default=0)


def _stored_bytes(one: GroupPlan, label: LabelledTransform, shape: Shape, numbered: int) -> int:
    """The bytes allocated while main weights are made from values with more bits, a piece at a time."""
    optimizer = eb.Optimizer(label.transform, label.policy, unsafe="allow")
    block = label.policy.block
    piece = shape if one.whole else (min(*shape, max(PIECE // block, 1) * block),)
    return _begun(optimizer, one.group.dtype, piece, numbered, label.policy.compute)


@remembered
def _begun(
    optimizer: eb.Optimizer[object], dtype: torch.dtype, shape: Shape, numbered: int, compute: ComputeDType
) -> int:
    """What is allocated while a piece of main weights is made."""
    tensor = elements(dtype, shape)
    wide, first = tensor.to(torch_dtype(compute)), indices(shape, numbered)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        begin_at(optimizer, wide, tensor, torch.zeros((), dtype=torch.int64, device="meta"), first)
    peak: int = counter.peak
    return peak


@remembered
def _made(optimizer: eb.Optimizer[object], dtype: torch.dtype, shape: Shape, numbered: int) -> tuple[int, int]:
    """The bytes of a run's first state, and the most that is allocated while it is made."""
    tensor, first = elements(dtype, shape), indices(shape, numbered)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        state = init_state(optimizer, tensor, first, chunk=PIECE)
        kept = counter.live
    del state
    return kept, counter.peak
