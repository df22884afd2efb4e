"""The bytes of what is done with a model between its passes: state dicts, copies, files, weights as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from everybit_torch.sharded.layout import Layout
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.metering import Meter, StepBytes
from everybit_torch.sharded.scheduling.copies import copy_out
from everybit_torch.sharded.scheduling.schedule import Schedule, Settings


def access_bytes(
    layout: Layout, settings: Settings, groups: Sequence[GroupPlan], step: StepBytes, state: int
) -> dict[str, int]:
    """Peak bytes by call; see :class:`~everybit_torch.sharded.planning.report.Plan`.

    Args:
        layout: Of the model.
        settings: Of the schedule.
        groups: Of the layout, on one rank.
        step: Bytes of a step, whose device is the model's.
        state: Bytes of the state that this rank saves.
    """

    def peak(copies: bool) -> int:
        schedule = Schedule(layout, settings)
        if schedule.weights is not None:
            schedule.weights.free_all()
        meter = Meter(groups, step)
        if copies:
            meter.copies = _weights
        meter.follow(list(copy_out(range(len(layout.units)), schedule.weights)))
        return meter.peak

    first = groups[0].ranks.inner_rank == groups[0].ranks.outer_rank == 0
    on_host = step.device.type in ("cpu", "meta")
    all_weights, own = sum(map(_weights, groups)), sum(map(_own_weights, groups))
    gathered = sum(one.weights for one in groups) if settings.sharding.params else 0
    found = {
        "full_parameters": gathered,
        "model_state_dict": peak(on_host and first),
        "model_state_dict, full": peak(on_host),
        "model_state_dict, sharded": own if on_host else 0,
        "export_safetensors": peak(False),
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


def _weights(one: GroupPlan) -> int:
    """The bytes of a group's weights, without padding."""
    return one.group.numel * one.group.dtype.itemsize


def _own_weights(one: GroupPlan) -> int:
    """The bytes of this rank's elements of a group; of frozen parameters that are not sharded, all."""
    if one.resolved is None and not one.kind.params:
        return _weights(one)
    return sum(s.high - s.low for s in one.group.slices(one.low, one.high)) * one.group.dtype.itemsize
