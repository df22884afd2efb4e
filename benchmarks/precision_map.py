"""Where plain bfloat16 loses: the map of docs/concepts/where_bfloat16_loses.md, and whether a number predicts it.

.venv/bin/python benchmarks/precision_map.py --run      # trains what is not in the results yet: hours; --only tiny mini for some models
.venv/bin/python benchmarks/precision_map.py --write    # the tables and the picture, from the results
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

import everybit as eb
import machine
import pages
from everybit_cli.compare.corpus import Batches, even_windows, load_corpus
from everybit_cli.compare.model import SIZES, ModelName
from everybit_cli.compare.options import CompareOptions
from everybit_cli.compare.training import PROBE_EVERY, Trainee

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "precision-map-cpu.json"
PAGE = ROOT / "docs/concepts/where_bfloat16_loses.md"
PICTURE = ROOT / "docs/images/precision-map.png"
POLICIES = ("FP32", "PURE_BF16", "FLOOR_BF16", "LEAN_BF16", "LEAN_8BIT")
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
BATCH, CONTEXT, SEED = 8, 128, 11
PRETRAINED = (400, 1e-3)  # steps and rate of the float32 model that is tuned
VALIDATED = 16384 // CONTEXT  # windows


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the map.

    Attributes:
        model: The size.
        steps: Optimizer steps.
        rate: Highest learning rate.
        tuned: Whether a model of the standard library's text is tuned on C++ headers. Else it is trained on the former from scratch.
    """

    model: ModelName
    steps: int
    rate: float
    tuned: bool = False

    def key(self) -> str:
        """Its name in the results."""
        return f"{self.model} {self.steps} {self.rate:g} {'tuned' if self.tuned else 'scratch'}"


def cases() -> Iterator[Case]:
    """Yield all points, cheap ones first."""
    for model in ("mini", "tiny"):
        for tuned in (False, True):
            yield from (Case(model, 400, rate, tuned) for rate in RATES)
    yield from (Case("small", 400, rate) for rate in (1e-4, 3e-4, 1e-3, 3e-5, 3e-3))
    yield from (Case("small", 400, rate, tuned=True) for rate in (1e-4, 3e-4, 1e-3, 3e-5, 3e-3))
    yield from (Case("mini", 1600, rate) for rate in (1e-4, 3e-4, 1e-3, 3e-5, 3e-3))
    yield from (Case("tiny", 1600, rate) for rate in RATES)


def headers() -> tuple[Tensor, Tensor]:
    """Other text: torch's C++ headers, as bytes to train on and to validate on (one file in ten)."""
    root = Path(torch.__file__).parent / "include"
    files = sorted(root.glob("ATen/*.h")) + sorted(root.glob("c10/**/*.h")) + sorted(root.glob("torch/**/*.h"))
    texts = [path.read_bytes() + b"\0" for path in files]
    held = b"".join(texts[::10])
    kept = b"".join(text for number, text in enumerate(texts) if number % 10)
    return tuple(torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (kept, held))  # type: ignore[return-value]


def trainee(policy: str, case: Case) -> Trainee:
    """A model that is trained under a policy, as ``everybit compare`` does."""
    options = CompareOptions(steps=case.steps, lr=case.rate, batch=BATCH, context=CONTEXT, compile=False)
    preset = eb.policies.PRESETS[policy]
    return Trainee(policy, preset, size=SIZES[case.model], seed=SEED, options=options, device=torch.device("cpu"))


def half_steps(weights: list[Tensor], after: list[Tensor]) -> float:
    """Median, over elements that changed, of an update in units of half the distance to the next bfloat16 number."""
    ratios = []
    for old, new in zip(weights, after, strict=True):
        _, exponent = torch.frexp(old)
        half = torch.ldexp(torch.ones_like(old), exponent - 1 - 8)
        ratios.append(((new - old).abs() / half)[(new != old) & (old != 0)])
    return float(torch.cat(ratios).median())


def run(case: Case, pretrained: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """Train one point under every policy, on the same batches."""
    corpus = load_corpus()
    text, held = headers() if case.tuned else (corpus.training, corpus.held_out)
    held_out = even_windows(held, count=VALIDATED, context=CONTEXT)
    found: dict[str, Any] = {"model": case.model, "steps": case.steps, "rate": case.rate, "tuned": case.tuned}
    for name in POLICIES:
        one = trainee(name, case)
        if case.tuned:
            one.model.load_state_dict(pretrained[case.model])
        start = one.validate(held_out, 4 * BATCH)
        batches, ratios = Batches(text, batch=BATCH, context=CONTEXT, seed=SEED), []
        for step in range(1, case.steps + 1):
            probed = name == "FP32" and step % PROBE_EVERY == 0 and 2 * step > case.steps
            before = [p.detach().clone() for p in one.model.parameters()] if probed else []
            one.train(batches.next())
            if probed:
                ratios.append(half_steps(before, [p.detach() for p in one.model.parameters()]))
        late = [probe for probe in one.record().probes if 2 * probe.step > case.steps]
        found[name] = {
            "loss": round(one.validate(held_out, 4 * BATCH), 5),
            "start": round(start, 5),
            "lost_share": round(fmean(probe.lost_share for probe in late), 4),
            "edq": round(fmean(probe.edq for probe in late), 4),
        }
        if ratios:
            found["half_steps"] = round(median(ratios), 5)
    return found


def pretrain(model: ModelName) -> dict[str, Tensor]:
    """Weights of a float32 model, trained on the standard library's text."""
    steps, rate = PRETRAINED
    one = trainee("FP32", Case(model, steps, rate))
    batches = Batches(load_corpus().training, batch=BATCH, context=CONTEXT, seed=SEED)
    for _ in range(steps):
        one.train(batches.next())
    return {name: x.detach().clone() for name, x in one.model.state_dict().items()}


def read() -> dict[str, Any]:
    """Return the results so far."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"points": {}}
    return found


def run_all(only: list[str]) -> None:
    """Train every point that is not in the results, and write each at once."""
    pretrained: dict[str, dict[str, Tensor]] = {}
    for case in cases():
        if case.key() in read()["points"] or (only and case.model not in only):
            continue
        if case.tuned and case.model not in pretrained:
            pretrained[case.model] = pretrain(case.model)
        print(f"{case.key()} ...", flush=True)
        found = run(case, pretrained)
        results = read()  # another process may have added points
        results["machine"] = machine.describe() | {"stdlib": sysconfig.get_python_version()}
        results["points"][case.key()] = found
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        gaps = {name: round(found[name]["loss"] - found["FP32"]["loss"], 4) for name in POLICIES[1:]}
        print(f"  float32 {found['FP32']['loss']:.4f}  {gaps}  edq {found['PURE_BF16']['edq']}", flush=True)


EARLIER = (
    (2.0755, 0.5767, 0.10), (1.8225, 0.1475, 0.29), (1.6265, 0.0473, 0.64),
    (2.3589, 0.1221, 0.29), (2.1180, 0.0577, 0.55), (1.9240, 0.0164, 0.83), (2.0076, -0.0441, 0.95),
)  # fmt: skip
"""Runs of ``everybit compare`` at commit f43e53a (0.5M, 1,600 steps; 3.3M, 400 steps), for which nothing is fitted: float32's loss; gap and
EDQ of plain bfloat16."""
UNTRAINED = 5.56
"""Loss of an untrained model, from which those began: within 0.02 of the logarithm of 256 for every size."""
ROWS = (
    ("tiny", 400, False), ("mini", 400, False), ("small", 400, False), ("tiny", 1600, False), ("mini", 1600, False),
    ("tiny", 400, True), ("mini", 400, True), ("small", 400, True),
)  # fmt: skip
PARAMETERS = {"tiny": "30K", "mini": "0.5M", "small": "3.3M"}
NOISE = 0.003
"""Share of the progress below which a difference is chance: two float32 runs with other seeds differ by more."""

Point = dict[str, Any]


def gap(point: Point, policy: str) -> float:
    """Nats per byte above float32."""
    return float(point[policy]["loss"] - point["FP32"]["loss"])


def missed(point: Point) -> float:
    """The gap of plain bfloat16 as a share of what float32 gained."""
    return float(gap(point, "PURE_BF16") / (point["FP32"]["start"] - point["FP32"]["loss"]))


def of_row(points: dict[str, Point], row: tuple[str, int, bool]) -> dict[float, Point]:
    """The points of a row by rate."""
    keys = {rate: Case(row[0], row[1], rate, row[2]).key() for rate in RATES}  # type: ignore[arg-type]
    return {rate: points[key] for rate, key in keys.items() if key in points}


def title_of(row: tuple[str, int, bool]) -> str:
    """A row's name."""
    return f"{PARAMETERS[row[0]]}, {row[1]:,} steps, {'tuned' if row[2] else 'from scratch'}"


def table(points: dict[str, Point]) -> str:
    """A row for each model, steps and start: gaps of plain bfloat16 by rate, and the largest of the others."""
    rows = []
    for row in ROWS:
        if found := of_row(points, row):
            cells = [f"{gap(found[rate], 'PURE_BF16'):+.3f}" if rate in found else "" for rate in RATES]
            steady = [point for rate, point in found.items() if rate < RATES[-1]]
            others = [f"{max((gap(p, name) for p in steady), key=abs):+.4f}" for name in POLICIES[2:]]
            rows.append([title_of(row), *cells, *others])
    return pages.table(["", *(f"{rate:g}" for rate in RATES), *(f"`{name}`" for name in POLICIES[2:])], rows)


def draw(points: dict[str, Point], path: Path) -> None:
    """Draw a field for each point: the share of float32's progress that plain bfloat16 missed."""
    shares: dict[str, list[float]] = {}
    for row in ROWS:
        if found := of_row(points, row):
            shares[title_of(row)] = [missed(found[rate]) if rate in found else math.nan for rate in RATES]
    figure = Figure(figsize=(7.6, 0.5 * len(shares) + 1.3), layout="constrained")
    axes = figure.subplots()
    fields = [[max(x, 0.001) for x in row] for row in shares.values()]
    shown = axes.imshow(fields, cmap="YlOrRd", norm=LogNorm(0.002, 1.0), aspect="auto")
    for y, row_of_shares in enumerate(shares.values()):
        for x, share in enumerate(row_of_shares):
            text = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
            text = "" if math.isnan(share) else "chance" if share < NOISE else text
            axes.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if share > 0.3 else "black")
    axes.set_xticks(range(len(RATES)), [f"{rate:g}" for rate in RATES])
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_xlabel("learning rate of AdamW")
    axes.set_title("Share of float32's progress that plain bfloat16 misses", fontsize=10)
    figure.colorbar(shown, ax=axes)
    figure.savefig(path, dpi=150)


def same_loss(points: dict[str, Point]) -> list[tuple[str, float, float, float]]:
    """Find where float32 reaches the loss of plain bfloat16 at a smaller rate.

    Returns:
        The row's name, the rate of plain bfloat16, EDQ there, and float32's rate as a share of it, from a line between the logarithms of
        the two rates around.
    """
    found = []
    for row in ROWS:
        own = of_row(points, row)
        for rate, point in own.items():
            loss = point["PURE_BF16"]["loss"]
            for low, high in pairwise(sorted(own)):
                slow, fast = own[low]["FP32"]["loss"], own[high]["FP32"]["loss"]
                if high <= rate and fast <= loss <= slow and missed(point) > NOISE:
                    share = (slow - loss) / (slow - fast)
                    same = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
                    found.append((title_of(row), rate, float(point["PURE_BF16"]["edq"]), same / rate))
    return found


def rates_table(points: dict[str, Point]) -> str:
    """The smaller rates of float32 with the loss of plain bfloat16."""
    rows = [[title, f"{rate:g}", f"{edq:.2f}", f"{share:.2f}"] for title, rate, edq, share in same_loss(points)]
    return pages.table(["", "rate of plain bfloat16", "EDQ", "float32's rate with the same loss, as a share"], rows)


def prediction(points: dict[str, Point]) -> dict[str, Any]:
    """Fit the logarithm of the missed share by a line on every other point, and test it on the rest; for two predictors."""
    used = [point for _, point in sorted(points.items()) if missed(point) > NOISE]
    fitted, tested = used[::2], used[1::2]
    found: dict[str, Any] = {"fitted": len(fitted), "tested": len(tested)}
    predictors: dict[str, Callable[[Point], float]] = {
        "EDQ": lambda point: float(point["PURE_BF16"]["edq"]),
        "half steps": lambda point: math.log(point["half_steps"]),
    }
    for name, of in predictors.items():
        # Where nothing arrives all is missed: a line through zero. A median update has no such end.
        slope, intercept = linear_regression(
            [of(p) for p in fitted], [math.log(missed(p)) for p in fitted], proportional=name == "EDQ"
        )
        errors = [abs(math.log(missed(p)) - intercept - slope * of(p)) for p in tested]
        spread = [abs(math.log(missed(p)) - fmean(math.log(missed(q)) for q in fitted)) for p in tested]
        if name == "EDQ":
            own = [(gap / (UNTRAINED - loss), edq) for loss, gap, edq in EARLIER]
            off = [abs(math.log(share) - intercept - slope * edq) for share, edq in own if share > NOISE]
            found["earlier"] = {
                "tested": len(off),
                "median factor": round(math.exp(median(off)), 2),
                "worst factor": round(math.exp(max(off)), 2),
            }
        found[name] = {
            "at zero": round(math.exp(intercept), 4), "slope": round(slope, 3),
            "median factor": round(math.exp(median(errors)), 2), "worst factor": round(math.exp(max(errors)), 2),
            "median factor of the mean": round(math.exp(median(spread)), 2),
        }  # fmt: skip
    return found


def predicted(found: dict[str, Any]) -> str:
    """A table of the predictors."""
    rows = [
        [
            name,
            f"{found[name]['median factor']:.1f}",
            f"{found[name]['worst factor']:.1f}",
            f"{found[name]['median factor of the mean']:.1f}",
        ]
        for name in ("EDQ", "half steps")
    ]
    rows.append(
        ["EDQ, earlier runs", f"{found['earlier']['median factor']:.1f}", f"{found['earlier']['worst factor']:.1f}", ""]
    )
    return pages.table(["predictor", "off by, median", "at worst", "the mean alone, median"], rows)


def write() -> None:
    """Write the tables and the picture."""
    results = read()
    points = results["points"]
    results["prediction"] = prediction(points)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    pages.insert(PAGE, "map", table(points))
    pages.insert(PAGE, "rates", rates_table(points))
    pages.insert(PAGE, "prediction", predicted(results["prediction"]))
    draw(points, PICTURE)
    print(json.dumps(results["prediction"], indent=1))


def main() -> None:
    """Run, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.run:
        torch.set_num_threads(1)
        run_all(given.only)
    if given.write:
        write()


if __name__ == "__main__":
    main()
