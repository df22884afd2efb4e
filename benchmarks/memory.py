"""Bytes: what a policy predicts against what is allocated, and what a step allocates on its way.

Storages are counted once, whoever shares them. A step's own allocations are the profiler's, of torch's allocator.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW
from machine import describe
from pages import insert, origin, table

BETAS = (0.9, 0.95)  # with which every preset can work


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        elements: Of the one parameter.
        out: Where the raw results go.
        page: Where the table goes, as Markdown.
        run: False: show what ``out`` holds.
    """

    elements: int = 4_000_000
    out: Path = Path("benchmarks/results/memory-cpu.json")
    page: Path | None = None
    run: bool = True


@dataclass
class Result:
    """Bytes of one policy: per parameter, and of one step."""

    policy: str
    kind: str
    predicted: float
    measured: float
    counters: int
    step_peak: int
    step_total: int


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes by address of the storage."""
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}


def allocated_by(step: Any) -> tuple[int, int]:
    """(largest sum alive at a time, sum of all) of the bytes that a call allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    # The raw events: those that the profiler shows are attributed to operators, and not all of them are.
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = total = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
        total += max(0, event.nbytes())
    return peak, total


def measure(name: str, elements: int, *, compile: bool) -> Result:
    """One policy."""
    policy = eb.policies.PRESETS[name]
    dtype = {"FP32": torch.float32, "FP64": torch.float64}.get(name, torch.bfloat16)
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(elements - 1000, dtype=dtype)), nn.Parameter(torch.zeros(1000, dtype=dtype))]
    )
    optimizer = AdamW(
        model.parameters(), betas=BETAS, policy=policy, compile=compile,
    )  # fmt: skip
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    peak, total = allocated_by(optimizer.step)
    state = [x for entries in optimizer.state.values() for x in entries.values()]
    counters = sum(storages([x for x in state if x.ndim == 0]).values())
    held = storages([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *state])
    kind = "compiled" if compile else "uncompiled"
    measured = (sum(held.values()) - counters) / elements
    return Result(name, kind, policy.bytes_per_param(), measured, counters, peak, total)


HEADINGS = ["policy", "step", "predicted bytes/param", "measured", "counters", "a step's peak", "a step's sum"]


def cells(r: Result) -> list[str]:
    """A case as text."""
    return [
        r.policy,
        r.kind,
        f"{r.predicted:g}",
        f"{r.measured:g}",
        str(r.counters),
        f"{r.step_peak:,}",
        f"{r.step_total:,}",
    ]


def page_table(results: list[Result]) -> str:
    """A row for each policy, with a compiled and an uncompiled step."""
    rows = []
    for compiled, uncompiled in zip(results[::2], results[1::2], strict=True):
        own = cells(compiled)
        rows.append([own[0], own[2], own[3], own[5], f"{uncompiled.step_peak:,}"])
    return table(["policy", "predicted bytes/param", "measured", "peak of a compiled step, bytes", "uncompiled"], rows)


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if arguments.run:
        names = [name for name in eb.policies.PRESETS if name != "ANYPRECISION"]
        cases = [(name, compile) for name in names for compile in (True, False)]
        measured = []
        machine = describe()
        for name, compile in track(cases, description="measuring", console=Console(stderr=True)):
            torch._dynamo.reset()
            measured.append(measure(name, arguments.elements, compile=compile))
        arguments.out.write_text(json.dumps({"machine": machine, "results": [asdict(r) for r in measured]}, indent=1))
    held = json.loads(arguments.out.read_text())
    results = [Result(**r) for r in held["results"]]
    printed = Table(*HEADINGS)
    for r in results:
        printed.add_row(*cells(r), style=None if r.predicted == r.measured else "red")
    Console(width=140).print(printed)
    if arguments.page is not None:
        insert(arguments.page, "memory-cpu", page_table(results) + origin(held["machine"]))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Arguments))
