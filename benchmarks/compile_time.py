"""How long the first compiled step takes: with an empty compile cache, and with what an earlier process left in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from machine import describe
from pages import insert, origin, table

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        tensors: Numbers of parameters, of 64 elements each.
        policies: Names of presets.
        repeats: Of each case; the median is shown.
        out: Where the raw results go.
        page: Where the table goes, as Markdown.
        run: False: show what ``out`` holds.
    """

    tensors: tuple[int, ...] = (10, 144, 1000, 10_000)
    policies: tuple[str, ...] = ("FP32", "LEAN_BF16", "KAHAN_BF16")
    repeats: int = 3
    out: Path = Path("benchmarks/results/compile-time-cpu.json")
    page: Path | None = None
    run: bool = True


@dataclass
class Result:
    """Seconds of the first step, by repeat; ``second`` is the step after it, which is what a step costs."""

    policy: str
    tensors: int
    cold: list[float]
    warm: list[float]
    second: list[float]


def first_step(policy: str, tensors: int) -> tuple[float, float]:
    """Seconds of the first and the second step, in this process."""
    import everybit as eb
    from everybit_torch import AdamW

    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    params = [nn.Parameter(torch.zeros(64, dtype=dtype)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = AdamW(params, betas=BETAS, policy=eb.policies.PRESETS[policy], compile=True)
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times[0], times[1]


def in_a_process(policy: str, tensors: int, cache: str) -> tuple[float, float]:
    """The same in a new one with a cache of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, __file__, "--case", policy, str(tensors)], env=environment, capture_output=True, text=True, check=True
    )  # fmt: skip
    first, second = json.loads(done.stdout.strip().splitlines()[-1])
    return first, second


HEADINGS = ["policy", "tensors", "cold", "warm", "a step after it, ms", "cold, relative to the fewest"]


def cells(r: Result, results: list[Result]) -> list[str]:
    """A case as text."""
    fewest = next(other for other in results if other.policy == r.policy)
    return [
        r.policy, f"{r.tensors:,}", f"{median(r.cold):.1f}", f"{median(r.warm):.1f}", f"{1e3 * median(r.second):.2f}",
        f"{median(r.cold) / median(fewest.cold):.2f}",
    ]  # fmt: skip


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if arguments.run:
        measured = []
        machine = describe()
        cases = [(policy, tensors) for policy in arguments.policies for tensors in arguments.tensors]
        for policy, tensors in track(cases, description="compiling", console=Console(stderr=True)):
            result = Result(policy, tensors, [], [], [])
            for _ in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as cache:
                    cold, second = in_a_process(policy, tensors, cache)
                    warm, _ = in_a_process(policy, tensors, cache)
                result.cold.append(cold)
                result.warm.append(warm)
                result.second.append(second)
            measured.append(result)
            arguments.out.write_text(
                json.dumps({"machine": machine, "results": [asdict(r) for r in measured]}, indent=1)
            )
    held = json.loads(arguments.out.read_text())
    results = [Result(**r) for r in held["results"]]
    printed = Table(*HEADINGS, title="Seconds of the first compiled step")
    for r in results:
        printed.add_row(*cells(r, results))
    Console(width=120).print(printed)
    if arguments.page is not None:
        insert(
            arguments.page,
            "compile-time-cpu",
            table(HEADINGS, [cells(r, results) for r in results]) + origin(held["machine"]),
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(first_step(sys.argv[2], int(sys.argv[3]))))
    else:
        import tyro

        main(tyro.cli(Arguments))
