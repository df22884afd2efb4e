"""What plain bfloat16 loses at five learning rates: the table and the picture of README.md and of docs/concepts/lost_updates.md.

.venv/bin/python benchmarks/small_updates.py --run      # everybit compare, once for each rate: a quarter of an hour
.venv/bin/python benchmarks/small_updates.py --write    # the table and the picture, from the results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

import machine
import pages

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/small-updates-cpu.json"
PAGES = (ROOT / "README.md", ROOT / "docs/concepts/lost_updates.md")
RATES = ("3e-5", "1e-4", "3e-4", "1e-3", "3e-3")
DRAWN = "1e-4"
SEEDS = (11, 12)
POLICIES = ("FP32", "PURE_BF16", "LEAN_BF16")
EVERY = 10  # steps averaged into one point of a curve


def run(out: Path) -> dict[str, Any]:
    """Train at each rate, and keep what the table and the picture need."""
    found: dict[str, Any] = {"machine": machine.describe(), "seeds": SEEDS, "rates": {}}
    for number, rate in enumerate(RATES, 1):
        print(f"learning rate {rate}, {number} of {len(RATES)}", flush=True)
        folder = out / rate
        command = ["everybit", "compare", "--lr", rate, "--out", str(folder), "--quiet"]
        command += ["--policies", *POLICIES, "--seed-list", *map(str, SEEDS)]
        subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
        results = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        rows = {row["policy"]: row for row in results["summary"]}
        kept = ("validation_loss", "difference", "lost_share", "edq", "bytes_measured")
        found["rates"][rate] = {
            "command": " ".join(command),
            "model": results["model"],
            "summary": {name: {key: rows[name][key] for key in kept} for name in POLICIES},
            "by_seed": {
                name: [r["validation"][-1]["loss"] for r in results["records"] if r["policy"] == name]
                for name in POLICIES
            },
            "curves": curves(results["records"]) if rate == DRAWN else None,
        }
    return found


def curves(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Mean training loss over the seeds and over every ten steps."""
    found = {}
    for name in POLICIES:
        losses = [mean(each) for each in zip(*(r["losses"] for r in records if r["policy"] == name), strict=True)]
        found[name] = [round(mean(losses[at : at + EVERY]), 5) for at in range(0, len(losses), EVERY)]
    return found


def table(found: dict[str, Any]) -> str:
    """A row for each learning rate: what is lost, and what it costs."""
    rows = []
    for rate, one in found["rates"].items():
        pure, lean = one["summary"]["PURE_BF16"], one["summary"]["LEAN_BF16"]
        rows.append(
            [
                rate,
                f"{pure['lost_share']:.0%}".replace("%", " %"),
                signed(pure["difference"]),
                signed(lean["difference"]),
            ]
        )
    return pages.table(["learning rate", "updates lost", "plain bfloat16", "`LEAN_BF16`"], rows)


def signed(difference: float) -> str:
    return f"{round(difference, 3) + 0.0:+.3f}"


def draw(found: dict[str, Any], palette: str) -> None:
    """Loss curves on the left, bytes per parameter on the right."""
    import matplotlib as mpl

    from concept_pictures import PALETTES, SETTINGS
    from everybit_cli.colours import POLICY_COLOURS

    ink = PALETTES[palette]
    named = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    styles: dict[str, tuple[str, str, Any, float, float]] = {
        "FP32": ("float32", ink, "-", 5.0, 0.35),
        "PURE_BF16": ("plain bfloat16", POLICY_COLOURS[1], "-", 2.0, 1.0),
        "LEAN_BF16": ("LEAN_BF16", POLICY_COLOURS[0], "-", 2.0, 1.0),
    }
    one = found["rates"][DRAWN]
    with mpl.rc_context(SETTINGS | dict.fromkeys(named, ink)):  # type: ignore[arg-type]  # names of settings
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
        for name, (label, colour, line, width, alpha) in styles.items():
            losses = one["curves"][name]
            steps = [EVERY * (at + 0.5) for at in range(len(losses))]
            left.plot(steps, losses, color=colour, linestyle=line, linewidth=width, alpha=alpha, label=label)
        left.set_xlabel("step")
        left.set_ylabel("loss, nats per byte")
        left.set_title(f"AdamW at a learning rate of {DRAWN}", loc="left", fontsize=10)
        left.grid(alpha=0.2, linewidth=0.6)
        left.legend()
        for place, (name, (_, colour, _, _, alpha)) in enumerate(styles.items()):
            size = one["summary"][name]["bytes_measured"]
            right.barh(place, size, color=colour, alpha=max(alpha, 0.5), height=0.6)
            right.text(size + 0.3, place, f"{size:.0f}", verticalalignment="center")
        right.set_yticks(range(len(styles)), [label for label, *_ in styles.values()])
        right.invert_yaxis()
        right.set_xlim(0, 18)
        right.set_title("bytes per parameter", loc="left", fontsize=10)
        right.tick_params(axis="x", labelbottom=False, bottom=False)
        right.spines["bottom"].set_visible(False)
        figure.savefig(ROOT / f"docs/images/first-{palette}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/small-updates")
    given = parser.parse_args()
    if given.run:
        RESULTS.write_text(json.dumps(run(given.out), indent=1) + "\n", encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    print(table(found))
    if given.write:
        for page in PAGES:
            pages.insert(page, "small updates", table(found))
        for palette in ("light", "dark"):
            draw(found, palette)


if __name__ == "__main__":
    main()
