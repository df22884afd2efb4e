"""``everybit plan``, from options to a table, advice, a file and a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from everybit_cli.errors import FAILED, OptionError
from everybit_cli.files import check_out, keep_results
from everybit_cli.machine import versions
from everybit_cli.optimizers import require_policies
from everybit_cli.output import Results, Sheet, counted, show
from everybit_cli.plan.advice import Planned, best_of, enough_ranks, reasons, sized, too_small, unit_of
from everybit_cli.plan.options import PlanOptions, Subject, subject
from everybit_torch.planning.plan import Plan, plan
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.sharded.strategies import Strategy

FORMAT = 3  # of the JSON file. From 3 on hyperparameters have torch's names.


def main(options: PlanOptions, console: Console, command: str) -> Results:
    """Plan, and show; write ``plan.json`` and ``plan.png`` if a folder is given.

    Raises:
        OptionError: An option that cannot be used; no model was planned.
    """
    console.print(f"Planning {options.model}: up to half a minute for a large model.", highlight=False)
    chosen = subject(options)
    require_policies(chosen.optimizer, chosen.policies)
    if options.out is not None:
        check_out(options.out)
    rows = _plan_all(options, chosen, console)
    title = _title(options, rows[0].plan, chosen)
    console.print(title, highlight=False)
    best = None if chosen.budget is None else best_of(rows, chosen.budget)
    show(_sheet(rows, chosen.budget), console)
    said = list(dict.fromkeys(f"{row.plan.whole_tensors}." for row in rows if row.plan.whole_tensors))
    advice: dict[str, Any] = {}
    if chosen.budget is not None:
        enough: dict[str, int | None] = {}
        if best is None:
            enough = enough_ranks(
                list(chosen.policies), options.ranks, chosen.budget,
                lambda name, ranks: _planned(options, chosen, name, "optim_grads_params", ranks),
            )  # fmt: skip
            why = too_small(rows, enough, chosen.budget)
        else:
            why = reasons(rows, best, chosen.budget, options.ranks, chosen.optimizer)
        said += why
        advice = {
            "budget": chosen.budget, "reasons": why, "enough_ranks": enough,
            "advice": None if best is None else {"policy": best.policy, "strategy": best.strategy},
        }  # fmt: skip
    for line in said:
        console.print(line, highlight=False)
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "options": asdict(options),
        "optimizer": chosen.optimizer.described(), **advice,
        "plans": [_record(row, chosen.budget) for row in rows],
    }  # fmt: skip
    if options.out is not None:
        from everybit_cli.plan.pictures import draw

        where = keep_results(options.out, "plan", results, lambda: draw(rows, title=title, budget=chosen.budget))
        console.print(where, highlight=False, soft_wrap=True)
    return Results(results, FAILED if chosen.budget is not None and best is None else 0)


def _plan_all(options: PlanOptions, chosen: Subject, console: Console) -> list[Planned]:
    """Plan every policy under every strategy, and show how far it is."""
    found = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("planning", total=len(chosen.policies) * len(options.planned_strategies))
        for name in chosen.policies:
            for strategy in options.planned_strategies:
                found.append(Planned(name, strategy, _planned(options, chosen, name, strategy, options.ranks)))
                progress.advance(task)
    return found


def _planned(options: PlanOptions, chosen: Subject, name: str, strategy: Strategy, ranks: int) -> Plan:
    """Plan one policy under one strategy, for the rank with the most elements of whole tensors.

    Raises:
        OptionError: The policy does not go with the model.
    """

    def of_rank(rank: int) -> Plan:
        outer = options.outer_strategy if strategy == "optim_grads_params" else "no_shard"
        settings = StepperOptions(
            policy=chosen.policies[name], strategy=strategy, outer=outer, units=chosen.units, offload=options.offload
        )
        return plan(
            chosen.model, chosen.optimizer.algorithm.transform(), settings, ranks=(options.outer, ranks), rank=rank,
            microbatches=options.microbatches, device=options.device,
        )  # fmt: skip

    try:
        first = of_rank(0)
        return of_rank(first.whole_tensors.fullest) if first.whole_tensors and first.whole_tensors.fullest else first
    except (TypeError, ValueError) as error:
        raise OptionError.saying(error, f"--policies: {name} does not go with the model") from None


def _title(options: PlanOptions, first: Plan, chosen: Subject) -> str:
    ranks = ("" if options.outer == 1 else f"{options.outer} x ") + counted(options.ranks, "rank")
    if options.outer_strategy == "optim":
        ranks += " (outer: optim under optim_grads_params, else no_shard)"
    passes = f"{options.microbatches} microbatch{'es' * (options.microbatches > 1)} a step"
    budget = "" if chosen.budget is None else f" The budget is {sized(chosen.budget)}."
    return (
        f"{options.model}: {first.parameters:,} parameters ({options.dtype}), {chosen.optimizer.shown}, {ranks}, {passes},"
        f" {chosen.unit_names}. Bytes of one rank.{budget}"
    )


def _sheet(rows: list[Planned], budget: int | None) -> Sheet:
    """Narrow enough for a terminal of 80 columns."""
    unit, size = unit_of(max(max(row.plan.peak_bytes, row.plan.wire_bytes) for row in rows))
    caption = (
        f"{unit} of one rank; main, rest: main weights or residuals; transient: the most on top at any moment; sent: in a step."
        " Activations and buffers are not counted. (optim_grads_params: transient is an estimate.)"
        + ("" if budget is None else " What exceeds the budget is in brackets.")
    )
    heads = ["bytes/\nparam", "model", "main,\nrest", "grads", "state", "kept", "tran-\nsient", "sent"]
    heads += ["host"] * any(row.plan.host for row in rows)
    sheet = Sheet(("", *heads), caption=caption)
    previous = ""
    for row in rows:
        if row.policy != previous:
            sheet.rows.append((row.policy,))
        previous = row.policy
        found = row.plan.persistent
        beside = found.get("main parameters", 0) + found.get("compensation", 0)
        known = ("parameters", "main parameters", "compensation", "gradients")
        state = sum(nbytes for name, nbytes in found.items() if name not in known)
        sizes = (found.get("parameters", 0), beside, found.get("gradients", 0), state, row.plan.persistent_bytes)
        transient = max(row.plan.transient.values())
        host = [row.plan.host_bytes] * ("host" in heads)
        cells = (_in_units(size, nbytes) for nbytes in (*sizes, transient, row.plan.wire_bytes, *host))
        name = row.strategy if budget is None or row.plan.peak_bytes <= budget else f"({row.strategy})"
        sheet.rows.append((name, f"{row.plan.bytes_per_param:.2f}", *cells))
    return sheet


def _in_units(size: int, nbytes: int) -> str:
    """Bytes in units of ``size`` bytes, with three digits or more."""
    return f"{nbytes / size:.2f}" if nbytes < 100 * size else f"{nbytes / size:.1f}"


def _record(row: Planned, budget: int | None) -> dict[str, Any]:
    found = row.plan
    record = {
        "policy": row.policy, "strategy": row.strategy, "parameters": found.parameters, "padding": found.padding,
        "bytes_per_param": found.bytes_per_param, "persistent": dict(found.persistent), "transient": dict(found.transient),
        "wire": dict(found.wire), "host": dict(found.host), "persistent_bytes": found.persistent_bytes, "peak_bytes": found.peak_bytes,
        "wire_bytes": found.wire_bytes, "whole_tensors": None if found.whole_tensors is None else asdict(found.whole_tensors),
    }  # fmt: skip
    return record if budget is None else record | {"fits": found.peak_bytes <= budget}
