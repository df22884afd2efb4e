"""The best of each optimizer again, side by side and from other seeds: what it reaches, after how many steps, and how long they take."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everybit_torch.cli.compare.corpus import Corpus
from everybit_torch.cli.compare.experiment import train
from everybit_torch.cli.compare.results import Record
from everybit_torch.cli.sweep.options import SweepPlan
from everybit_torch.cli.sweep.running import VALIDATIONS, Best, Silent, trainee


@dataclass(frozen=True, slots=True)
class Final:
    """One optimizer at its best learning rate, from seeds that did not choose it.

    Attributes:
        optimizer: Name it is shown under.
        learning_rate: The best of the sweep.
        records: Of each seed.
    """

    optimizer: str
    learning_rate: float
    records: tuple[Record, ...]

    @property
    def losses(self) -> list[float]:
        """On held-out text, of the finished models, in nats per byte."""
        return [record.validation[-1].loss for record in self.records]

    @property
    def loss(self) -> float:
        """Their mean; NaN if a seed diverged."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float | None:
        """The sample standard deviation of :attr:`losses`; None of one seed, or where one diverged."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.loss) else None

    @property
    def step_seconds(self) -> float:
        """Mean of all steps but the first five: forward, backward, clipping and the optimizer; NaN if there were no others."""
        found = [seconds for record in self.records for seconds in record.training_seconds]
        return statistics.fmean(found) if found else math.nan

    @property
    def optimizer_seconds(self) -> float:
        """The optimizer's part of :attr:`step_seconds`."""
        found = [seconds for record in self.records for seconds in record.optimizer_seconds]
        return statistics.fmean(found) if found else math.nan

    def steps_to(self, target: float) -> float | None:
        """Mean number of steps after which the loss on held-out text is at most this; None if a seed does not get there."""
        found = [steps_to(record, target) for record in self.records]
        return (
            statistics.fmean(steps) if len(steps := [one for one in found if one is not None]) == len(found) else None
        )

    def seconds_to(self, target: float) -> float | None:
        """:meth:`steps_to`, times the mean time of a step; validation is not counted."""
        steps = self.steps_to(target)
        return None if steps is None else steps * self.step_seconds


def steps_to(record: Record, target: float) -> float | None:
    """The step at which the loss on held-out text first is at most ``target``, on the line between two validations; None: it never is.

    Where the first validation is there already, its step is returned, which is too many.
    """
    before = None
    for point in record.validation:
        if point.loss <= target:
            if before is None:
                return float(point.step)
            return before.step + (point.step - before.step) * (before.loss - target) / (before.loss - point.loss)
        before = point
    return None


def target_of(plan: SweepPlan, finals: Sequence[Final]) -> float:
    """The loss to count to: as given, or the greatest that the first optimizer ends with, which it so reaches from all its seeds."""
    if plan.options.target is not None:
        return plan.options.target
    order = list(plan.optimizers)
    first = min(finals, key=lambda final: order.index(final.optimizer))
    return max((loss for loss in first.losses if math.isfinite(loss)), default=math.inf)


def run_finals(
    plan: SweepPlan, corpus: Corpus, best: Sequence[Best], tell: Callable[[], None]
) -> tuple[list[Final], bool]:
    """Train the best of each optimizer that has one from ``final_seeds`` seeds after those of the sweep.

    Each step goes to all optimizers in turn, so that a busy machine slows all of them alike.

    Args:
        plan: What was swept.
        corpus: The text.
        best: Of the sweep.
        tell: Called after each seed.

    Returns:
        In the order of ``best``; after Ctrl-C with the seeds that were done, or nothing, and True.
    """
    entrants = [one.run for one in best if math.isfinite(one.run.loss)]
    records: dict[str, list[Record]] = {run.optimizer: [] for run in entrants}
    seeds = range(plan.options.seeds, plan.options.seeds + plan.options.final_seeds)
    interrupted = False
    for seed in seeds:
        trainees = [trainee(plan, run.optimizer, run.factor, seed) for run in entrants]
        try:
            train(trainees, corpus, plan.training, plan.device, seed, Silent(), validations=VALIDATIONS)
        except KeyboardInterrupt:
            interrupted = True
            break
        for one in trainees:
            records[one.name].append(one.record())
        tell()
    done = [run for run in entrants if records[run.optimizer]]
    return [Final(run.optimizer, run.learning_rate, tuple(records[run.optimizer])) for run in done], interrupted
