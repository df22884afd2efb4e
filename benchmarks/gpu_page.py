"""What was measured on a GPU, as Markdown.

The programs that made the results are imported where their results are shown: they need packages that may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages import insert, origin, table

NOT_RUN = "`make gpu` was not run on a GPU yet: there are no measured results.\n"


def write(page: Path, results: Mapping[str, Any]) -> None:
    """Put the results into a page, between its marks."""
    insert(page, "gpu", markdown(results))


def markdown(results: Mapping[str, Any]) -> str:
    """All phases, and the results of those that wrote some; a sentence, if there is nothing."""
    if not results.get("phases"):
        return NOT_RUN
    found = results["results"]
    text = (
        ""
        if results["device"] == "cuda"
        else "A rehearsal with small sizes, on a CPU: no number here means anything.\n"
    )
    text += "\n" + _phases(results["phases"])
    sections = {"tests": _tests, "steps": _steps, "peers": _peers, "compare": _compare, "sharded": _sharded}
    for name, section in sections.items():
        if name in found:
            text += "\n" + section(found[name])
    return text


def _phases(phases: Mapping[str, Any]) -> str:
    rows = [[name, one["status"], f"{one['seconds']:g}", f"{one['limit']:g}"] for name, one in phases.items()]
    return table(["phase", "", "seconds", "at most"], rows) + origin(next(iter(phases.values()))["machine"])


def _tests(found: Mapping[str, Any]) -> str:
    text = f"### Tests\n\n{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} were skipped.\n"
    return text + "".join(f"\n- failed: {name}" for name in found["failed"]) + ("\n" if found["failed"] else "")


def _steps(found: dict[str, Any]) -> str:
    import gpu_steps

    return f"### Steps of AdamW, against a copy of as many bytes\n\n{gpu_steps.markdown(found)}"


def _peers(found: dict[str, Any]) -> str:
    import speed

    results = [speed.Result(**one) for one in found["results"]]
    ran = [one for one in results if not one.failure.startswith("not installed")]
    text = "### Others' steps, against torch fused in float32\n\n"
    text += table(
        ["model", "optimizer", *speed.COLUMNS], [[one.model, one.contestant, *speed.cells(one)] for one in ran]
    )
    if absent := [one.contestant for one in results if one not in ran]:
        text += f"\nNot installed: {', '.join(absent)}.\n"
    return text + origin(found["machine"])


def _compare(found: Mapping[str, Any]) -> str:
    model, seeds = found["model"], len(found["seeds"])
    text = (
        f"### Training\n\n`everybit compare`, {model['parameters']:,} parameters ({model['name']}), {found['options']['steps']} steps,"
        f" {seeds} seed{'s' * (seeds > 1)}. Losses are nats per byte of held-out text, differences those to {found['reference']} from the"
        " same seed, with their standard deviations over seeds.\n\n"
    )
    columns = ["policy", "loss", "difference", "updates lost", "bytes/parameter", "optimizer, ms", "whole step, ms"]
    return text + table(columns, [_compared(one) for one in found["summary"]])


def _compared(row: Mapping[str, Any]) -> list[str]:
    def number(name: str, digits: int) -> str:
        value = row[name]
        return "-" if value is None else f"{value:.{digits}f}"

    def spread(name: str) -> str:
        return "" if row[name] is None else f" ± {row[name]:.4f}"

    return [
        f"`{row['policy']}`", number("validation_loss", 4) + spread("validation_spread"),
        number("difference", 4) + spread("difference_spread"),
        "-" if row["lost_share"] is None else f"{100 * row['lost_share']:.1f} %", number("bytes_measured", 2),
        number("optimizer_milliseconds", 3), number("training_milliseconds", 2),
    ]  # fmt: skip


def _sharded(found: dict[str, Any]) -> str:
    import sharded

    failures = "".join(f"\nFailed: {one}.\n" for one in found.get("failures", ()))
    return f"### Sharded training\n{sharded.markdown(found)}{failures}"
