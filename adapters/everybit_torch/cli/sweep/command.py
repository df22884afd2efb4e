"""``everybit sweep``, from options to files."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from everybit_torch.cli.compare.command import about
from everybit_torch.cli.compare.corpus import load_corpus
from everybit_torch.cli.compare.options import check_context
from everybit_torch.cli.compare.training import new_model
from everybit_torch.cli.device import threads
from everybit_torch.cli.errors import INTERRUPTED, OptionError
from everybit_torch.cli.files import check_out, keep_results
from everybit_torch.cli.machine import machine, versions
from everybit_torch.cli.optimizers import show_routing
from everybit_torch.cli.output import Results, Sheet, counted, show
from everybit_torch.cli.sweep.finals import Final, run_finals, target_of
from everybit_torch.cli.sweep.options import SweepOptions, SweepPlan, checked
from everybit_torch.cli.sweep.running import Best, Run, best_of_each, sweep
from everybit_torch.config import policy_to_dict

FORMAT = 1


def run_sweep(options: SweepOptions, console: Console, command: str) -> Results:
    """Train, report, and write ``sweep.json`` and ``sweep.png``; after Ctrl-C what there is, under other names.

    Raises:
        OptionError: An option that cannot be used; nothing was done.
        KeyboardInterrupt: Before the first optimizer was done.
    """
    plan = checked(options)
    try:
        corpus = load_corpus()
    except OSError as error:
        raise OptionError("the text to train on", error, "a Python that has its standard library's source") from None
    check_context(plan.training, corpus)
    check_out(options.out)
    named = dict(new_model(plan.size, 0).named_parameters())
    parameters = sum(p.numel() for p in named.values())
    title = (
        f"{counted(len(plan.optimizers), 'optimizer')} at {counted(len(options.factors), 'learning rate')} each, {plan.policy[0]},"
        f" {parameters:,} parameters ({options.model}), {counted(options.steps, 'step')} of"
        f" {options.batch} x {options.context} bytes, {_seeds(options)}"
    )
    console.print(f"{title}\n{about(corpus)}", highlight=False)
    for chosen in plan.optimizers.values():
        show_routing(chosen, named, console)
    started, clock = datetime.now(UTC), time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with threads(options.threads), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(plan.optimizers) * len(options.factors))
        swept: list[str] = []

        def tell(run: Run, left: int) -> None:
            swept.append(run.optimizer)
            others = len(plan.optimizers) - len(set(swept))
            progress.update(task, completed=len(swept), total=len(swept) + left + others * len(options.factors))
            console.print(f"{run.optimizer} at {run.learning_rate:g}: {_loss(run.loss)}", highlight=False)

        runs, interrupted = sweep(plan, corpus, tell)
        best = best_of_each(runs)
        finals: list[Final] = []
        if options.final_seeds and not interrupted:
            seeds = progress.add_task("seeds", total=options.final_seeds)
            finals, interrupted = run_finals(plan, corpus, best, lambda: progress.advance(seeds))
        where = machine(plan.device)
    target = target_of(plan, finals) if finals else None
    results = {
        "format": FORMAT, "command": command, "started": started.isoformat(timespec="seconds"),
        "seconds": time.perf_counter() - clock, "interrupted": interrupted, "versions": versions(), "machine": where,
        "options": asdict(options), "policy": {"name": plan.policy[0], **policy_to_dict(plan.policy[1])},
        "optimizers": {name: chosen.described() for name, chosen in plan.optimizers.items()},
        "model": {"name": options.model, **asdict(plan.size), "parameters": parameters},
        "corpus": {"root": corpus.root, "sha256": corpus.digest},
        "best": [_described(one) for one in best],
        "runs": [{**asdict(run), "loss": run.loss, "spread": run.spread} for run in runs],
        "target": target, "finals": [_final(final, target) for final in finals],
    }  # fmt: skip
    console.print()
    show(_sheet(plan, best), console)
    if any(one.at_edge for one in best):
        console.print("* at the edge of the sweep: a learning rate outside of it may be better (--factors, --extend).")
    if target is not None:
        console.print()
        show(_finals_sheet(finals, target), console)
    if interrupted:
        console.print(
            "Interrupted: these are the optimizers that were done with all their learning rates, and the seeds that were."
        )
    # Results of a run that went to its end are not replaced by less.
    from everybit_torch.cli.sweep.pictures import draw

    name = "sweep-interrupted" if interrupted else "sweep"
    keep_results(
        options.out, name, results, lambda picture: draw(picture, runs, best, finals, target, title=title), console
    )
    return Results(results, INTERRUPTED if interrupted else 0)


def _seeds(options: SweepOptions) -> str:
    return counted(options.seeds, "seed")


def _sheet(plan: SweepPlan, best: Sequence[Best]) -> Sheet:
    options = plan.options
    several = options.seeds > 1
    spread = (
        "± is the standard deviation over seeds, and smaller differences say nothing."
        if several
        else "One seed does not tell which differences are noise; --seeds 3 does."
    )
    further = f", and up to {options.extend} further where the best was the last" if options.extend else ""
    caption = (
        f"Losses in nats per byte of held-out text after {counted(options.steps, 'step')}. Every optimizer had the factors"
        f" {' '.join(f'{factor:g}' for factor in options.factors)} of its default learning rate{further}, the same batches, and the same"
        " schedule, also where it is meant to go without one; its other hyperparameters are its defaults or as named. State: bytes per"
        f" parameter. {spread} What a small model learns in a few hundred steps does not say which optimizer is best for a large model or a"
        " long run."
    )
    sheet = Sheet(("optimizer", "loss", "learning\nrate", "factor", "worst", "diverged", "state"), caption=caption)
    for one in best:
        uses = one.run.records[0].bytes_predicted
        state = sum(size for use, size in uses.items() if use not in ("parameter", "compensation", "gradient"))
        sheet.rows.append(
            (
                one.run.optimizer,
                _loss(one.run.loss) + ("" if one.run.spread is None else f" ±{one.run.spread:.4f}"),
                f"{one.run.learning_rate:g}{'*' if one.at_edge else ''}",
                f"{one.run.factor:g}",
                _loss(one.worst),
                str(one.diverged),
                f"{state:.2f}",
            )
        )
    return sheet


def _finals_sheet(finals: Sequence[Final], target: float) -> Sheet:
    seeds = len(finals[0].records)
    caption = (
        f"Each at its best learning rate, from {seeds} {'seed' if seeds == 1 else 'seeds'} that the sweep did not use, side by side: means,"
        f" and ± the standard deviation over seeds. Steps and seconds are those to a loss of {target:.4f}; seconds are steps times the mean"
        " time of a step, in which the optimizer's part stands in brackets. A dash: a seed did not get there."
    )
    sheet = Sheet(("optimizer", "loss", "steps", "seconds", "ms per step"), caption=caption)
    for final in finals:
        steps, seconds = final.steps_to(target), final.seconds_to(target)
        sheet.rows.append(
            (
                final.optimizer,
                _loss(final.loss) + ("" if final.spread is None else f" ±{final.spread:.4f}"),
                "-" if steps is None else f"{steps:.0f}",
                "-" if seconds is None else f"{seconds:.1f}",
                f"{1e3 * final.step_seconds:.1f} ({1e3 * final.optimizer_seconds:.1f})",
            )
        )
    return sheet


def _final(final: Final, target: float | None) -> dict[str, Any]:
    assert target is not None  # there are finals
    return {
        **asdict(final), "loss": final.loss, "spread": final.spread, "steps_to_target": final.steps_to(target),
        "seconds_to_target": final.seconds_to(target), "step_seconds": final.step_seconds,
        "optimizer_seconds": final.optimizer_seconds,
    }  # fmt: skip


def _described(one: Best) -> dict[str, Any]:
    return {
        "optimizer": one.run.optimizer, "learning_rate": one.run.learning_rate, "factor": one.run.factor, "loss": one.run.loss,
        "spread": one.run.spread, "worst": one.worst, "diverged": one.diverged, "at_edge": one.at_edge,
    }  # fmt: skip


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"
