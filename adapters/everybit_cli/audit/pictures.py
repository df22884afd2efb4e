"""The picture of an audit: how much of the intended update arrives, by layer and step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from everybit_torch.audit.layers import LayerAudit

MOST_NAMES = 60
"""Layers beyond which the axis has no names."""


def draw(layers: Sequence[LayerAudit], *, title: str) -> Figure:
    """Draw the share of the update that arrives (EDQ), and the lost share."""
    names = list(dict.fromkeys(layer.name for layer in layers))
    steps = sorted({layer.step for layer in layers})
    arrived = np.full((len(names), len(steps)), np.nan)
    lost = arrived.copy()
    for layer in layers:
        place = names.index(layer.name), steps.index(layer.step)
        arrived[place], lost[place] = layer.edq, 100 * layer.lost_share
    figure = Figure(figsize=(12, 2.0 + 0.18 * min(len(names), 2 * MOST_NAMES)), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left", wrap=True)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, values, name, limits, colours in (
        (left, arrived, "share of the intended update that arrived (EDQ)", (0.0, 1.0), "viridis"),
        (right, lost, "lost updates, %", (0.0, 100.0), "magma_r"),
    ):
        image = axes.imshow(
            values, aspect="auto", interpolation="nearest", vmin=limits[0], vmax=limits[1], cmap=colours
        )
        figure.colorbar(image, ax=axes, shrink=0.8)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xticks(
            range(len(steps)), [str(step) for step in steps], fontsize=7, rotation=90 if len(steps) > 8 else 0
        )
        axes.set_xlabel("step")
    if len(names) <= MOST_NAMES:
        left.set_yticks(range(len(names)), names, fontsize=7)
    else:
        left.set_ylabel(f"{len(names)} parameters, in the model's order")
    return figure
