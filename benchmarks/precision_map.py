"""Where plain bfloat16 loses: the map of docs/concepts/lost_updates.md, and whether a number measured early predicts it.

.venv/bin/python benchmarks/precision_map.py --run      # trains what is not in the results yet: hours; --only tiny mini for some models
.venv/bin/python benchmarks/precision_map.py --write    # the tables and the picture, from the results
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

import everybit as eb
import machine
from everybit_cli.compare.corpus import Batches, even_windows, load_corpus
from everybit_cli.compare.model import SIZES, ModelName
from everybit_cli.compare.options import CompareOptions
from everybit_cli.compare.training import PROBE_EVERY, Trainee

RESULTS = Path(__file__).parent / "results" / "precision-map-cpu.json"
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
        early = [probe for probe in one.record().probes if probe.step <= 50]
        found[name] = {
            "loss": round(one.validate(held_out, 4 * BATCH), 5),
            "start": round(start, 5),
            "lost_share": round(fmean(probe.lost_share for probe in late), 4),
            "edq": round(fmean(probe.edq for probe in late), 4),
            "early_edq": round(fmean(probe.edq for probe in early), 4),
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


if __name__ == "__main__":
    main()
