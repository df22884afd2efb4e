"""``everybit bench``, from a model's shapes to a table."""

from __future__ import annotations

from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from everybit_torch.cli.bench.measuring import Entry, Timing, everybit_contestant, measure, torch_contestants
from everybit_torch.cli.bench.options import BenchOptions
from everybit_torch.cli.device import parsed_device, threads
from everybit_torch.cli.errors import OptionError
from everybit_torch.cli.files import check_out, keep_results
from everybit_torch.cli.machine import machine, versions
from everybit_torch.cli.models import build
from everybit_torch.cli.optimizers import named_optimizer, require_policies, show_routing
from everybit_torch.cli.output import Results, Sheet, counted, show
from everybit_torch.cli.policies import named_policy

FORMAT = 1


def bench(options: BenchOptions, console: Console, command: str) -> Results:
    """Time torch's optimizer and ours, report, and write ``bench.json`` and ``bench.png`` if a folder is given.

    Raises:
        OptionError: An option that cannot be used; nothing was done.
    """
    if not options.seconds > 0:
        raise OptionError("--seconds", options.seconds, "a number above 0")
    if options.threads < 0:
        raise OptionError("--threads", options.threads, "a whole number, at least 1, or 0 for torch's choice")
    device = parsed_device(options.device)
    optimizer = named_optimizer(options.optimizer)
    policies = dict(map(named_policy, options.policies))
    require_policies(optimizer, policies)
    model, _ = build(options.model, None)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = [parameter.shape for parameter in trained.values()]
    elements = sum(map(torch.Size.numel, shapes))
    if not elements:
        raise OptionError("--model", options.model, "a model with parameters that require gradients")
    if options.out is not None:
        check_out(options.out)
    contestants = torch_contestants(optimizer) + [
        everybit_contestant(name, policy, optimizer, list(trained), compile=options.compile)
        for name, policy in policies.items()
    ]
    where_gradients = "apart" if optimizer.entry.cut == "tensor" else "in one flat buffer"
    title = (
        f"A step of {optimizer.entry.title}, {options.model}: {elements:,} parameters in {counted(len(shapes), 'tensor')}, {device},"
        f" everybit {'compiled' if options.compile else 'not compiled'}, gradients {where_gradients}"
    )
    console.print(title, highlight=False)
    show_routing(optimizer, trained, console)
    timings = []
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20))
    with threads(options.threads), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(contestants))
        baseline = Entry(contestants[0], shapes, device)
        for contestant in contestants:
            progress.update(task, description=contestant.name)
            timings.append(measure(contestant, baseline, shapes, options.seconds / len(contestants)))
            progress.advance(task)
        where = machine(device)
    show(_sheet(timings, contestants[0].name), console)
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "machine": where, "options": asdict(options),
        "optimizer": optimizer.described(), "parameters": elements, "tensors": len(shapes),
        "timings": [{**asdict(one), "ratio": one.ratio, "total_bytes": one.total_bytes} for one in timings],
    }  # fmt: skip
    if options.out is not None:
        from everybit_torch.cli.bench.pictures import draw

        keep_results(options.out, "bench", results, lambda picture: draw(picture, timings, title=title), console)
    return Results(results)


def _sheet(timings: list[Timing], baseline: str) -> Sheet:
    own = timings[0].ratio
    caption = (
        f"ms: median of a step; ratio: to {baseline}, which steps in turn (below 1 is faster);"
        f" this against itself is {own:.2f}, which is how far a ratio can be trusted. Bytes per parameter: weights, gradients,"
        " optimizer state. First: the first step, with compilation, in seconds."
    )
    sheet = Sheet(("optimizer", "ms", "ratio", "weights", "grads", "state", "bytes", "first\ns"), caption=caption)
    for one in timings:
        sheet.rows.append(
            (
                one.name,
                f"{1e3 * one.seconds:.2f}",
                f"{one.ratio:.2f}",
                f"{one.weight_bytes:.2f}",
                f"{one.gradient_bytes:.2f}",
                f"{one.state_bytes:.2f}",
                f"{one.total_bytes:.2f}",
                f"{one.first_seconds:.1f}",
            )
        )
    return sheet
