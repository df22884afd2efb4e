"""The bytes of what is done with a model between its passes: state dicts, copies, files, weights as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import everybit as eb
from everybit.base import ComputeDType, torch_dtype
from everybit_torch.full_precision import begin_again, export_piece, pieces_of
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.metering import Meter, StepBytes
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.planning.runs import Shape, elements, indices, remembered, state_of
from everybit_torch.sharded.scheduling.copies import copy_out
from everybit_torch.sharded.scheduling.schedule import Schedule, Settings
from everybit_torch.sharded.shard_optimizer import LabelledTransform
from everybit_torch.sharded.whole_tensors import gathered_bytes

Shown = Callable[[GroupPlan], Iterator[tuple[int, int]]]
"""For each parameter of a group that is shown, bytes that stay and bytes that come and go."""


def access_bytes(
    layout: Layout,
    settings: Settings,
    groups: Sequence[GroupPlan],
    step: StepBytes,
    labelled: Mapping[str, LabelledTransform],
) -> dict[str, int]:
    """Peak bytes by call; see :class:`~everybit_torch.sharded.planning.report.Plan`.

    Args:
        layout: Of the model.
        settings: Of the schedule.
        groups: Of the layout, on one rank.
        step: Bytes of a step, whose device is the model's.
        labelled: What the labels mean.
    """

    def peak(shown: Shown, on_the_way: int) -> int:
        schedule = Schedule(layout, settings)
        if schedule.weights is not None:
            schedule.weights.free_all()
        meter = Meter(groups, step)
        meter.copied = shown
        meter.begin(on_the_way)
        meter.follow(list(copy_out(range(len(layout.units)), schedule.weights)))
        return meter.peak

    ranks = groups[0].ranks
    first_of_data = ranks.inner_rank == ranks.outer_rank == 0
    parts = [spec.part for spec in layout.specs if spec.part is not None]
    first = first_of_data and all(part.counted and not any(part.offsets) for part in parts)
    on_host = step.device.type in ("cpu", "meta")
    all_weights, own = sum(map(_whole_weights, groups)), sum(map(_own_weights, groups))
    gathered = sum(one.weights for one in groups) if settings.sharding.params else 0
    state = sum(one.state_saved(labelled) for one in groups)
    # Groups of the same runs take the same.
    alike = list(
        {
            (one.group.label, one.group.dtype, *one.runs(labelled)): one for one in groups if one.resolved is not None
        }.values()
    )
    loading = max((_followed(one, labelled) for one in alike), default=0)
    exporting = {key: value for one in alike for key, value in _exported_by_run(one, labelled).items()}
    sent, sent_main = (max(_sent(one, main=main) for one in groups) for main in (False, True))
    gathered_main = max(one.group.padded * _main_itemsize(one) for one in groups if one.resolved is not None)
    keeping = partial(_showing, keeps=True, on_host=on_host)
    showing = _showing(copies=first, keeps=False, on_host=on_host)
    found = {
        "full_parameters": gathered,
        "model_state_dict": peak(keeping(copies=first), sent if first_of_data else 0),
        "model_state_dict, full": peak(keeping(copies=True), sent),
        "model_state_dict, sharded": own if on_host else 0,
        "export_safetensors": peak(showing, sent if first_of_data else 0),
        "export_safetensors, main": peak(
            _main(exporting, labelled, showing), gathered_main + (sent_main if first_of_data else 0)
        ),
        "load_model_state_dict": loading,
        "load_model_state_dict, broadcast": loading + max(map(_largest, groups)),
        "save_sharded, asynchronous": own + state if on_host else 0,
    }
    if not on_host:
        found |= {
            "model_state_dict, host": all_weights if first else 0,
            "model_state_dict, full, host": all_weights,
            "model_state_dict, sharded, host": own,
            "save_sharded, asynchronous, host": own + state,
        }
    return found


def _sent(one: GroupPlan, *, main: bool) -> int:
    """The bytes on their way while one of a group's tensors is put together of which ranks have parts, at the most."""
    size = _main_itemsize(one) if main else one.group.dtype.itemsize
    parts = [place.spec.part for place in one.group.placements if place.spec.part is not None]
    return max((gathered_bytes(part, size) for part in parts), default=0)


def _main_itemsize(one: GroupPlan) -> int:
    """The bytes of an element of a group's main values; of frozen parameters, of their weights."""
    return one.group.dtype.itemsize if one.resolved is None else torch_dtype(one.resolved.policy.compute).itemsize


def _showing(*, copies: bool, keeps: bool, on_host: bool) -> Callable[..., Iterator[tuple[int, int]]]:
    """The memory needed to show a group's parameters.

    Args:
        copies: Whether this rank is shown them.
        keeps: Whether copies of all are kept.
        on_host: Whether what is in the host's memory counts.
    """

    def shown(one: GroupPlan, itemsize: int | None = None) -> Iterator[tuple[int, int]]:
        size = one.group.dtype.itemsize if itemsize is None else itemsize
        for place in one.group.placements:
            whole = place.spec.whole_numel * size if copies and on_host else 0
            together = place.spec.part is not None and bool(place.spec.part.cuts)
            yield (whole, 0) if keeps else (0, whole if together else 0)

    return shown


RunKey = tuple[str, torch.dtype, Shape]
"""The label, the dtype and the shape of a run."""


def _main(
    exporting: Mapping[RunKey, int],
    labelled: Mapping[str, LabelledTransform],
    shown: Callable[..., Iterator[tuple[int, int]]],
) -> Shown:
    """The same with the values of main weights, which are computed a group at a time."""

    def with_main(one: GroupPlan) -> Iterator[tuple[int, int]]:
        if one.resolved is not None:
            runs = [exporting[one.group.label, one.group.dtype, shape] for shape in one.runs(labelled)]
            yield 0, max(runs, default=0)
        yield from shown(one, _main_itemsize(one))

    return with_main


def _exported_by_run(one: GroupPlan, labelled: Mapping[str, LabelledTransform]) -> dict[RunKey, int]:
    label = labelled[one.group.label]
    shapes = dict.fromkeys(one.runs(labelled))
    return {(one.group.label, one.group.dtype, shape): _exported(one, label, shape) for shape in shapes}


def _exported(one: GroupPlan, label: LabelledTransform, shape: Shape) -> int:
    """The bytes allocated while the weights of a run are decoded, a piece at a time."""
    optimizer = eb.Optimizer(label.transform, label.policy, unsafe="allow")
    piece = shape if one.whole else (min(*shape, pieces_of(label.policy.block)),)
    return _exported_piece(optimizer, one.group.dtype, piece, label.policy.compute)


@remembered
def _exported_piece(optimizer: eb.Optimizer[Any], dtype: torch.dtype, shape: Shape, compute: ComputeDType) -> int:
    tensor, state = elements(dtype, shape), state_of(optimizer, dtype, shape)
    into = elements(torch_dtype(compute), shape)
    return _peak_of(lambda: export_piece(optimizer, tensor, state, into))


def _followed(one: GroupPlan, labelled: Mapping[str, LabelledTransform]) -> int:
    """The bytes allocated while main weights are set to loaded weights, a run at a time."""
    if one.resolved is None:
        return 0
    label = labelled[one.group.label]
    optimizer = eb.Optimizer(label.transform, label.policy, unsafe="allow")
    block, runs = one.block(labelled), set(one.runs(labelled))
    return max((_followed_run(optimizer, one.group.dtype, shape, block) for shape in runs), default=0)


@remembered
def _followed_run(optimizer: eb.Optimizer[Any], dtype: torch.dtype, shape: Shape, block: int) -> int:
    tensor, state = elements(dtype, shape), state_of(optimizer, dtype, shape)
    first = indices(shape, block)
    return _peak_of(lambda: begin_again(optimizer, tensor, state, first))


def _peak_of(call: Callable[[], object]) -> int:
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        call()
    peak: int = counter.peak
    return peak


def _largest(one: GroupPlan) -> int:
    return max(place.spec.whole_numel for place in one.group.placements) * one.group.dtype.itemsize


def _whole_weights(one: GroupPlan) -> int:
    """The bytes of a group's weights on all tensor-parallel ranks together, without padding."""
    return sum(place.spec.whole_numel for place in one.group.placements) * one.group.dtype.itemsize


def _own_weights(one: GroupPlan) -> int:
    """The bytes of this rank's elements of a group; of frozen parameters that are not sharded, all."""
    if one.resolved is None and not one.kind.params:
        return one.group.numel * one.group.dtype.itemsize
    return sum(s.high - s.low for s in one.group.slices(one.low, one.high)) * one.group.dtype.itemsize
