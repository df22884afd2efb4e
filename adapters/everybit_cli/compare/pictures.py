"""The picture: losses of each policy on the left, its bytes on the right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from everybit_cli.colours import OTHER_USE_COLOURS, POLICY_COLOURS, REFERENCE_COLOUR, USE_COLOURS
from everybit_cli.compare.results import Record

USE_NAMES = {"compensation": "compensation or main copy"}
NEGLIGIBLE_BYTES = 0.05  # per parameter; a step counter, shared by all parameters
SMOOTHING_SHARE = 0.05  # of the steps, averaged into one point of a curve

Curve = NDArray[np.float64]


def draw(records: Sequence[Record], *, reference: str, title: str) -> Figure:
    """Draw all records."""
    figure = Figure(figsize=(13, 6.8), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11, x=0.01, horizontalalignment="left")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.45, 1), height_ratios=(1.35, 1))
    upper = figure.add_subplot(grid[0, 0])
    lower = figure.add_subplot(grid[1, 0], sharex=upper)
    upper.tick_params(labelbottom=False)
    names = list(dict.fromkeys(record.policy for record in records))
    colours = policy_colours(names, reference)
    _draw_losses(upper, records, names, colours)
    _draw_differences(lower, records, names, colours, reference)
    _draw_bytes(figure.add_subplot(grid[:, 1]), records, names, colours)
    return figure


def policy_colours(names: Sequence[str], reference: str) -> dict[str, str]:
    """A colour for each policy; the reference's does not depend on the others."""
    others = [name for name in names if name != reference]
    colours = {name: POLICY_COLOURS[index % len(POLICY_COLOURS)] for index, name in enumerate(others)}
    return colours | {reference: REFERENCE_COLOUR}


def smooth(values: Curve) -> tuple[Curve, Curve]:
    """Steps, counted from 1, and the mean of ``values`` over a short stretch of steps around each."""
    width = max(1, round(SMOOTHING_SHARE * len(values)))
    means = np.convolve(values, np.full(width, 1 / width), mode="valid")
    return np.arange(len(means), dtype=np.float64) + (width + 1) / 2, means


def _losses(records: Sequence[Record], name: str) -> Curve:
    """Return the training losses, of shape (seeds, steps)."""
    return np.array([record.losses for record in records if record.policy == name])


def _validation(records: Sequence[Record], name: str) -> tuple[Curve, Curve]:
    """Steps, and losses (seeds, steps)."""
    own = [record.validation for record in records if record.policy == name]
    return np.array([float(point.step) for point in own[0]]), np.array([[point.loss for point in run] for run in own])


def _draw_losses(axes: Axes, records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> None:
    seen: list[Curve] = []
    for order, name in enumerate(names):
        steps, training = smooth(_losses(records, name).mean(axis=0))
        at, validation = _validation(records, name)
        held_out = validation.mean(axis=0)
        # Curves that coincide show as one line with borders in all their colours: each is a little thinner than the curve below.
        thinner = order / max(1, len(names) - 1)
        axes.plot(steps, training, color=colours[name], linewidth=3.2 - 2.2 * thinner, label=name, alpha=0.9)
        axes.plot(at, held_out, "o", color=colours[name], markersize=6.5 - 3.5 * thinner)
        # The first steps fall from 5.5, and would flatten what matters.
        seen += [training[len(training) // 8 :], held_out[-1:]]
    _show_range(axes, np.concatenate(seen))
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("Loss: lines training (smoothed), dots held-out text", fontsize=10, loc="left")
    axes.legend(fontsize=8.5, frameon=False, ncols=2 if len(names) > 3 else 1)
    _tidy(axes)


def _show_range(axes: Axes, values: Curve) -> None:
    """Let the vertical axis span ``values``, as far as they are numbers."""
    values = values[np.isfinite(values)]
    if values.size and values.max() > values.min():
        margin = 0.06 * (values.max() - values.min())
        axes.set_ylim(values.min() - margin, values.max() + margin)


def _draw_differences(
    axes: Axes, records: Sequence[Record], names: Sequence[str], colours: dict[str, str], reference: str
) -> None:
    base = _losses(records, reference)
    _, base_validation = _validation(records, reference)
    axes.axhline(0, color=colours[reference], linewidth=1.2)
    for name in names:
        if name == reference:
            continue
        gaps = [smooth(run) for run in _losses(records, name) - base]
        steps, curves = gaps[0][0], np.array([curve for _, curve in gaps])
        axes.plot(steps, curves.mean(axis=0), color=colours[name], linewidth=1.1, alpha=0.85)
        at, validation = _validation(records, name)
        gap = validation - base_validation
        spread = None if len(gap) < 2 else gap.std(axis=0, ddof=1)
        axes.errorbar(at, gap.mean(axis=0), yerr=spread, fmt="o", color=colours[name], markersize=4, capsize=2)
    seeds = f", mean over {len(base)} seeds, bars ± 1 standard deviation" if len(base) > 1 else ""
    axes.set_title(f"Difference to {reference}, same batches{seeds}", fontsize=10, loc="left")
    axes.set_ylabel("nats per byte")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _tidy(axes)


def _draw_bytes(axes: Axes, records: Sequence[Record], names: Sequence[str], colours: dict[str, str]) -> None:
    tables = {name: next(r.bytes_measured for r in records if r.policy == name) for name in names}
    found = dict.fromkeys(use for table in tables.values() for use, size in table.items() if size >= NEGLIGIBLE_BYTES)
    uses = [use for use in USE_COLOURS if use in found] + [use for use in found if use not in USE_COLOURS]
    others = [use for use in uses if use not in USE_COLOURS]
    fill = USE_COLOURS | {use: OTHER_USE_COLOURS[index % len(OTHER_USE_COLOURS)] for index, use in enumerate(others)}
    places = np.arange(len(names))
    widest = max(sum(table.values()) for table in tables.values())
    start = np.zeros(len(names))
    for use in uses:
        sizes = np.array([tables[name].get(use, 0.0) for name in names])
        axes.barh(
            places, sizes, left=start, height=0.62, color=fill[use], edgecolor="white", label=USE_NAMES.get(use, use)
        )
        for place, size, offset in zip(range(len(names)), sizes, start, strict=True):
            if size >= 0.025 * widest:
                axes.text(
                    offset + size / 2, place, f"{size:.3g}", ha="center", va="center", color="white", fontsize=8.5
                )
        start = start + sizes
    for place, total in enumerate(start):
        axes.text(total + 0.015 * widest, place, f"{total:.4g}", va="center", fontsize=10, fontweight="bold")
    axes.set_yticks(places, names, fontsize=9)
    for place, name in enumerate(names):
        # In the margin, the colour of the policy's curves: a name in yellow could not be read.
        axes.plot(-0.018 * widest, place, "s", color=colours[name], markersize=7, clip_on=False)
    # Downwards in the policies' order, with room for the legend below the last bar.
    axes.set_ylim(1.16 * len(names) - 0.5, -0.6)
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("bytes per parameter")
    axes.set_title("Memory by use, measured", fontsize=10, loc="left")
    axes.legend(fontsize=8.5, frameon=False, ncols=min(3, len(uses)), loc="lower left", borderaxespad=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0, pad=16)


def _tidy(axes: Axes) -> None:
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
