"""The picture of a sweep: each optimizer's loss at each learning rate, the best with the range, and the finals by step and by time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from everybit_torch.cli.colours import POLICY_COLOURS, REFERENCE_COLOUR
from everybit_torch.cli.files import write_whole
from everybit_torch.cli.sweep.finals import Final
from everybit_torch.cli.sweep.running import Best, Run

STYLES = ("-", "--", ":", "-.")
COLOURS = (REFERENCE_COLOUR, *POLICY_COLOURS)


def draw(
    path: Path, runs: Sequence[Run], best: Sequence[Best], finals: Sequence[Final], target: float | None, *, title: str
) -> None:
    """Draw a sweep into a PNG at ``path``, which is replaced whole; the finals, if there are any, below it."""
    upper = 2.2 + 0.42 * max(len(best), 8)
    figure = Figure(figsize=(13, upper + (5 if finals else 0)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left", wrap=True)
    grid = figure.add_gridspec(
        2 if finals else 1, 2, width_ratios=(1.25, 1), height_ratios=(upper, 5) if finals else None
    )
    names = dict.fromkeys(run.optimizer for run in runs)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    styles = {name: STYLES[number // len(COLOURS) % len(STYLES)] for number, name in enumerate(names)}
    _draw_lines(figure.add_subplot(grid[0, 0]), runs, colours, styles)
    _draw_ranges(figure.add_subplot(grid[0, 1]), best, colours)
    if finals and target is not None:
        by_step = figure.add_subplot(grid[1, 0])
        by_second = figure.add_subplot(grid[1, 1], sharey=by_step)
        _draw_finals(by_step, by_second, finals, target, colours, styles)
    write_whole(path, lambda file: figure.savefig(file, format="png"))


def _draw_finals(
    by_step: Axes,
    by_second: Axes,
    finals: Sequence[Final],
    target: float,
    colours: dict[str, str],
    styles: dict[str, str],
) -> None:
    highest = target
    for final in finals:
        curves = np.array([[point.loss for point in record.validation] for record in final.records])
        steps = np.array([point.step for point in final.records[0].validation], dtype=np.float64)
        mean = curves.mean(axis=0)
        highest = max(highest, float(np.nanmax(mean[len(mean) // 4 :])))
        for axes, at in ((by_step, steps), (by_second, steps * final.step_seconds)):
            axes.plot(
                at, mean, color=colours[final.optimizer], linestyle=styles[final.optimizer], label=final.optimizer
            )
            axes.fill_between(at, curves.min(axis=0), curves.max(axis=0), color=colours[final.optimizer], alpha=0.15)
    for axes, label in ((by_step, "steps"), (by_second, "seconds of training, validation left out")):
        axes.axhline(target, color="#888888", linewidth=0.8)
        axes.set_xlabel(label)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    # The first steps fall from 5.5, and would flatten what matters.
    by_step.set_ylim(top=highest)
    by_step.set_ylabel("loss on held-out text (nats per byte)")
    by_step.set_title(
        f"The best of each again, from {len(finals[0].records)} other seeds: mean and range; grey: {target:.3f}", fontsize=9, loc="left"
    )  # fmt: skip
    by_step.legend(fontsize=8, frameon=False, ncols=2)


def _draw_lines(axes: Axes, runs: Sequence[Run], colours: dict[str, str], styles: dict[str, str]) -> None:
    for name, colour in colours.items():
        own = sorted((run for run in runs if run.optimizer == name), key=lambda run: run.factor)
        shown = [run for run in own if math.isfinite(run.loss)]
        axes.errorbar(
            [run.factor for run in shown], [run.loss for run in shown], yerr=[run.spread or 0.0 for run in shown], color=colour,
            linestyle=styles[name], marker="o", markersize=4, linewidth=1.3, capsize=2, label=name,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("learning rate, relative to the optimizer's default")
    axes.set_ylabel("loss on held-out text (nats per byte)")
    axes.set_title("Every learning rate that was tried; runs that diverged are left out", fontsize=9, loc="left")
    axes.legend(fontsize=8, frameon=False, ncols=2)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_ranges(axes: Axes, best: Sequence[Best], colours: dict[str, str]) -> None:
    for place, one in enumerate(best):
        if not math.isfinite(one.run.loss):
            continue
        colour = colours[one.run.optimizer]
        axes.plot([one.run.loss, one.worst], [place, place], color=colour, linewidth=2, alpha=0.45)
        axes.plot(one.run.loss, place, "o", color=colour, markersize=7, fillstyle="none" if one.at_edge else "full")
        axes.annotate(
            f"{one.run.loss:.3f} at {one.run.learning_rate:g}", (one.run.loss, place), (4, 6), textcoords="offset points", fontsize=7.5
        )  # fmt: skip
    axes.set_yticks(range(len(best)), [one.run.optimizer for one in best], fontsize=8.5)
    axes.set_ylim(len(best) - 0.4, -0.8)
    axes.set_xlabel("loss on held-out text (nats per byte)")
    axes.set_title(
        "Dot: best; line: up to the worst that did not diverge.\nAn empty dot lies at the edge of the sweep.", fontsize=9, loc="left"
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
