"""``everybit plan``, from options to a table, a file and a picture."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from everybit.base import FloatDType
from everybit_torch.cli.errors import OptionError
from everybit_torch.cli.files import check_out, keep_results
from everybit_torch.cli.machine import versions
from everybit_torch.cli.optimizers import require_policies
from everybit_torch.cli.output import Results, Sheet, counted, show
from everybit_torch.cli.plan.options import DTypeName, PlanOptions
from everybit_torch.cli.policies import named_policy
from everybit_torch.cli.setup import (
    DTYPES,
    Planned,
    Subject,
    in_units,
    plan_all,
    planned,
    subject,
    unit_of,
)
from everybit_torch.planning.plan import Plan
from everybit_torch.sharded.labelling import AnyPrecision
from everybit_torch.sharded.mixed_precision import MixedPrecision
from everybit_torch.sharded.strategies import Strategy

FORMAT = 1
THREE_DTYPES = "three-dtypes"


def run_plan(options: PlanOptions, console: Console, command: str) -> Results:
    """Plan, and show; write ``plan.json`` and ``plan.png`` if a folder is given.

    Raises:
        OptionError: An option that cannot be used; nothing was done.
    """
    if options.outer < 1:
        raise OptionError("--outer", options.outer, "a whole number, at least 1")
    if not options.strategies:
        raise OptionError("--strategies", "none", "at least one")
    if options.outer_strategy == "optim":
        accepted = "optim with --outer 2 or more, and with optim_grads_params among --strategies"
        if options.outer == 1:
            raise OptionError("--outer-strategy", "optim with --outer 1", accepted)
        if "optim_grads_params" not in options.strategies:
            raise OptionError("--outer-strategy", f"optim with --strategies {' '.join(options.strategies)}", accepted)
    policies = _policies(options)
    chosen = subject(options)
    require_policies(chosen.optimizer, policies)
    if options.out is not None:
        check_out(options.out)
    rows = plan_all(policies, options.strategies, partial(_plan, options, chosen), console)
    title = _title(options, rows[0].plan, chosen)
    console.print(title, highlight=False)
    show(_sheet(rows), console)
    for said in dict.fromkeys(str(row.plan.whole_tensors) for row in rows if row.plan.whole_tensors):
        console.print(f"{said}.", highlight=False)
    records = [{"policy": row.policy, "strategy": row.strategy, **_record(row.plan)} for row in rows]
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "options": asdict(options),
        "optimizer": chosen.optimizer.described(), "plans": records,
    }  # fmt: skip
    if options.out is not None:
        from everybit_torch.cli.plan.pictures import draw

        drawn: list[tuple[str, Strategy, Plan]] = [(row.policy, row.strategy, row.plan) for row in rows]
        keep_results(options.out, "plan", results, lambda picture: draw(picture, drawn, title=title), console)
    return Results(results)


def _policies(options: PlanOptions) -> dict[str, AnyPrecision]:
    found: dict[str, AnyPrecision] = {}
    for name in options.policies:
        if name.lower() == THREE_DTYPES:
            found[THREE_DTYPES] = MixedPrecision(
                main_params=_dtype(options.main_params),
                main_grads=_dtype(options.main_grads or "fp32"),
                grad_comm=_dtype(options.grad_comm or "auto"),
                reduce=options.reduce or "native",
            )
            continue
        shown, policy = named_policy(name)
        grads = policy.grads
        if options.main_grads is not None:
            grads = dataclasses.replace(grads, main=_dtype(options.main_grads))
        if options.grad_comm is not None:
            grads = dataclasses.replace(grads, comm=_dtype(options.grad_comm))
        if options.reduce is not None:
            grads = dataclasses.replace(grads, reduce=options.reduce)
        found[shown] = dataclasses.replace(policy, grads=grads)
    if not found:
        raise OptionError("--policies", "none", "at least one")
    return found


def _dtype(name: DTypeName) -> FloatDType | None:
    return None if name == "auto" else DTYPES[name]


def _plan(options: PlanOptions, chosen: Subject, name: str, policy: AnyPrecision, strategy: Strategy) -> Plan:
    return planned(
        options, chosen, name, policy, strategy, ranks=(options.outer, options.ranks),
        outer=options.outer_strategy if strategy == "optim_grads_params" else "no_shard",
    )  # fmt: skip


def _title(options: PlanOptions, first: Plan, chosen: Subject) -> str:
    ranks = ("" if options.outer == 1 else f"{options.outer} x ") + counted(options.ranks, "rank")
    if options.outer_strategy == "optim":
        ranks += " (outer: optim under optim_grads_params, else no_shard)"
    passes = f"{options.microbatches} microbatch{'es' * (options.microbatches > 1)} a step"
    return (
        f"{options.model}: {first.parameters:,} parameters ({options.dtype}), {chosen.optimizer.shown}, {ranks}, {passes},"
        f" units: {chosen.unit_names}. Bytes of one rank."
    )


def _sheet(rows: list[Planned]) -> Sheet:
    """Narrow enough for a terminal of 80 columns."""
    unit, size = unit_of(max(max(row.plan.peak_bytes, row.plan.wire_bytes) for row in rows))
    caption = (
        f"{unit} of one rank; main, rest: main weights or residuals; transient: the most on top at any moment; sent: in a step."
        " Activations and buffers are not counted. (optim_grads_params: transient is an estimate.)"
    )
    heads = ("bytes/\nparam", "model", "main,\nrest", "grads", "state", "kept", "tran-\nsient", "sent")
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
        cells = (in_units(size, nbytes) for nbytes in (*sizes, transient, row.plan.wire_bytes))
        sheet.rows.append((row.strategy, f"{row.plan.bytes_per_param:.2f}", *cells))
    return sheet


def _record(found: Plan) -> dict[str, Any]:
    return {
        "parameters": found.parameters, "padding": found.padding, "bytes_per_param": found.bytes_per_param,
        "persistent": dict(found.persistent), "transient": dict(found.transient), "wire": dict(found.wire),
        "persistent_bytes": found.persistent_bytes, "peak_bytes": found.peak_bytes, "wire_bytes": found.wire_bytes,
        "whole_tensors": None if found.whole_tensors is None else asdict(found.whole_tensors),
    }  # fmt: skip
