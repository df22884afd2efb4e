"""The picture of a sweep: each optimizer's loss at each learning rate, and the best with the range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from everybit_torch.cli.colours import POLICY_COLOURS, REFERENCE_COLOUR
from everybit_torch.cli.files import write_whole
from everybit_torch.cli.sweep.running import Best, Run

STYLES = ("-", "--", ":", "-.")
COLOURS = (REFERENCE_COLOUR, *POLICY_COLOURS)


def draw(path: Path, runs: Sequence[Run], best: Sequence[Best], *, title: str) -> None:
    """Draw a sweep into a PNG at ``path``, which is replaced whole."""
    figure = Figure(figsize=(13, 2.2 + 0.42 * max(len(best), 8)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, horizontalalignment="left", wrap=True)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    names = dict.fromkeys(run.optimizer for run in runs)
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    styles = {name: STYLES[number // len(COLOURS) % len(STYLES)] for number, name in enumerate(names)}
    _draw_lines(left, runs, colours, styles)
    _draw_ranges(right, best, colours)
    write_whole(path, lambda file: figure.savefig(file, format="png"))


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
