"""The table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everybit_cli.compare.results import Summary
from everybit_cli.output import Sheet

LONGEST_HEADING = 12


def sheet(rows: Sequence[Summary], *, reference: str, seeds: int, compiled: bool) -> Sheet:
    """``rows`` for a terminal of 80 columns or more, or in blocks."""
    over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    caption = (
        f"Losses in nats per byte of held-out text{over}. Lost: share of the updates that had no effect; EDQ: share of the"
        " intended update that reached the weights, compensation counted in; both mean over the second half of training."
        " Bytes per parameter: weights, gradients and optimizer state. Step: median of optimizer.step(),"
        f" {'compiled' if compiled else 'not compiled (--compile compiles it)'}"
    )
    caption += "." if any(row.optimizer_milliseconds is not None for row in rows) else "; too few steps to time one."
    difference = f"vs {reference}" if len(reference) <= LONGEST_HEADING else "vs first"
    headings = ("policy", "loss", difference, "lost\n%", "EDQ", "bytes\nmeasured", "bytes\npredicted", "step\nms")
    shown = Sheet(headings, caption=caption)
    for row in rows:
        shown.rows.append((
            row.policy, f"{row.validation_loss:.4f}",
            "" if row.policy == reference else _signed(row.difference, row.difference_spread),
            _number(100 * row.lost_share, 1), _number(row.edq, 3), f"{row.bytes_measured:.2f}", f"{row.bytes_predicted:.2f}",
            _milliseconds(row.optimizer_milliseconds),
        ))  # fmt: skip
    return shown


def throughput(rows: Sequence[Summary], bytes_per_step: int) -> str:
    """Bytes of text that each policy trains on in a second; empty if no step was timed."""
    return ", ".join(
        f"{row.policy} {1e3 * bytes_per_step / row.training_milliseconds:,.0f}"
        for row in rows
        if row.training_milliseconds is not None
    )


def _signed(value: float, spread: float | None) -> str:
    return f"{round(value, 4) + 0.0:+.4f}" + ("" if spread is None else f" ±{spread:.4f}")


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
