"""Time of a step, by model and optimizer, as a ratio to ``torch.optim.AdamW(fused=True)`` of float32 in the same process.

Every case is a process of its own: the contestant's step and the baseline's in turn, each first every other time, medians of each.

A contestant's first updates are held against AdamW in float64 in the same process. They are wrong if they are further off than the
rounding of its formats explains, or off in common: rounding has no direction, but a wrong learning rate, momentum or bias correction makes
all updates longer or shorter, and a lost decay leaves something of every weight behind.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from case_process import run_case
from contestants import (
    BASELINE,
    BFLOAT16_WEIGHTS,
    HYPERPARAMETERS,
    Contestant,
    Params,
    contestants_on,
    full_precision,
    named,
    state_tensors,
)
from machine import describe, synchronize
from pages import insert, origin, table
from shapes import MODELS, Shape

UPDATES = 5
"""Compared with float64's before anything is timed."""

SAMPLE = 1 << 16
"""Elements per tensor that are compared; AdamW treats every element by itself."""

LONGER = 2e-3
"""By how much updates may be longer or shorter in common. A wrong ``b1`` of 0.95 makes 3e-3. Rounding, at worst half a unit in the last
place of bfloat16 weights, 2e-2 of an update, averages to a hundredth of that over ten thousand elements; moments that are rounded to
nearest in bfloat16 to 1e-3."""

DECAY_LOST = 0.5
"""Of the decay; the same rounding makes up to 0.2 of it over ten thousand elements. All of it is either there or not."""


@dataclass(frozen=True)
class Arguments:
    """What to measure.

    Attributes:
        models: Names in shapes.py.
        contestants: Names in contestants.py; none for all.
        device: cpu or cuda.
        threads: Of torch.
        seconds: How long a case is timed.
        limit: Seconds after which a case is given up.
        out: Where the raw results go.
        page: Where the table goes, as Markdown, at the name of ``out``; a picture goes into its ``images``.
        run: False: show what ``out`` holds.
    """

    models: tuple[str, ...] = tuple(MODELS)
    contestants: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int = 2
    seconds: float = 3.0
    limit: float = 400.0
    out: Path = Path("benchmarks/results/speed-cpu.json")
    page: Path | None = None
    run: bool = True


@dataclass
class Result:
    """One case. Times in seconds; bytes per parameter; errors relative to float64's updates."""

    model: str
    contestant: str
    elements: int = 0
    tensors: int = 0
    error: float = math.nan
    longer: float = math.nan
    decay_lost: float = math.nan
    verdict: str = ""
    first_step: float = math.nan
    median: float = math.nan
    baseline: float = math.nan
    bytes_moved: float = math.nan
    samples: list[float] = field(default_factory=list)
    baseline_samples: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def correct(self) -> bool:
        """Whether its time counts."""
        return self.verdict == "right"

    @property
    def ratio(self) -> float:
        """Time relative to the baseline's."""
        return self.median / self.baseline

    @property
    def ratio_per_byte(self) -> float:
        """Time per byte relative to the baseline's, which moves 28 per parameter: reads weight, gradient and two moments, writes three."""
        return self.ratio / (self.bytes_moved / 28)


def weights_and_gradients(shapes: list[Shape], device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Values as in a network at work: weights of 0.02, gradients of 0.01, bfloat16 numbers so that all dtypes begin with the same."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Shape, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16().float().to(device)

    return [normal(shape, 0.02) for shape in shapes], [normal(shape, 0.01) for shape in shapes]


def parameters(weights: list[Tensor], gradients: list[Tensor], dtype: torch.dtype) -> Params:
    """Parameters with gradients."""
    params = [nn.Parameter(w.to(dtype, copy=True)) for w in weights]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.to(dtype, copy=True)
    return params


@dataclass(frozen=True, slots=True)
class Errors:
    """What is off about some updates: in all, in their common length, and of the decay."""

    error: float
    longer: float
    decay_lost: float

    def verdict(self, allowed: float) -> str:
        """``right``, or what is wrong; ``allowed`` is the rounding of the formats."""
        if not self.error <= allowed:
            return "wrong"
        # Formats of few bits shorten some updates and lengthen others by their nature; that is within `allowed`.
        if abs(self.longer) > max(LONGER, allowed / 10 if allowed > BFLOAT16_WEIGHTS else 0):
            return "wrong length"
        return "decay lost" if abs(self.decay_lost) > DECAY_LOST else "right"


def first_updates(
    make: Callable[[Params], Any], weights: list[Tensor], gradients: list[Tensor], dtype: torch.dtype
) -> tuple[Errors, float, Any, Params]:
    """Errors of the first updates against float64, seconds of the first, and the optimizer with its parameters."""
    params = parameters(weights, gradients, dtype)
    optimizer = make(params)
    picks = [slice(None, None, max(1, w.numel() // SAMPLE)) for w in weights]
    exact = [nn.Parameter(w.flatten()[pick].double()) for w, pick in zip(weights, picks, strict=True)]
    reference = torch.optim.AdamW(exact, foreach=False, **HYPERPARAMETERS)
    first_step = math.nan
    for update in range(UPDATES):
        # Powers of two, which no dtype rounds: the gradient changes size, so that the moments are not constant.
        scale = 1.0 if update % 2 else 2.0
        with torch.no_grad():
            for p, e, g, pick in zip(params, exact, gradients, picks, strict=True):
                scaled = (g * scale).to(dtype)
                if p.grad is None:  # HeavyBall frees gradients
                    p.grad = scaled
                else:
                    p.grad.copy_(scaled)
                e.grad = scaled.flatten()[pick].double()
        took = seconds_of(optimizer.step, weights[0].device.type)
        if update == 0:
            first_step = took
        reference.step()
    start = torch.cat([w.flatten()[pick].double() for w, pick in zip(weights, picks, strict=True)])
    right = torch.cat([e.detach() for e in exact])
    got = torch.cat([w.flatten()[pick] for w, pick in zip(full_precision(optimizer, params), picks, strict=True)])
    whole, off = right - start, got - right
    # The part of the error along the updates, and what is then left along the weights, which is where decay points.
    longer = float(off @ whole / (whole @ whole))
    rest = off - longer * whole
    decay = UPDATES * HYPERPARAMETERS["lr"] * HYPERPARAMETERS["weight_decay"]
    lost = float(rest @ start / (start @ start) / decay)
    error = float((off.square().sum() / whole.square().sum()).sqrt())
    return Errors(error, longer, lost), first_step, optimizer, params


def bytes_moved(optimizer: Any, params: Params) -> float:
    """Bytes per parameter that one pass has to move: gradients are read; weights and state are read and written."""
    elements = sum(p.numel() for p in params)
    read = sum(p.grad.nbytes for p in params if p.grad is not None)
    both = sum(p.nbytes for p in params) + sum(x.nbytes for x in state_tensors(optimizer) if x.ndim)
    return (read + 2 * both) / elements


def seconds_of(call: Callable[[], object], device: str) -> float:
    """What a call takes, with what it starts on the device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def measure(model: str, contestant: Contestant, seconds: float, device: str = "cpu") -> Result:
    """Run one case in this process."""
    shapes = MODELS[model]
    weights, gradients = weights_and_gradients(shapes, device)
    errors, first_step, optimizer, params = first_updates(contestant.make, weights, gradients, contestant.dtype)
    base_params = parameters(weights, gradients, BASELINE.dtype)
    baseline = BASELINE.make(base_params)
    for p, g in zip(params, gradients, strict=True):
        if p.grad is None:
            p.grad = g.to(contestant.dtype)
    result = Result(
        model, contestant.name, sum(w.numel() for w in weights), len(shapes), **asdict(errors), verdict=errors.verdict(contestant.error),
        first_step=first_step, bytes_moved=bytes_moved(optimizer, params),
    )  # fmt: skip
    del weights, gradients
    held = [p.grad for p in params]

    def restore() -> None:
        if params[0].grad is None:
            for p, g in zip(params, held, strict=True):
                p.grad = g

    for _ in range(2):
        restore()
        optimizer.step()
        baseline.step()
    end = time.perf_counter() + seconds
    pair = [(optimizer, result.samples), (baseline, result.baseline_samples)]
    while time.perf_counter() < end or len(result.samples) < 6:
        restore()
        pair.reverse()
        for one, samples in pair:
            samples.append(seconds_of(one.step, device))
    result.median, result.baseline = statistics.median(result.samples), statistics.median(result.baseline_samples)
    return result


def in_a_process(model: str, contestant: Contestant, arguments: Arguments) -> Result:
    """One case in a process of its own, so that neither memory nor compiled code is another's."""
    if len(MODELS[model]) > contestant.tensors:
        return Result(
            model,
            contestant.name,
            failure=f"not run on {len(MODELS[model])} tensors: it compiles each by itself, for minutes",
        )
    case = [model, contestant.name, str(arguments.threads), str(arguments.seconds), arguments.device]
    found, failure = run_case(__file__, case, arguments.limit)
    return Result(model, contestant.name, failure=failure) if found is None else Result(**found)


COLUMNS = ["ms", "ratio", "bytes/param", "ratio per byte", "error", "first step, s"]


def cells(r: Result) -> list[str]:
    """A case as text."""
    if r.failure:
        return [r.failure, *[""] * (len(COLUMNS) - 1)]
    verdict = f"{r.error:.1e}" + ("" if r.correct else f", {r.verdict}")
    ratio = f"{r.ratio:.3f}" if r.correct else f"({r.ratio:.3f})"
    return [
        f"{1e3 * r.median:.2f}",
        ratio,
        f"{r.bytes_moved:.1f}",
        f"{r.ratio_per_byte:.2f}",
        verdict,
        f"{r.first_step:.1f}",
    ]


def printed(results: list[Result]) -> Any:
    """What is shown on a terminal."""
    from rich.table import Table

    shown = Table(title="AdamW's step, against torch fused in float32 in the same process")
    for column in ("model", "optimizer", *COLUMNS):
        shown.add_column(column, justify="left" if column in ("model", "optimizer") else "right")
    for r in results:
        shown.add_row(r.model, r.contestant, *cells(r), style=None if r.correct else "dim" if r.failure else "red")
    return shown


def picture(results: list[Result], path: Path) -> None:
    """Bars of the ratio, a panel per model; wrong steps are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    models = list(dict.fromkeys(r.model for r in results))
    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 7), squeeze=False, layout="constrained")
    for ax, model in zip(axes[0], models, strict=True):
        good = sorted((r for r in results if r.model == model and r.correct), key=lambda r: -r.ratio)
        colours = ["#1f6f8b" if r.contestant.startswith("everybit") else "#b8b8b8" for r in good]
        ax.barh([r.contestant for r in good], [r.ratio for r in good], color=colours)
        ax.axvline(1.0, color="black", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_xlim(0.08, 2.5 * max(r.ratio for r in good))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_title(model)
        ax.set_xlabel("time / torch fused (float32)")
        for index, r in enumerate(good):
            ax.text(r.ratio, index, f" {r.ratio:.2f}", va="center", fontsize=8)
        ax.tick_params(axis="y", labelsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: Arguments) -> None:
    """Measure, print, write."""
    from rich.console import Console
    from rich.progress import track

    if unknown := [model for model in arguments.models if model not in MODELS]:
        raise SystemExit(f"models: got {', '.join(unknown)}; accepted are {', '.join(MODELS)}.")
    if arguments.run:
        chosen = [named(name) for name in arguments.contestants] or contestants_on(arguments.device)
        cases = [(model, contestant) for model in arguments.models for contestant in chosen]
        results: list[Result] = []
        torch.set_num_threads(arguments.threads)
        # Once: what runs is what was there at the start.
        machine = describe()
        for model, contestant in track(cases, description="measuring", console=Console(stderr=True)):
            results.append(in_a_process(model, contestant, arguments))
            raw = {"machine": machine, "results": [asdict(r) for r in results]}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(raw, indent=1))
    held = json.loads(arguments.out.read_text())
    results = [Result(**r) for r in held["results"]]
    Console(width=170).print(printed(results))
    if arguments.page is not None:
        images = arguments.page.parent / "images"
        images.mkdir(parents=True, exist_ok=True)
        picture(results, images / f"{arguments.out.stem}.png")
        rows = [[r.contestant, *cells(r)] for r in results]
        by_model = ""
        for model in dict.fromkeys(r.model for r in results):
            first = next(r for r in results if r.model == model)
            size = f"{first.elements:,} parameters in {first.tensors:,} tensor{'s' if first.tensors > 1 else ''}"
            own = [row for row, r in zip(rows, results, strict=True) if r.model == model]
            by_model += f"\n**{model}**: {size}\n\n{table(['optimizer', *COLUMNS], own)}"
        insert(arguments.page, arguments.out.stem, by_model + origin(held["machine"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        warnings.simplefilter("ignore")
        torch.set_num_threads(int(sys.argv[4]))
        try:
            measured = measure(sys.argv[2], named(sys.argv[3]), float(sys.argv[5]), sys.argv[6])
        except ModuleNotFoundError as error:
            measured = Result(sys.argv[2], sys.argv[3], failure=f"not installed: {error.name}")
        print(json.dumps(asdict(measured)))
    else:
        import tyro

        main(tyro.cli(Arguments))
