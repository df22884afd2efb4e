"""What audited steps lost, in sentences, and the policy that would keep it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from everybit_torch.audit.layers import LayerAudit

ARRIVED = 0.98
"""EDQ below which an audit says that updates are lost."""
MISSED = 7.0
"""In plain bfloat16 a run misses at most about ``exp(-MISSED * EDQ)`` of float32's progress: fitted on half of the runs of
``benchmarks/precision_map.py``, and tested on the others. Long runs at large rates missed down to a tenth of that."""
RATE = 1 / 3
"""Float32 reaches the loss of plain bfloat16 at about ``EDQ ** RATE`` of its learning rate, in the same runs."""
FROZEN = 0.5
"""Share of elements that do not move, above which a moment is called frozen: rounded to nearest, one that moves is rarely below."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Describe in words which updates are lost, and which policy would keep them.

    Attributes:
        findings: Sentences; empty if every update arrives.
        notes: Effects that look like a loss but are not.
        advice: The advised policy, with its bytes; empty if every update arrives.
    """

    findings: list[str]
    notes: list[str]
    advice: str


def judge(layers: Sequence[LayerAudit]) -> Verdict:
    """Totals of the audits over all layers and steps, weighted by elements."""
    findings, notes, rate = [], [], ""
    rounded = [layer for layer in layers if not layer.stochastic]
    losing = [layer for layer in rounded if layer.edq < ARRIVED]
    if losing:
        lost, mended = _mean_share(rounded, "lost_share"), _mean_share(rounded, "mended_lost_share")
        lowest = min(losing, key=lambda layer: layer.edq)
        findings.append(
            f"Updates are lost: {100 * lost:.1f} % of them over all layers and audited steps (float32 weights would lose"
            f" {100 * mended:.1f} %); least arrives in {lowest.name} at step {lowest.step} (EDQ {lowest.edq:.3f})."
        )
        arrives = max(
            0.0, sum(layer.edq * layer.elements for layer in rounded) / sum(layer.elements for layer in rounded)
        )
        if arrives < ARRIVED:
            findings.append(
                f"Of the movement {arrives:.0%} arrives (EDQ): in runs with as little, plain bfloat16 missed at most"
                f" about {math.exp(-MISSED * arrives):.0%} of float32's progress, and long runs down to a tenth of that."
            )
            rate = f" A learning rate that was tuned so may be too large then: {arrives**RATE:.0%} of it had the same loss in such runs."
        saturated = {layer.name for layer in losing if layer.stored.startswith("Kahan")}
        if saturated:
            findings.append(
                f"Residuals are saturated in {_counted(len(saturated), 'parameter')}: updates are too small for them, too."
            )
    if len(rounded) < len(layers):
        missed = _mean_share([layer for layer in layers if layer.stochastic], "lost_share")
        notes.append(
            f"Weights are rounded stochastically: {100 * missed:.1f} % of the updates left theirs as it was. None of that is lost,"
            " since the others move further: on average each update has its effect."
        )
    frozen = sorted({key for layer in layers for key, share in layer.frozen.items() if share > FROZEN})
    for key in frozen:
        some = {layer.name for layer in layers if layer.frozen.get(key, 0.0) > FROZEN}
        findings.append(
            f"{key} is frozen: most of its elements did not move where they were to, in {_counted(len(some), 'parameter')}."
        )
    overflowing = [(layer, use, count) for layer in layers for use, count in layer.nonfinite.items()]
    if overflowing:
        layer, use, count = overflowing[0]
        findings.append(
            f"Numbers overflow: {count} of the {use} of {layer.name} are infinite or NaN at step {layer.step}"
            f" ({_counted(len(overflowing), 'such finding')} in all)."
        )
    advice = ""
    if losing or frozen:
        advice = (
            "LEAN_BF16 would mend it: exact float32 weights, moments rounded stochastically; 10 bytes per parameter with Adam, gradient"
            " included, where pure bfloat16 takes 8 and float32 16. FLOOR_BF16 mends it on average, in 8 bytes." + rate
        )
    elif overflowing:
        advice = "No policy mends that: look at the learning rate, clip gradients, or train in bfloat16, whose range is float32's."
    return Verdict(findings, notes, advice)


def _mean_share(layers: Sequence[LayerAudit], share: Literal["lost_share", "mended_lost_share"]) -> float:
    """Over all layers, weighted by elements."""
    total: float = sum(getattr(layer, share) * layer.elements for layer in layers)
    return total / sum(layer.elements for layer in layers)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
