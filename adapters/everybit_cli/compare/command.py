"""``everybit compare``, from options to files."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console

from everybit_cli.compare.corpus import Corpus, load_corpus
from everybit_cli.compare.options import DEFAULT_POLICIES, CompareOptions, Plan, check, check_context
from everybit_cli.compare.progress import Bars
from everybit_cli.compare.report import sheet, throughput
from everybit_cli.compare.results import summarize
from everybit_cli.compare.training import new_model, run
from everybit_cli.errors import INTERRUPTED, OptionError
from everybit_cli.files import check_out, keep_results
from everybit_cli.machine import machine, threads, versions
from everybit_cli.optimizers import Chosen, show_routing
from everybit_cli.output import Results, counted, show
from everybit_torch.config import policy_to_dict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 3  # of the JSON file. From 3 on hyperparameters have torch's names.
FEW_STEPS = 100

CLOSING = (
    "One learning rate is one point: where updates are small plain bfloat16 (PURE_BF16) loses much, where they are large little, and"
    " LEAN_BF16 nothing. The default model, 400 steps, two seeds: +0.64 at 3e-5, +0.33 at 1e-4, +0.09 at 3e-4, +0.03 at 1e-3, nothing at"
    " 3e-3."
)
"""Figures of benchmarks/small_updates.py."""


def main(options: CompareOptions, console: Console, command: str) -> Results:
    """Train, report, and write ``compare.json`` and ``compare.png``; after Ctrl-C what there is, under other names.

    Raises:
        OptionError: An option that cannot be used; no training was begun.
        KeyboardInterrupt: Interrupted before the first validation; no file was written.
    """
    plan = check(options)
    try:
        corpus = load_corpus()
    except OSError as error:
        raise OptionError("the text to train on", error, "a Python that has its standard library's source") from None
    check_context(options, corpus)
    check_out(options.out)
    named = dict(new_model(plan.size, 0).named_parameters())
    parameters = sum(p.numel() for p in named.values())
    title = (
        f"{title_of(plan.optimizer)}, {parameters:,} parameters ({options.model}), {counted(options.steps, 'step')} of"
        f" {options.batch} x {options.context} bytes, learning rate {plan.options.lr:g}"
    )
    console.print(f"{title}\n{about(corpus)}", highlight=False)
    show_routing(plan.optimizer, named, console)
    if absent := [name for name in DEFAULT_POLICIES if not options.policies and name not in plan.policies]:
        console.print(
            f"Without {', '.join(absent)}: under it some state of {plan.optimizer.entry.name} would stop moving."
        )

    started = datetime.now(UTC)
    clock = time.perf_counter()
    with threads(options.threads), Bars(console, list(plan.policies), options.steps * len(plan.seeds)) as bars:
        records, interrupted = run(plan, corpus, bars)
        where = machine(plan.device)
    seconds = time.perf_counter() - clock

    rows = summarize(records, plan.reference)
    steps, seeds = len(records[0].losses), tuple(dict.fromkeys(record.seed for record in records))
    results = {
        "format": FORMAT, "command": command, "started": started.isoformat(timespec="seconds"), "seconds": seconds,
        "interrupted": interrupted, "versions": versions(), "machine": where, **_inputs(plan, corpus, parameters),
        "summary": [asdict(row) for row in rows], "records": [asdict(record) for record in records],
    }  # fmt: skip

    def picture() -> Figure:
        from everybit_cli.compare.pictures import draw

        return draw(records, reference=plan.reference, title=title)

    # Results of a run that went to its end are not replaced by less.
    name = "compare-interrupted" if interrupted else "compare"
    wrote = keep_results(options.out, name, results, picture)
    console.print()
    show(sheet(rows, reference=plan.reference, seeds=len(seeds), compiled=options.compile), console)
    if speeds := throughput(rows, options.batch * options.context):
        console.print(f"Text per second, forward and backward pass included: {speeds}", highlight=False)
    if steps < FEW_STEPS:
        console.print(
            f"After {counted(steps, 'step')} differences between policies are noise; {FEW_STEPS} show something."
        )
    if {"PURE_BF16", "FP32"} <= {row.policy for row in rows}:
        console.print(CLOSING, highlight=False)
    if interrupted:
        done = f"step {steps} of {options.steps}, seeds {', '.join(map(str, seeds))}"
        console.print(f"Interrupted: this is what there was at {done}.", highlight=False)
    console.print(f"\n{seconds:.0f} s. {wrote}", highlight=False, soft_wrap=True)
    return Results(results, INTERRUPTED if interrupted else 0)


def title_of(optimizer: Chosen) -> str:
    """The optimizer's title, and the hyperparameters that are not its defaults."""
    listed = ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in optimizer.others.items()
    )
    return optimizer.entry.title + (f" ({listed})" if listed else "")


def _inputs(plan: Plan, corpus: Corpus, parameters: int) -> dict[str, Any]:
    """Return everything that the run depended on, so that it can be repeated."""
    return {
        "options": asdict(plan.options), "optimizer": plan.optimizer.described(), "seeds": plan.seeds, "reference": plan.reference,
        "policies": {name: policy_to_dict(policy) for name, policy in plan.policies.items()},
        "model": {"name": plan.options.model, **asdict(plan.size), "parameters": parameters},
        "corpus": {
            "root": corpus.root, "sha256": corpus.digest,
            "training_files": corpus.training_files, "training_bytes": len(corpus.training),
            "held_out_files": corpus.held_out_files, "held_out_bytes": len(corpus.held_out),
        },
    }  # fmt: skip


def about(corpus: Corpus) -> str:
    """What text is trained on."""
    return (
        f"Text: {corpus.training_files} files of {corpus.root} ({len(corpus.training) / 1e6:.1f} MB);"
        f" held out: {corpus.held_out_files} ({len(corpus.held_out) / 1e6:.1f} MB)"
    )
