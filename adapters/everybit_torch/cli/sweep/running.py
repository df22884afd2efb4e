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

VALIDATIONS = 20
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


class Silent:
    """Is told of steps, and shows nothing of them."""

    def trained(self, policy: str, loss: float) -> None:
        """Nothing is shown of single steps."""

    def validated(self, policy: str, loss: float) -> None:
        """Nor of validations."""


def sweep(plan: SweepPlan, corpus: Corpus, tell: Callable[[Run, int], None]) -> tuple[list[Run], bool]:
    """Train every optimizer at every learning rate from every seed.

    Args:
        plan: What to train.
        corpus: The text.
        tell: Told of each run that is done, and of how many runs of this optimizer are known to follow.

    Returns:
        All runs; after Ctrl-C those of the optimizers that were done with all their learning rates, and True.

    Raises:
        KeyboardInterrupt: Before one of them was.
    """
    done: list[Run] = []
    for name in plan.optimizers:
        try:
            done += _sweep_one(plan, corpus, name, tell)
        except KeyboardInterrupt:
            if not done:
                raise
            return done, True
    return done, False


def _sweep_one(plan: SweepPlan, corpus: Corpus, name: str, tell: Callable[[Run, int], None]) -> list[Run]:
    factors = list(plan.options.factors)
    runs: list[Run] = []
    left = plan.options.extend
    while len(runs) < len(factors):
        factor = factors[len(runs)]
        records = []
        for seed in range(plan.options.seeds):
            one = trainee(plan, name, factor, seed)
            train([one], corpus, plan.training, plan.device, seed, Silent(), validations=VALIDATIONS)
            records.append(one.record())
        runs.append(Run(name, factor, learning_rate(plan, name, factor), tuple(records)))
        if len(runs) == len(factors) and left:
            factors += [further] if (further := next_factor(runs)) is not None else []
            left -= 1
        tell(runs[-1], len(factors) - len(runs))
    return runs


def trainee(plan: SweepPlan, name: str, factor: float, seed: int) -> Trainee:
    """A model with an optimizer of the plan, at a factor of its default learning rate."""
    shown, policy = plan.policy
    rate = {"learning_rate": learning_rate(plan, name, factor)}
    return Trainee(
        name, policy, size=plan.size, seed=seed, options=plan.training, device=plan.device, autocast=shown == AUTOCAST,
        optimizer=plan.optimizers[name].with_hyperparameters(rate, option="--factors"), probed=False,
    )  # fmt: skip


def learning_rate(plan: SweepPlan, name: str, factor: float) -> float:
    """That of an optimizer of the plan, at a factor of its default."""
    default = plan.optimizers[name].learning_rate
    assert default is not None  # was checked
    return factor * default


def next_factor(runs: Sequence[Run]) -> float | None:
    """The factor by which the row of one optimizer's factors goes on where its best learning rate is; None where that is not at an end.

    It repeats the last ratio but one, so that 1, 3, 10 is followed by 30 and 100, and preceded by 0.3 and 0.1.
    """
    own = sorted(runs, key=lambda run: run.factor)
    best = min(own, key=lambda run: run.loss)
    if best not in (own[0], own[-1]) or not math.isfinite(best.loss):
        return None
    row = [run.factor for run in (own if best is own[-1] else own[::-1])]
    ratio = row[-1] / row[-2] if len(row) == 2 else row[-2] / row[-3]
    return float(f"{row[-1] * ratio:.6g}")


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
