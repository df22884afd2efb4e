"""All policies, trained side by side: each step goes to every model in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

from typing import Protocol

from everybit_cli.compare.corpus import Batches, Corpus, even_windows
from everybit_cli.compare.options import Plan
from everybit_cli.compare.results import Record
from everybit_cli.compare.training import Trainee
from everybit_cli.policies import AUTOCAST

VALIDATIONS = 10
VALIDATION_BYTES = 16384


class Watcher(Protocol):
    """Receives losses as training goes on."""

    def trained(self, policy: str, loss: float) -> None:
        """A step of this policy's model, and the training loss."""

    def validated(self, policy: str, loss: float) -> None:
        """Its loss on the held-out text."""


def run(plan: Plan, corpus: Corpus, watcher: Watcher) -> tuple[list[Record], bool]:
    """Train every policy from every seed.

    Returns:
        The records, and whether Ctrl-C ended the run. Then they are of the finished seeds; without a finished seed, of the steps that all
        policies of the first seed have in common: up to the last step after which each of them was validated.

    Raises:
        KeyboardInterrupt: Before anything was validated.
    """
    finished: list[Record] = []
    for seed in plan.seeds:
        found, interrupted = _run_seed(plan, corpus, watcher, seed)
        if interrupted:
            if not finished and not found:
                raise KeyboardInterrupt
            return finished or found, True
        finished += found
    return finished, False


def validation_steps(steps: int) -> frozenset[int]:
    """Return the steps, counted from 1, after which models are validated: evenly spread, the last one always."""
    return frozenset(-(-steps * part // VALIDATIONS) for part in range(1, VALIDATIONS + 1))


def _run_seed(plan: Plan, corpus: Corpus, watcher: Watcher, seed: int) -> tuple[list[Record], bool]:
    """Train models on the same batches, step by step, and validate them now and then."""
    options = plan.options
    trainees = [
        Trainee(name, policy, size=plan.size, seed=seed, options=options, device=plan.device, autocast=name == AUTOCAST)
        for name, policy in plan.policies.items()
    ]
    batches = Batches(corpus.training, batch=options.batch, context=options.context, seed=seed)
    count = max(1, VALIDATION_BYTES // options.context)
    held_out = even_windows(corpus.held_out, count=count, context=options.context).to(plan.device)
    when = validation_steps(options.steps)
    try:
        for step in range(1, options.steps + 1):
            windows = batches.next().to(plan.device)
            for trainee in trainees:
                watcher.trained(trainee.name, trainee.train(windows))
                if step in when:
                    watcher.validated(trainee.name, trainee.validate(held_out, 4 * options.batch))
    except KeyboardInterrupt:
        return _in_common([trainee.record() for trainee in trainees]), True
    return [trainee.record() for trainee in trainees], False


def _in_common(records: list[Record]) -> list[Record]:
    """Records of runs that were interrupted, each up to the last step that all of them were validated after."""
    count = min(len(record.validation) for record in records)
    if not count:
        return []
    return [record.until(record.validation[count - 1].step) for record in records]
