"""The events of copying a whole model out, one unit after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from everybit_torch.sharded.scheduling.events import Event
from everybit_torch.sharded.scheduling.weights import WeightSchedule


def copy_out(units: Iterable[int], weights: WeightSchedule | None) -> Iterator[Event]:
    """Copy each of these units out, gathered for as long as that takes.

    Args:
        units: Their numbers.
        weights: Of the schedule; None where parameters are not sharded.
    """
    if weights is not None:
        yield from weights.copy_out(units)
        return
    for number in units:
        yield Event("copy out", number)
