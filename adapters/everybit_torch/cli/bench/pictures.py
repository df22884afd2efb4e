"""The picture of a bench: time on one axis, bytes on the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from everybit_torch.cli.bench.measuring import Timing
from everybit_torch.cli.colours import POLICY_COLOURS, USE_COLOURS
from everybit_torch.cli.files import write_whole

THEIRS = "#7F7F7F"


def draw(path: Path, timings: Sequence[Timing], *, title: str) -> None:
    """Draw bars of time and of bytes for each optimizer into a PNG at ``path``, which is replaced whole."""
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(timings)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left", wrap=True)
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(timings))
    colours = [THEIRS if one.name.startswith("torch") else POLICY_COLOURS[0] for one in timings]
    left.barh(places, [one.ratio for one in timings], color=colours)
    left.axvline(1.0, color="black", linewidth=0.8)
    for place, one in zip(places, timings, strict=True):
        left.text(one.ratio, place, f" {one.ratio:.2f}", va="center", fontsize=8)
    left.set_xlim(0, 1.15 * max(one.ratio for one in timings))
    left.set_xlabel(f"time of a step, relative to {timings[0].name}")
    left.set_yticks(places, [one.name for one in timings], fontsize=8)
    left.invert_yaxis()
    start = [0.0] * len(timings)
    for use, name in (("parameter", "weight_bytes"), ("gradient", "gradient_bytes"), ("momentum", "state_bytes")):
        widths = [float(getattr(one, name)) for one in timings]
        label = {"parameter": "weights", "gradient": "gradients", "momentum": "optimizer state"}[use]
        right.barh(places, widths, left=start, color=USE_COLOURS[use], label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    for place, total in zip(places, start, strict=True):
        right.text(total, place, f" {total:.1f}", va="center", fontsize=8)
    right.set_xlim(0, 1.15 * max(start))
    right.set_xlabel("bytes per parameter")
    right.legend(fontsize=8, frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    write_whole(path, lambda file: figure.savefig(file, format="png"))
