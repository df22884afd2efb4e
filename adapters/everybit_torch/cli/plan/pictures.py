"""The picture of a plan: the persistent bytes of one rank, by use, and its transient bytes on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from everybit_torch.cli.compare.pictures import USE_COLOURS
from everybit_torch.cli.compare.results import write_whole
from everybit_torch.sharded.plan import Plan
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
LINE = 0.05  # of the widest bar: below it a part is not labelled


def draw(path: Path, rows: Sequence[tuple[str, Strategy, Plan]], *, title: str) -> None:
    """Draw a bar for each policy and strategy into a PNG at ``path``, which is replaced whole."""
    figure = Figure(figsize=(12, 1.8 + 0.36 * len(rows)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left")
    axes = figure.add_subplot()
    places, place, previous = [], 0.0, rows[0][0]
    for policy, _, _ in rows:
        place += 1.0 if policy == previous else 1.6
        places.append(place)
        previous = policy
    widest = max(plan.peak_bytes for _, _, plan in rows) / 2**30
    named: set[str] = set()
    for y, (_, _, plan) in zip(places, rows, strict=True):
        left = 0.0
        for use, nbytes in plan.persistent.items():
            width = nbytes / 2**30
            label = use if use not in named and width > 1e-3 * widest else None
            named.update([use] if label else [])
            axes.barh(y, width, left=left, height=0.8, color=COLOURS.get(use, OTHER), label=label)
            if width > LINE * widest:
                axes.text(left + width / 2, y, f"{width:.1f}", ha="center", va="center", fontsize=7, color="white")
            left += width
        transient = max(plan.transient.values()) / 2**30
        label = "for moments" if "for moments" not in named else None
        named.add("for moments")
        axes.barh(
            y,
            transient,
            left=left,
            height=0.8,
            facecolor="none",
            edgecolor="#555555",
            hatch="////",
            linewidth=0.6,
            label=label,
        )
        axes.text(left + transient, y, f"  {left + transient:.1f}", va="center", fontsize=7)
    axes.set_yticks(places, [f"{policy}  {strategy}" for policy, strategy, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one rank")
    axes.set_xlim(0, 1.12 * widest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower right", frameon=False)
    write_whole(path, lambda file: figure.savefig(file, format="png"))
