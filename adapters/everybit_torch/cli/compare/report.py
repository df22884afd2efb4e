"""The table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from everybit_torch.cli.compare.results import Summary

LONGEST_HEADING = 12


def table(rows: Sequence[Summary], *, reference: str, seeds: int) -> Table:
    """``rows`` for a terminal of 80 columns or more."""
    over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    shown = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),  # with all columns at their widest, 80 characters
        caption_justify="left",
        caption=(
            f"Losses in nats per byte of held-out text{over}. Lost: share of the updates that had no effect; EDQ: share of the"
            " intended update that reached the weights, compensation counted in; both mean over the second half of training."
            " Bytes per parameter: weights, gradients and optimizer state. Step: median of optimizer.step()."
        ),
    )
    shown.add_column("policy", overflow="fold", vertical="bottom")  # a long name is broken rather than a number
    for heading in (
        "loss",
        f"vs {reference}" if len(reference) <= LONGEST_HEADING else "vs first",
        "lost\n%",
        "EDQ",
        "bytes\nmeasured",
        "bytes\npredicted",
        "step\nms",
    ):
        shown.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        shown.add_row(
            row.policy,
            f"{row.validation_loss:.4f}",
            "" if row.policy == reference else _signed(row.difference, row.difference_spread),
            f"{100 * row.lost_share:.1f}",
            f"{row.edq:.3f}",
            f"{row.bytes_measured:.2f}",
            f"{row.bytes_predicted:.2f}",
            _milliseconds(row.optimizer_milliseconds),
        )
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


def _milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
