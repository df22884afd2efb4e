"""Colours of pictures, the same in all of them."""

from __future__ import annotations

# Okabe and Ito's colours, which colour-blind readers can tell apart: https://jfly.uni-koeln.de/color/. The reference is black.
REFERENCE_COLOUR = "#000000"
POLICY_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D46", "#7F7F7F", "#6A51A3", "#A50F15", "#08519C", "#B8B800",
)  # fmt: skip
USE_COLOURS = {
    "parameter": "#3B5B7E",
    "compensation": "#D98B4A",
    "gradient": "#A9A9A9",
    "momentum": "#6FA287",
    "variance": "#A78BB8",
}
OTHER_USE_COLOURS = ("#C9B458", "#7FB2C9", "#C97F7F")
