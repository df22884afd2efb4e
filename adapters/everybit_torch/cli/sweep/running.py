"""The runs of a sweep, one after the other, and what is made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everybit_torch.cli.compare.corpus import Corpus
from everybit_torch.cli.compare.experiment import train
from everybit_torch.cli.compare.model import BYTES
from everybit_torch.cli.compare.results import Record
from everybit_torch.cli.compare.training import Trainee
from everybit_torch.cli.policies import AUTOCAST
from everybit_torch.cli.sweep.options import SweepPlan

WORST = 1.1 * math.log(BYTES)
"""A loss above this is called divergence: that of a model which thinks all bytes equally likely is ``log(256)``."""


@dataclass(frozen=True, slots=True)
class Run:
    """One optimizer at one learning rate, from all seeds.

    Attributes:
        optimizer: Name it is shown under.
        factor: Of the default learning rate.
        learning_rate: Their product.
        records: Of each seed; the policy they name is the optimizer.
    """

    optimizer: str
    factor: float
    learning_rate: float
    records: tuple[Record, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds of the finished models' losses on held-out text, in nats per byte; infinite if the run diverged."""
        mean = statistics.fmean(record.validation[-1].loss for record in self.records)
        return mean if mean <= WORST else math.inf

    @property
    def spread(self) -> float | None:
        """The sample standard deviation over seeds; None of one seed, or where a run diverged."""
        losses = [record.validation[-1].loss for record in self.records]
        return statistics.stdev(losses) if len(losses) > 1 and math.isfinite(self.loss) else None


@dataclass(frozen=True, slots=True)
class Best:
    """The best learning rate of an optimizer, among all that were tried.

    Attributes:
        run: At that learning rate.
        worst: The greatest loss of the other runs that did not diverge.
        diverged: How many did.
        at_edge: Whether it is the least or the greatest learning rate that was tried: another one may be better.
    """

    run: Run
    worst: float
    diverged: int
    at_edge: bool


class _Silent:
    def trained(self, policy: str, loss: float) -> None:
        """Nothing is shown of single steps."""

    def validated(self, policy: str, loss: float) -> None:
        """Nor of validations."""


def sweep(plan: SweepPlan, corpus: Corpus, tell: Callable[[Run], None]) -> tuple[list[Run], bool]:
    """Train every optimizer at every learning rate from every seed.

    Args:
        plan: What to train.
        corpus: The text.
        tell: Told of each run that is done.

    Returns:
        All runs; after Ctrl-C those of the optimizers that were done with all their learning rates, and True.

    Raises:
        KeyboardInterrupt: Before one of them was.
    """
    done: list[Run] = []
    for name, chosen in plan.optimizers.items():
        runs: list[Run] = []
        try:
            for factor in plan.options.factors:
                assert chosen.learning_rate is not None  # was checked
                rate = factor * chosen.learning_rate
                own = chosen.with_hyperparameters({"learning_rate": rate}, option="--factors")
                records: list[Record] = []
                for seed in range(plan.options.seeds):
                    shown, policy = plan.policy
                    trainee = Trainee(
                        name, policy, size=plan.size, seed=seed, options=plan.training, device=plan.device,
                        autocast=shown == AUTOCAST, optimizer=own,
                    )  # fmt: skip
                    train([trainee], corpus, plan.training, plan.device, seed, _Silent())
                    records.append(trainee.record())
                runs.append(Run(name, factor, rate, tuple(records)))
                tell(runs[-1])
        except KeyboardInterrupt:
            if not done:
                raise
            return done, True
        done += runs
    return done, False


def best_of_each(runs: Sequence[Run]) -> list[Best]:
    """The best run of each optimizer; the optimizer with the least loss first."""
    found = []
    for name in dict.fromkeys(run.optimizer for run in runs):
        own = sorted((run for run in runs if run.optimizer == name), key=lambda run: run.factor)
        best = min(own, key=lambda run: run.loss)
        finite = [run.loss for run in own if math.isfinite(run.loss)]
        edges = (own[0], own[-1]) if len(own) > 1 else ()
        found.append(Best(best, max(finite, default=math.inf), len(own) - len(finite), best in edges))
    return sorted(found, key=lambda one: one.run.loss)
