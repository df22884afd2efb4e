"""The records of a comparison, and their summary."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Point:
    """Validation loss after a step, in nats per byte."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Probe:
    """The metrics of one step's updates; see :class:`everybit.Metrics`."""

    step: int
    lost_share: float
    edq: float
    update_norm: float
    gradient_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One model trained under one policy from one seed.

    Attributes:
        policy: Name it is shown under.
        seed: The seed of weights, batches and stochastic rounding.
        losses: Training loss of each step, in nats per byte.
        validation: Loss on the held-out text, now and then; the last is of the finished model.
        probes: Steps that were measured.
        optimizer_seconds: Of ``optimizer.step()``, for those steps that were timed.
        training_seconds: Seconds of the same steps as a whole: forward, backward, clipping, the optimizer.
        bytes_measured: Bytes per parameter by use, from the tensors that were allocated.
        bytes_predicted: The same, from the policy alone.
    """

    policy: str
    seed: int
    losses: tuple[float, ...]
    validation: tuple[Point, ...]
    probes: tuple[Probe, ...]
    optimizer_seconds: tuple[float, ...]
    training_seconds: tuple[float, ...]
    bytes_measured: dict[str, float]
    bytes_predicted: dict[str, float]

    def until(self, step: int) -> Record:
        """Return the record as it was after a step, with the times of all that were timed."""
        return replace(
            self,
            losses=self.losses[:step],
            validation=tuple(point for point in self.validation if point.step <= step),
            probes=tuple(probe for probe in self.probes if probe.step <= step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy, over all seeds. Spreads are sample standard deviations, None for a single seed.

    Attributes:
        validation_loss: Mean of the finished models' losses, in nats per byte.
        difference: Mean of (loss - the reference's loss from the same seed).
        lost_share: Share of the updates that were lost: mean over the measured steps of the second half. ``edq`` likewise.
        bytes_measured: Bytes per parameter, all uses.
        bytes_predicted: The same, from the policy alone.
        optimizer_milliseconds: Median of ``optimizer.step()``; None if no step was timed.
        training_milliseconds: Median of whole steps; likewise.
    """

    policy: str
    validation_loss: float
    validation_spread: float | None
    difference: float
    difference_spread: float | None
    lost_share: float
    edq: float
    bytes_measured: float
    bytes_predicted: float
    optimizer_milliseconds: float | None
    training_milliseconds: float | None


def summarize(records: Sequence[Record], reference: str) -> list[Summary]:
    """One row for each policy, in the order of the records; differences are to the policy called ``reference``."""
    baseline = {record.seed: record.validation[-1].loss for record in records if record.policy == reference}
    rows = []
    for name in dict.fromkeys(record.policy for record in records):
        own = [record for record in records if record.policy == name]
        final = [record.validation[-1].loss for record in own]
        differences = [record.validation[-1].loss - baseline[record.seed] for record in own]
        late = [probe for record in own for probe in record.probes if 2 * probe.step > len(record.losses)]
        rows.append(Summary(
            policy=name,
            validation_loss=statistics.fmean(final), validation_spread=_spread(final),
            difference=statistics.fmean(differences), difference_spread=_spread(differences),
            lost_share=_mean(probe.lost_share for probe in late), edq=_mean(probe.edq for probe in late),
            bytes_measured=sum(own[0].bytes_measured.values()), bytes_predicted=sum(own[0].bytes_predicted.values()),
            optimizer_milliseconds=_median_milliseconds(s for record in own for s in record.optimizer_seconds),
            training_milliseconds=_median_milliseconds(s for record in own for s in record.training_seconds),
        ))  # fmt: skip
    return rows


def _median_milliseconds(seconds: Iterable[float]) -> float | None:
    seconds = list(seconds)
    return 1e3 * statistics.median(seconds) if seconds else None


def _mean(values: Iterable[float]) -> float:
    """The mean; NaN without values, as in a run that was interrupted early."""
    values = list(values)
    return statistics.fmean(values) if values else math.nan


def _spread(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.stdev(values) if len(values) > 1 else None
