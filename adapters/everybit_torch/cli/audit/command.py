"""``everybit audit``, from a saved audit to a table, a picture and a policy that would mend what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from everybit_torch.audit import LayerAudit, load_audit, worst
from everybit_torch.cli.audit.pictures import draw
from everybit_torch.cli.errors import FAILED, OptionError
from everybit_torch.cli.files import check_out, keep_results
from everybit_torch.cli.machine import versions
from everybit_torch.cli.output import Output, Results, Sheet, show

FORMAT = 1
ARRIVED = 0.98
"""EDQ below which an audit says that updates are lost."""
FROZEN = 0.5
"""Share of elements that do not move, above which a moment is called frozen: rounded to nearest, one that moves is rarely below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions(Output):
    """Show where a training run loses precision, layer by layer, and which policy would keep it.

    The file is written by the script that trains: audit = everybit_torch.Audit(model, optimizer) after the optimizer is made, and
    audit.save("audit.json") at the end. Writes audit.json (the verdict and all numbers) and audit.png (layers by steps) to --out, if it is
    given. The exit code is 1 if something is lost.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The file that Audit.save wrote."""

    rows: int = 20
    """The number of layers in the table, those with the greatest loss first; 0: all."""

    out: Path | None = None
    """Folder for audit.json and audit.png; created if it does not exist."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Describe in words what is lost, and which policy would keep it.

    Attributes:
        findings: Sentences; none if nothing is lost.
        advice: Of the policy, with its bytes; empty if nothing is lost.
    """

    findings: list[str]
    advice: str


def audit(options: AuditOptions, console: Console, command: str) -> Results:
    """Read, judge and show.

    Raises:
        OptionError: An option that cannot be used.
    """
    if options.rows < 0:
        raise OptionError("--rows", options.rows, "a whole number, at least 0")
    try:
        layers = load_audit(options.path)
    except OSError as error:
        raise OptionError(
            "path", f"{options.path} ({(error.strerror or str(error)).lower()})", "a file that can be read"
        ) from None
    except (TypeError, ValueError) as error:
        raise OptionError("path", " ".join(str(error).split()), "what Audit.save wrote") from None
    if not layers:
        raise OptionError("path", f"{options.path}, in which no step was audited", "an audit of one step or more")
    if options.out is not None:
        check_out(options.out)
    found = judge(layers)
    steps = sorted({layer.step for layer in layers})
    names = {layer.name for layer in layers}
    title = f"{options.path}: {len(names)} parameters, {len(steps)} audited steps ({steps[0]} to {steps[-1]})"
    console.print(title, highlight=False)
    show(_sheet(layers, options.rows), console)
    for line in [*found.findings, found.advice or "Nothing is lost: the updates reach the weights."]:
        console.print(line, highlight=False)
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "findings": found.findings, "advice": found.advice,
        "layers": [asdict(layer) for layer in layers],
    }  # fmt: skip
    if options.out is not None:
        keep_results(options.out, "audit", results, lambda picture: draw(picture, layers, title=title), console)
    return Results(results, FAILED if found.findings else 0)


def judge(layers: Sequence[LayerAudit]) -> Verdict:
    """Totals of the audits over all layers and steps, weighted by elements."""
    elements = sum(layer.elements for layer in layers)
    findings = []
    losing = [layer for layer in layers if layer.edq < ARRIVED]
    if losing:
        lost = sum(layer.lost_share * layer.elements for layer in layers) / elements
        mended = sum(layer.mended_lost_share * layer.elements for layer in layers) / elements
        lowest = min(losing, key=lambda layer: layer.edq)
        findings.append(
            f"Updates are lost: {100 * lost:.1f} % of them over all layers and audited steps (float32 weights would lose"
            f" {100 * mended:.1f} %); least arrives in {lowest.name} at step {lowest.step} (EDQ {lowest.edq:.3f})."
        )
    frozen = sorted({key for layer in layers for key, share in layer.frozen.items() if share > FROZEN})
    for key in frozen:
        some = {layer.name for layer in layers if layer.frozen.get(key, 0.0) > FROZEN}
        findings.append(
            f"{key} is frozen: most of its elements did not move where they were to, in {len(some)} parameters."
        )
    overflowing = [(layer, use, count) for layer in layers for use, count in layer.nonfinite.items()]
    if overflowing:
        layer, use, count = overflowing[0]
        findings.append(
            f"Numbers overflow: {count} of the {use} of {layer.name} are infinite or NaN at step {layer.step}"
            f" ({len(overflowing)} such findings in all)."
        )
    advice = ""
    if losing or frozen:
        advice = (
            "LEAN_BF16 would mend it: exact float32 weights, moments rounded stochastically; 10 bytes per parameter with Adam, gradient"
            " included, where pure bfloat16 takes 8 and float32 16. FLOOR_BF16 mends it on average, in 8 bytes."
        )
    elif overflowing:
        advice = "No policy mends that: look at the learning rate, clip gradients, or train in bfloat16, whose range is float32's."
    return Verdict(findings, advice)


def _sheet(layers: Sequence[LayerAudit], rows: int) -> Sheet:
    shown = sorted(worst(layers).values(), key=lambda layer: layer.edq)
    left = len(shown) - rows if rows and len(shown) > rows else 0
    caption = (
        "Each parameter at its worst audited step. Lost: share of the updates that left the weight as it was; float32: the same, if weights"
        " were float32; EDQ: share of the intended update that arrived; frozen: share of a 16-bit moment's elements that did not move where"
        " they were to, of the worst moment." + (f" {left} more parameters: --rows 0." if left else "")
    )
    sheet = Sheet(("parameter", "elements", "step", "lost\n%", "float32\n%", "EDQ", "frozen\n%"), caption=caption)
    for layer in shown[: rows or None]:
        frozen = max(layer.frozen.values(), default=None)
        sheet.rows.append(
            (
                layer.name,
                f"{layer.elements:,}",
                str(layer.step),
                f"{100 * layer.lost_share:.1f}",
                f"{100 * layer.mended_lost_share:.1f}",
                f"{layer.edq:.3f}",
                "" if frozen is None else f"{100 * frozen:.1f}",
            )
        )
    return sheet
