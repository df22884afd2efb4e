"""``everybit plan``, from options to a table, a file and a picture."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import nn

import everybit as eb
from everybit.dtypes import FloatDType
from everybit_torch.cli.compare.machine import versions
from everybit_torch.cli.compare.options import check_out, named_policy
from everybit_torch.cli.compare.results import write_json
from everybit_torch.cli.errors import OptionError
from everybit_torch.cli.plan.models import build
from everybit_torch.cli.plan.options import DTypeName, PlanOptions
from everybit_torch.cli.plan.pictures import draw
from everybit_torch.sharded.construction.sources import FromInitializers, FromSafetensors, Values
from everybit_torch.sharded.mixed_precision import MixedPrecision
from everybit_torch.sharded.model_layout import AnyPrecision
from everybit_torch.sharded.offload import Offload
from everybit_torch.sharded.plan import Plan, plan
from everybit_torch.sharded.strategies import Strategy

FORMAT = 1
THREE_DTYPES = "three-dtypes"

_DTYPES: dict[str, FloatDType] = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_TRANSFORMS: dict[str, eb.Transform[Any]] = {
    "adamw": eb.adamw(1e-3), "adam": eb.adam(1e-3), "sgd": eb.sgd(1e-3, momentum=0.9), "lion": eb.lion(1e-4),
    "rmsprop": eb.rmsprop(1e-3),
}  # fmt: skip

_VALUES: dict[str, type[Values] | None] = {"files": FromSafetensors, "initializers": FromInitializers, "model": None}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under one strategy."""

    policy: str
    strategy: Strategy
    plan: Plan


def run_plan(options: PlanOptions, console: Console, command: str) -> None:
    """Plan, and show; write ``plan.json`` and ``plan.png`` if a folder is given.

    Raises:
        OptionError: An option that cannot be used; nothing was done.
    """
    for name in ("ranks", "outer", "microbatches"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name}", getattr(options, name), "a whole number, at least 1")
    if not options.strategies:
        raise OptionError("--strategies", "none", "at least one")
    if options.outer_strategy == "optim":
        accepted = "optim with --outer 2 or more, and with optim_grads_params among --strategies"
        if options.outer == 1:
            raise OptionError("--outer-strategy", "optim with --outer 1", accepted)
        if "optim_grads_params" not in options.strategies:
            raise OptionError("--outer-strategy", f"optim with --strategies {' '.join(options.strategies)}", accepted)
    if options.offload != "nothing" and options.device == "cpu":
        raise OptionError("--offload", f"{options.offload} with --device cpu", "nothing, or --device cuda")
    policies = _policies(options)
    dtype = None if options.dtype == "model" else getattr(torch, _DTYPES[options.dtype])
    model, blocks = build(options.model, dtype)
    units = _units(model, options) or blocks
    if options.out is not None:
        check_out(options.out)
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("planning", total=len(policies) * len(options.strategies))
        for name, policy in policies.items():
            for strategy in options.strategies:
                rows.append(Row(name, strategy, _plan(options, model, name, policy, strategy, units)))
                progress.advance(task)
    title = _title(options, rows[0].plan, units)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(_table(rows, host=options.offload != "nothing"), highlight=False)
    if options.out is None:
        return
    numbers, picture = options.out / "plan.json", options.out / "plan.png"
    records = [{"policy": row.policy, "strategy": row.strategy, **_record(row.plan)} for row in rows]
    write_json(numbers, {
        "format": FORMAT, "command": command, "versions": versions(), "options": _plain(options), "plans": records,
    })  # fmt: skip
    draw(picture, [(row.policy, row.strategy, row.plan) for row in rows], title=title)
    console.print(f"Wrote {numbers} and {picture}", highlight=False, soft_wrap=True)


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
    return None if name == "auto" else _DTYPES[name]


def _units(model: nn.Module, options: PlanOptions) -> list[type[nn.Module]]:
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    for name in options.units:
        if name not in kinds:
            raise OptionError("--units", name, f"classes of the model's modules: {', '.join(sorted(kinds))}")
    return [kinds[name] for name in options.units]


def _plan(
    options: PlanOptions,
    model: nn.Module,
    name: str,
    policy: AnyPrecision,
    strategy: Strategy,
    units: list[type[nn.Module]],
) -> Plan:
    try:
        return plan(
            model,
            _TRANSFORMS[options.optimizer],
            policy=policy,
            strategy=strategy,
            outer=options.outer_strategy if strategy == "optim_grads_params" else "no_shard",
            ranks=(options.outer, options.ranks),
            units=units,
            microbatches=options.microbatches,
            reshard_after_forward=not options.keep_weights,
            reshard_after_backward=not options.keep_weights_after_backward,
            defer_reduction=options.defer_reduction,
            device=options.device,
            values=_VALUES[options.values],
            offload=_offload(options, strategy),
        )
    except (TypeError, ValueError) as error:
        if str(error).startswith("values: "):
            got = f"{options.values} ({str(error).removeprefix('values: ')})"
            raise OptionError("--values", got, "files, or a model whose modules have initializers") from None
        got = f"{name}, which does not go with the model ({error})"
        raise OptionError("--policies", got, "one that does, or another --dtype") from None


def _offload(options: PlanOptions, strategy: Strategy) -> Offload:
    everything = options.offload == "everything" and strategy == "optim_grads_params"
    return Offload(state=options.offload != "nothing", weights=everything, gradients=everything)


def _title(options: PlanOptions, first: Plan, units: list[type[nn.Module]]) -> str:
    ranks = f"{options.ranks} ranks" if options.outer == 1 else f"{options.outer} x {options.ranks} ranks"
    if options.outer_strategy == "optim":
        ranks += " (outer: optim under optim_grads_params, else no_shard)"
    names = ", ".join(kind.__name__ for kind in units) or "the whole model"
    passes = f"{options.microbatches} microbatch{'es' * (options.microbatches > 1)} a step"
    return (
        f"{options.model}: {first.parameters:,} parameters ({options.dtype}), {options.optimizer}, {ranks}, {passes}, units: {names}."
        " Bytes of one rank."
    )


def _table(rows: list[Row], *, host: bool) -> Table:
    """Narrow enough for a terminal of 80 columns; with what lies in the ``host``'s memory."""
    most = max(max(row.plan.peak_bytes, row.plan.wire_bytes, row.plan.host_bytes) for row in rows)
    unit, size = next((name, size) for name, size in _UNITS if most >= size or size == 1)
    caption = f"{unit} of one rank; main, rest: main weights or residuals; extra: the most on top, for moments; sent: in a step"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("", no_wrap=True)
    heads = ("bytes/\nparam", "model", "main,\nrest", "grads", "state", "kept", "extra", "sent")
    for name in (*heads, *(("host",) if host else ())):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for row in rows:
        if row.policy != previous:
            table.add_row(f"[bold]{escape(row.policy)}[/bold]")
        previous = row.policy
        found = row.plan.persistent
        beside = found.get("main parameters", 0) + found.get("compensation", 0)
        known = ("parameters", "main parameters", "compensation", "gradients")
        state = sum(nbytes for name, nbytes in found.items() if name not in known)
        sizes = (found.get("parameters", 0), beside, found.get("gradients", 0), state, row.plan.persistent_bytes)
        moments = max(row.plan.transient.values())
        table.add_row(
            row.strategy,
            f"{row.plan.bytes_per_param:.2f}",
            *(_in(size, nbytes) for nbytes in (*sizes, moments, row.plan.wire_bytes)),
            *([_in(size, row.plan.host_bytes)] if host else []),
        )
    return table


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))


def _in(size: int, nbytes: int) -> str:
    return f"{nbytes / size:.2f}" if nbytes < 100 * size else f"{nbytes / size:.1f}"


def _record(found: Plan) -> dict[str, Any]:
    return {
        "parameters": found.parameters, "padding": found.padding, "bytes_per_param": found.bytes_per_param,
        "persistent": dict(found.persistent), "host": dict(found.host), "transient": dict(found.transient), "wire": dict(found.wire),
        "persistent_bytes": found.persistent_bytes, "peak_bytes": found.peak_bytes, "wire_bytes": found.wire_bytes,
    }  # fmt: skip


def _plain(options: PlanOptions) -> dict[str, Any]:
    return {name: str(value) if name == "out" else value for name, value in asdict(options).items()}
