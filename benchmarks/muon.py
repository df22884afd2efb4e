"""Muon: the time of a step with the plain and the Gram form, and what a clip by the global norm does to it. For docs/how-to.

.venv/bin/python benchmarks/muon.py --run times alone clipped      # one and two threads, a quarter of an hour
.venv/bin/python benchmarks/muon.py --write                  # the tables, from the results
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import everybit as eb
import machine
import pages
from everybit_torch import create

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/muon-cpu.json"
PAGE = ROOT / "docs/how-to/train_with_muon.md"
LAYER = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
SHAPES = LAYER * 7  # 49.5 million elements
ARITHMETICS = ("bfloat16", "float32")
WIDTHS = (128, 512, 2048, 4096, 8192)


def times(rounds: int) -> dict[str, float]:
    """Milliseconds of a step of torch's Muon and of ours in both forms."""
    gradients = [torch.randn(shape) for shape in SHAPES]

    def parameters() -> list[nn.Parameter]:
        made = [nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
        for one, gradient in zip(made, gradients, strict=True):
            one.grad = gradient
        return made

    theirs: Any = torch.optim.Muon(parameters(), lr=1e-3)
    steps: dict[str, Any] = {"torch": theirs.step}
    for arithmetic in ARITHMETICS:
        for form in ("plain", "gram"):
            iteration: Any = eb.NewtonSchulz(arithmetic=arithmetic, form=form)  # type: ignore[arg-type]
            named = [(f"layer {number}", one) for number, one in enumerate(parameters())]
            optimizer = create("muon", named, lr=1e-3, others=None, iteration=iteration, compile=False)
            steps[f"{form}, {arithmetic}"] = optimizer.step
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in random.sample(list(steps), len(steps)):
            started = time.perf_counter()
            steps[name]()
            if number:
                found[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in found.items()}


def alone(rounds: int) -> dict[str, float]:
    """Milliseconds of the iteration on a matrix four times as long as wide."""
    x = torch.randn(1024, 4096)
    found = {}
    for arithmetic in ARITHMETICS:
        for form in ("plain", "gram"):
            iteration: Any = eb.NewtonSchulz(arithmetic=arithmetic, form=form)  # type: ignore[arg-type]
            taken = []
            for number in range(rounds + 1):
                started = time.perf_counter()
                iteration.orthogonalized(x)
                if number:
                    taken.append(1e3 * (time.perf_counter() - started))
            found[f"{form}, {arithmetic}"] = statistics.median(taken)
    return found


def clipped(width: int) -> dict[str, float]:
    """The norm of a first step of a square matrix: without a clip, with one of gradients before Muon, and with one after it."""
    grads = {"w": torch.randn(width, width, generator=torch.Generator().manual_seed(0))}
    params = {name: torch.zeros_like(x) for name, x in grads.items()}
    iteration = eb.NewtonSchulz(arithmetic="float32")
    orthogonal: Any = eb.muon(0.02, others=None, weight_decay=0.0, iteration=iteration)
    clip, rate = eb.clip_by_global_norm(1.0), eb.scale_by_learning_rate(0.02)
    after = eb.chain(eb.running_mean(0.95, nesterov=True), eb.orthogonalize(None, iteration), clip, rate)

    def norm(tx: Any) -> float:
        updates, _ = tx.update(grads, tx.init(params), params)
        return float(torch.linalg.vector_norm(updates["w"].double()))

    return {"plain": norm(orthogonal), "before": norm(eb.chain(clip, orthogonal)), "after": norm(after)}


def run_clipped() -> dict[str, Any]:
    """The norms for all widths."""
    found: dict[str, Any] = {"machine": machine.describe()}
    for width in WIDTHS:
        found[str(width)] = clipped(width)
        print(width, found[str(width)], flush=True)
    return found


def by_threads(measure: Callable[[int], dict[str, float]], rounds: int) -> dict[str, Any]:
    """The times for one and two threads."""
    found: dict[str, Any] = {"machine": machine.describe()}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found[str(threads)] = measure(rounds)
        print(threads, found[str(threads)], flush=True)
    return found


def tables(found: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    taken, rows = found["times"], []
    for name in ("torch", *(f"{form}, {arithmetic}" for arithmetic in ARITHMETICS for form in ("plain", "gram"))):
        cells = []
        for threads in ("1", "2"):
            ms, plain = taken[threads][name], taken[threads].get("plain, " + name.split(", ")[-1])
            cells.append(f"{ms:.0f}" + (f" ({plain / ms:.2f})" if name.startswith("gram") else ""))
        rows.append(["`torch.optim.Muon`, bfloat16" if name == "torch" else name, *cells])
    for arithmetic in ARITHMETICS:
        cells = []
        for threads in ("1", "2"):
            plain, gram = (found["alone"][threads][f"{form}, {arithmetic}"] for form in ("plain", "gram"))
            cells.append(f"{gram:.0f} ({plain / gram:.2f})")
        rows.append([f"1024 x 4096 alone, gram, {arithmetic}", *cells])
    headings = ["ms of a step", "1 thread", "2 threads"]
    clips = []
    for width in WIDTHS:
        one = found["clipped"][str(width)]
        cells = [f"{one[key]:.3f} ({one['plain'] / one[key]:.1f})" for key in ("before", "after")]
        clips.append([str(width), f"{one['plain']:.3f}", *cells])
    widths = ["width", "no clip", "gradients clipped", "orthogonal updates clipped"]
    return {
        "muon's step": pages.table(headings, rows) + pages.origin(taken["machine"]),
        "muon clipped": pages.table(widths, clips) + pages.origin(found["clipped"]["machine"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=["times", "alone", "clipped"], nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
    for part in given.run:
        measure = {"times": times, "alone": alone}.get(part)
        found[part] = run_clipped() if measure is None else by_threads(measure, given.rounds)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.write:
        for name, text in tables(found).items():
            pages.insert(PAGE, name, text)


if __name__ == "__main__":
    main()
