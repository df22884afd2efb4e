"""All policies, trained side by side: each step goes to every model in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

from typing import Protocol

from everybit_torch.cli.compare.corpus import Batches, Corpus, even_windows
from everybit_torch.cli.compare.options import AUTOCAST, Plan
from everybit_torch.cli.compare.results import Record
from everybit_torch.cli.compare.training import Trainee

VALIDATIONS = 10
VALIDATION_BYTES = 16384


class Watcher(Protocol):
    """Somebody who is told how it goes."""

    def trained(self, policy: str, loss: float) -> None:
        """A step of this policy's model, and the training loss."""

    def validated(self, policy: str, loss: float) -> None:
        """Its loss on the held-out text."""


def run(plan: Plan, corpus: Corpus, watcher: Watcher) -> list[Record]:
    """Train every policy from every seed."""
    return [record for seed in plan.seeds for record in _run_seed(plan, corpus, watcher, seed)]


def validation_steps(steps: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which models are validated: evenly spread, the last one always."""
    return frozenset(-(-steps * part // VALIDATIONS) for part in range(1, VALIDATIONS + 1))


def _run_seed(plan: Plan, corpus: Corpus, watcher: Watcher, seed: int) -> list[Record]:
    options = plan.options
    trainees = [
        Trainee(name, policy, size=plan.size, seed=seed, options=options, device=plan.device, autocast=name == AUTOCAST)
        for name, policy in plan.policies.items()
    ]
    batches = Batches(corpus.training, batch=options.batch, context=options.context, seed=seed)
    held_out = even_windows(
        corpus.held_out, count=max(1, VALIDATION_BYTES // options.context), context=options.context
    ).to(plan.device)
    when = validation_steps(options.steps)
    for step in range(1, options.steps + 1):
        windows = batches.next().to(plan.device)
        for trainee in trainees:
            watcher.trained(trainee.name, trainee.train(windows))
            if step in when:
                watcher.validated(trainee.name, trainee.validate(held_out, 4 * options.batch))
    return [trainee.record() for trainee in trainees]
