"""The pictures of docs/concepts: each twice, for the light and the dark palette, as SVG whose text is text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from torch import Tensor

from everybit_cli.colours import POLICY_COLOURS

matplotlib.use("Agg")
from matplotlib import pyplot  # after the back end is chosen

PALETTES = {"light": "#333333", "dark": "#dddddd"}
COLOURS = dict(
    zip(("Split(16)", "Nearest()", "Stochastic()", "Kahan()", "Split(8), stochastic"), POLICY_COLOURS, strict=False)
)
COLOURS |= {'Nearest("bfloat16")': COLOURS["Nearest()"], 'Stochastic("bfloat16")': COLOURS["Stochastic()"]}
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "everybit",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
}


@contextmanager
def picture(folder: Path, name: str, palette: str, xlabel: str, ylabel: str) -> Iterator[tuple[Any, str]]:
    """Axes, and the colour of the reference; saved as ``name-palette.svg``."""
    colour = PALETTES[palette]
    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(SETTINGS | dict.fromkeys(coloured, colour)):  # type: ignore[arg-type]  # names of settings
        figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.2, linewidth=0.6)
        yield axes, colour
        axes.legend()
        figure.savefig(folder / f"{name}-{palette}.svg", metadata={"Date": None})
        pyplot.close(figure)


def draw(
    folder: Path,
    walked: Mapping[str, Tensor],
    arrived: Mapping[str, list[tuple[float, float]]],
    exponents: tuple[int, ...],
    moments: Mapping[str, list[float]],
    compiled: Mapping[str, list[float]],
    summed: Mapping[str, list[float]],
    ranks: tuple[int, ...],
) -> None:
    """Draw every picture in both palettes; the arguments are what the functions of ``concepts.py`` return."""
    folder.mkdir(parents=True, exist_ok=True)
    for palette in PALETTES:
        with picture(folder, "lost-updates", palette, "step", "weight") as (axes, reference):
            axes.plot(walked["float32"][:, 0], color=reference, linewidth=3, alpha=0.5, label="float32")
            for name in ("Nearest()", "Split(16)"):
                axes.plot(walked[name][:, 0], color=COLOURS[name], label=name)

        with picture(folder, "stochastic-rounding", palette, "step", "weight") as (axes, reference):
            for copy in range(6):
                axes.plot(walked["Stochastic()"][:, copy], color=COLOURS["Stochastic()"], linewidth=0.7, alpha=0.6)
            axes.plot(
                walked["Stochastic()"].double().mean(1),
                color=COLOURS["Stochastic()"],
                linewidth=2.5,
                label="Stochastic(), mean of 256",
            )
            axes.plot(walked["Nearest()"][:, 0], color=COLOURS["Nearest()"], label="Nearest()")
            axes.plot(walked["float32"][:, 0], color=reference, linestyle="--", label="float32")

        sizes = [2.0**exponent for exponent in exponents]
        with picture(
            folder, "compensation", palette, "size of one update, to weights in [1, 2)", "error of a single weight"
        ) as (axes, _):
            for name, values in arrived.items():
                axes.plot(
                    sizes,
                    [max(error, 1e-5) for _, error in values],
                    color=COLOURS[name],
                    marker="o",
                    markersize=3,
                    label=name,
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_ylim(1e-5, 50)
            axes.invert_xaxis()

        with picture(folder, "moments", palette, "step", "second moment") as (axes, reference):
            for name, moment in moments.items():
                axes.plot(
                    moment, color=COLOURS.get(name, reference), linewidth=3 if name == "float32" else 1.5, label=name
                )
            axes.set_ylim(0, 0.11)

        with picture(folder, "compilers", palette, "step", "weight and residual") as (axes, _):
            for (name, path), colour in zip(compiled.items(), POLICY_COLOURS, strict=False):
                style: Any = (0, (4, 4)) if "everybit" in name and "compile" in name else "-"
                axes.plot(path, color=colour, linestyle=style, linewidth=2, label=name)

        with picture(folder, "sums", palette, "ranks", "error of the sum, relative") as (axes, _):
            for (name, errors), colour in zip(
                summed.items(), (POLICY_COLOURS[1], POLICY_COLOURS[4], POLICY_COLOURS[0]), strict=True
            ):
                shown = [(count, error) for count, error in zip(ranks, errors, strict=True) if error > 0]
                axes.plot(*zip(*shown, strict=True), color=colour, marker="o", markersize=3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
