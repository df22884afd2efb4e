"""The picture of a plan: the persistent bytes of one rank, by use, and its transient bytes on top of them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from everybit_cli.colours import USE_COLOURS
from everybit_cli.plan.advice import Planned
from everybit_torch.sharded.strategies import Strategy

COLOURS = {
    "parameters": USE_COLOURS["parameter"],
    "main parameters": "#B0643A",
    "compensation": USE_COLOURS["compensation"],
    "gradients": USE_COLOURS["gradient"],
    "momentum": USE_COLOURS["momentum"],
    "variance": USE_COLOURS["variance"],
}
OTHER = "#C9B458"
TRANSIENT = "transient"
BUDGET = "budget"
LINE = 0.05  # of the widest bar: below it a part is not labelled


def draw(rows: Sequence[Planned], *, title: str, budget: int | None = None) -> Figure:
    """Draw a panel for each strategy, with an axis of its own and a bar for each policy.

    Args:
        rows: The plans.
        title: Over it.
        budget: Bytes at which a line is drawn; None: no line.
    """
    strategies: tuple[Strategy, ...] = tuple(dict.fromkeys(row.strategy for row in rows))
    figure = Figure(figsize=(12, 1.2 + len(strategies) * 0.7 + 0.36 * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left", wrap=True)
    panels = figure.subplots(len(strategies), squeeze=False)[:, 0]
    handles: dict[str, Artist] = {}
    for axes, strategy in zip(panels, strategies, strict=True):
        handles |= _draw_panel(axes, [row for row in rows if row.strategy == strategy], strategy)
        if budget is not None:
            line = axes.axvline(budget / 2**30, color="#B00020", linewidth=1)
            handles.setdefault(BUDGET, line)
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * budget / 2**30))
    panels[-1].set_xlabel("GiB on one rank; each panel has its own axis")
    order = sorted(handles, key=lambda use: (TRANSIENT, BUDGET).index(use) if use in (TRANSIENT, BUDGET) else -1)
    figure.legend(
        [handles[use] for use in order], order, fontsize=8, loc="outside lower center", ncols=len(order), frameon=False
    )
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Planned], strategy: Strategy) -> dict[str, Artist]:
    """Returns an artist for each use of memory, for the legend."""
    widest = max(row.plan.peak_bytes for row in rows) / 2**30
    handles: dict[str, Artist] = {}
    for y, plan in enumerate(row.plan for row in rows):
        left = 0.0
        for use, nbytes in plan.persistent.items():
            width = nbytes / 2**30
            bar = axes.barh(y, width, left=left, height=0.8, color=COLOURS.get(use, OTHER))
            if width > 1e-3 * widest:
                handles.setdefault(use, bar[0])
            if width > LINE * widest:
                axes.text(left + width / 2, y, f"{width:.1f}", ha="center", va="center", fontsize=7, color="white")
            left += width
        transient = max(plan.transient.values()) / 2**30
        bar = axes.barh(
            y, transient, left=left, height=0.8, facecolor="none", edgecolor="#555555", hatch="////", linewidth=0.6
        )
        handles.setdefault(TRANSIENT, bar[0])
        axes.text(left + transient, y, f"  {left + transient:.1f}", va="center", fontsize=7)
    axes.set_title(strategy, fontsize=9, loc="left")
    axes.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * widest)
    axes.spines[["top", "right"]].set_visible(False)
    return handles
