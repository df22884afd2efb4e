"""Time and temporaries of Muon: a step against torch's and against a plain loop, and its iteration for equal shapes together and alone.

python benchmarks/matrices.py --out benchmarks/results/matrices-cpu.json --page docs/speed.md

A step is one of the matrices of a model: ours uncompiled, compiled, and with equal shapes together, ``torch.optim.Muon``, and a plain
loop, Keller Jordan's formula as one writes it down. They have the same weights and gradients in float32 and the iteration in bfloat16, and
take turns in one process, each first in its turn; medians, and the ratios of medians. Temporaries are the most bytes that a step has
allocated at a time, by torch's profiler. The iteration is timed for a batch of equal matrices, by products of each matrix and by batched
products, and their bits are compared. Every case is a process of its own.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import everybit as eb
from case_process import run_case
from everybit.linalg import Arithmetic
from everybit_torch import TorchOptimizer
from machine import describe
from memory import allocated_by
from pages import insert, origin, table
from shapes import Shape, gpt
from speed import parameters, seconds_of, weights_and_gradients

RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1


def _matrices(width: int, layers: int) -> list[Shape]:
    return [shape for shape in gpt(width, layers) if len(shape) == 2]


MODELS: Mapping[str, list[Shape]] = {"50M": _matrices(640, 10), "small": _matrices(128, 12)}
"""The matrices of the blocks of the 50M model of the sharded benchmarks, and of a model of width 128."""

QUICK_MODELS: Mapping[str, list[Shape]] = {"quick": _matrices(16, 1)}

BATCHES: tuple[tuple[int, int, int], ...] = (
    (64, 16, 64), (144, 64, 768), (48, 128, 512), (24, 256, 256), (10, 640, 640), (10, 640, 2560)
)  # fmt: skip
"""Equal matrices: many small ones, heads of 64, experts, and a matrix of each block of a model."""

QUICK_BATCHES: tuple[tuple[int, int, int], ...] = ((3, 8, 16),)
BATCHINGS: tuple[Literal["alone", "together"], ...] = ("alone", "together")
OTHERS = ("compiled", "together", "torch", "plain loop")


class PlainMuon(torch.optim.Optimizer):
    """Keller Jordan's Muon as a loop over parameters: https://kellerjordan.github.io/posts/muon/."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002  # torch's signature
        """Take a step."""
        a, b, c = 3.4445, -4.7750, 2.0315
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                if not held:
                    held["mean"] = torch.zeros_like(p)
                mean: Tensor = held["mean"]
                mean.mul_(MOMENTUM).add_(p.grad, alpha=1 - MOMENTUM)
                ahead = mean * MOMENTUM + p.grad * (1 - MOMENTUM)
                x = ahead.bfloat16()
                tall = x.size(0) > x.size(1)
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = a * x + (b * gram + c * gram @ gram) @ x
                x = x.T if tall else x
                p.mul_(1 - group["lr"] * DECAY)
                p.add_(x.to(p.dtype), alpha=-group["lr"] * math.sqrt(max(1.0, p.size(0) / p.size(1))))


def muon(learning_rate: eb.Hyperparameter, batching: Literal["alone", "together"] = "alone") -> eb.Transform[Any]:
    """Torch's Muon in everybit, of matrices alone."""
    return eb.muon(
        learning_rate, momentum=MOMENTUM, weight_decay=DECAY, iteration=eb.NewtonSchulz(batching=batching), others=None
    )


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        threads: Of torch; a case for each.
        seconds: How long a case is timed.
        limit: Seconds after which a case is given up.
        out: Where the raw results go.
        page: Where the tables go, as Markdown, at the name of ``out``.
        run: False: show what ``out`` holds.
        quick: Small matrices for a fifth of a second each: to see that it runs.
    """

    threads: tuple[int, ...] = (1, 2)
    seconds: float = 20.0
    limit: float = 900.0
    out: Path = Path("benchmarks/results/matrices-cpu.json")
    page: Path | None = None
    run: bool = True
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A step of a model, or an iteration of a batch (as "count x rows x columns") in a dtype."""

    what: Literal["step", "iteration"]
    name: str
    threads: int
    arithmetic: Arithmetic = "bfloat16"


@dataclass
class Result:
    """One case: seconds and, of steps, bytes, by contestant. ``same_bits``: of an iteration together and alone."""

    what: str
    name: str
    threads: int
    arithmetic: str
    elements: int = 0
    samples: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    first_step: float = math.nan
    same_bits: bool = False
    failure: str = ""


def cases(arguments: Arguments) -> list[Case]:
    """The cases, in order."""
    models, batches = (QUICK_MODELS, QUICK_BATCHES) if arguments.quick else (MODELS, BATCHES)
    dtypes: tuple[Arithmetic, ...] = ("bfloat16", "float32")
    steps = [Case("step", name, threads) for name in models for threads in arguments.threads]
    iterations = [
        Case("iteration", " x ".join(map(str, batch)), threads, dtype)
        for batch in batches
        for dtype in dtypes
        for threads in arguments.threads
    ]
    return steps + iterations


def measure(case: Case, seconds: float) -> Result:
    """Run one case in this process."""
    result = Result(**asdict(case))
    if case.what == "step":
        _measure_steps(result, {**MODELS, **QUICK_MODELS}[case.name], seconds)
    else:
        _measure_iterations(result, case, seconds)
    return result


def _measure_steps(result: Result, shapes: list[Shape], seconds: float) -> None:
    weights, gradients = weights_and_gradients(shapes)
    result.elements = sum(w.numel() for w in weights)

    def given() -> list[nn.Parameter]:
        return parameters(weights, gradients, torch.float32)

    def ours(*, compiled: bool, **options: Any) -> Any:
        return TorchOptimizer(given(), muon, lr=RATE, policy=eb.policies.FP32, compile=compiled, **options)

    contestants: dict[str, Any] = {
        "everybit": ours(compiled=False),
        "compiled": ours(compiled=True),
        "together": ours(compiled=False, batching="together"),
        "torch": torch.optim.Muon(given(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY),
        "plain loop": PlainMuon(given()),
    }
    result.first_step = seconds_of(contestants["compiled"].step, "cpu")
    _take_turns(result, {name: one.step for name, one in contestants.items()}, seconds)
    result.peaks = {name: allocated_by(one.step)[0] for name, one in contestants.items()}


def _measure_iterations(result: Result, case: Case, seconds: float) -> None:
    count, rows, columns = map(int, case.name.split(" x "))
    batch = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(0))
    result.elements = batch.numel()

    def iterate(batching: Literal["alone", "together"]) -> Tensor:
        return eb.NewtonSchulz(arithmetic=case.arithmetic, batching=batching).orthogonalized(batch)

    result.same_bits = torch.equal(iterate("alone"), iterate("together"))
    _take_turns(result, {one: lambda one=one: iterate(one) for one in BATCHINGS}, seconds)  # type: ignore[misc]


def _take_turns(result: Result, contestants: Mapping[str, Callable[[], object]], seconds: float) -> None:
    result.samples = {name: [] for name in contestants}
    turns = list(contestants.items())
    for _, run in turns:
        run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(result.samples[turns[0][0]]) < 3:
        turns.append(turns.pop(0))
        for name, run in turns:
            result.samples[name].append(seconds_of(run, "cpu"))


def in_a_process(case: Case, arguments: Arguments) -> Result:
    """One case in a process of its own, so that neither memory nor compiled code is another's."""
    result = Result(**asdict(case))
    settings = json.dumps(asdict(case) | {"seconds": 0.2 if arguments.quick else arguments.seconds})
    found, result.failure = run_case(__file__, [settings], arguments.limit)
    return result if found is None else Result(**found)


STEP_COLUMNS = [
    "matrices", "threads", "ms", "compiled, ms", "together, ms", "of torch's time", "of the plain loop's", "temporaries, MB", "compiled",
    "together", "torch's", "the plain loop's", "first compiled step, s",
]  # fmt: skip
ITERATION_COLUMNS = ["matrices", "dtype", "threads", "alone, ms", "together, ms", "alone / together", "same bits"]


def step_cells(r: Result) -> list[str]:
    """A step as text."""
    if r.failure:
        return [r.name, str(r.threads), r.failure, *[""] * (len(STEP_COLUMNS) - 3)]
    took = {name: statistics.median(samples) for name, samples in r.samples.items()}
    megabytes = [f"{r.peaks[name] / 1e6:.3g}" for name in ("everybit", *OTHERS)]
    ours = f"{1e3 * took['everybit']:.1f}"
    ratios = [f"{took['everybit'] / took[name]:.2f}" for name in ("torch", "plain loop")]
    own = [f"{1e3 * took[name]:.1f} ({took[name] / took['everybit']:.2f})" for name in ("compiled", "together")]
    return [r.name, str(r.threads), ours, *own, *ratios, *megabytes, f"{r.first_step:.1f}"]


def iteration_cells(r: Result) -> list[str]:
    """An iteration as text."""
    if r.failure:
        return [r.name, r.arithmetic, str(r.threads), r.failure, *[""] * (len(ITERATION_COLUMNS) - 4)]
    alone, together = (statistics.median(r.samples[one]) for one in BATCHINGS)
    times = [f"{1e3 * alone:.2f}", f"{1e3 * together:.2f}", f"{alone / together:.2f}"]
    return [r.name, r.arithmetic, str(r.threads), *times, "yes" if r.same_bits else "no"]


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    if arguments.run:
        torch.set_num_threads(max(arguments.threads))
        machine, results = describe(), []
        for case in track(cases(arguments), description="measuring", console=Console(stderr=True)):
            results.append(in_a_process(case, arguments))
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            held = {"machine": machine, "results": [asdict(r) for r in results]}
            arguments.out.write_text(json.dumps(held, indent=1))
    held = json.loads(arguments.out.read_text())
    found = [Result(**r) for r in held["results"]]
    text = ""
    for what, columns, cells in (("step", STEP_COLUMNS, step_cells), ("iteration", ITERATION_COLUMNS, iteration_cells)):
        own = [r for r in found if r.what == what]
        shown = Table(*columns, title=what)
        for r in own:
            shown.add_row(*cells(r), style="red" if r.failure else None)
        Console(width=170).print(shown)
        sizes = ", ".join(f"{name}: {n:,}" for name, n in {r.name: r.elements for r in own}.items())
        title = f"**A step** (parameters of {sizes})" if what == "step" else "**An iteration**"
        most = max((r.threads for r in own), default=0)
        shown_there = own if what == "step" else [r for r in own if r.threads == most]
        text += f"\n{title}\n\n{table(columns, list(map(cells, shown_there)))}"
    if arguments.page is not None:
        insert(arguments.page, arguments.out.stem, text + origin(held["machine"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        warnings.simplefilter("ignore")
        asked = json.loads(sys.argv[2])
        limit, chosen = asked.pop("seconds"), Case(**asked)
        torch.set_num_threads(chosen.threads)
        print(json.dumps(asdict(measure(chosen, limit))))
    else:
        import tyro

        main(tyro.cli(Arguments))
