"""``everybit audit``: a table, a picture and a policy with fewer losses, from a saved audit or a checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from everybit_cli.errors import FAILED, OptionError
from everybit_cli.files import check_out, keep_results
from everybit_cli.machine import versions
from everybit_cli.output import Output, Results, Sheet, counted, show
from everybit_cli.policies import named_policy
from everybit_torch.audit.checkpoints import audit_checkpoint
from everybit_torch.audit.layers import LayerAudit, load_audit, worst
from everybit_torch.audit.verdict import judge

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions(Output):
    """Show where a training run loses precision, layer by layer, and which policy would keep it.

    An audit is written by the script that trains: audit = everybit_torch.Audit(model, optimizer) after the optimizer is made, and
    audit.save("audit.json") at the end. Of a checkpoint the next step is audited, with the momentum in the place of the gradient. Writes
    audit.json (the verdict and all numbers) and audit.png (layers by steps) to --out, if it is given. The exit code is 1 if something is
    lost.
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The file that Audit.save wrote; or a checkpoint: a file of torch.save with the state dicts of model and optimizer."""

    optimizer: str | None = None
    """Class of a checkpoint's optimizer, of torch.optim or everybit; by default AdamW or SGD, by the state."""

    policy: str | None = None
    """Policy of a checkpoint's optimizer, if it is one of everybit: a preset, or a file that describes one (.toml, .json, .yaml)."""

    model_key: str | None = None
    """Under which a checkpoint has the model's state dict, if there are several."""

    optimizer_key: str | None = None
    """Under which a checkpoint has the optimizer's state dict, if there are several."""

    rows: int = 20
    """The number of layers in the table, those with the greatest loss first; 0: all."""

    out: Path | None = None
    """Folder for audit.json and audit.png; created if it does not exist."""


def main(options: AuditOptions, console: Console, command: str) -> Results:
    """Read, judge and show.

    Raises:
        OptionError: An option that cannot be used.
    """
    if options.rows < 0:
        raise OptionError("--rows", options.rows, "a whole number, at least 0")
    layers = _layers(options)
    if not layers:
        raise OptionError("path", f"{options.path}, in which no step was audited", "an audit of one step or more")
    if options.out is not None:
        check_out(options.out)
    found = judge(layers)
    steps = sorted({layer.step for layer in layers})
    names = {layer.name for layer in layers}
    title = f"{options.path}: {counted(len(names), 'parameter')}, {counted(len(steps), 'audited step')} ({steps[0]} to {steps[-1]})"
    console.print(title, highlight=False)
    show(_sheet(layers, options.rows), console)
    for line in [*found.findings, *found.notes, found.advice or "Nothing is lost: the updates reach the weights."]:
        console.print(line, highlight=False)
    results = {
        "format": FORMAT, "command": command, "versions": versions(), "findings": found.findings, "notes": found.notes,
        "advice": found.advice, "layers": [asdict(layer) for layer in layers],
    }  # fmt: skip
    if options.out is not None:
        from everybit_cli.audit.pictures import draw

        where = keep_results(options.out, "audit", results, lambda: draw(layers, title=title))
        console.print(where, highlight=False, soft_wrap=True)
    return Results(results, FAILED if found.findings else 0)


def _layers(options: AuditOptions) -> list[LayerAudit]:
    """Read an audit, or audit a checkpoint."""
    path = options.path
    policy = None if options.policy is None else named_policy(options.policy, "--policy")[1]
    names = ("optimizer", "policy", "model_key", "optimizer_key")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    is_checkpoint = zipfile.is_zipfile(path)
    if given and not is_checkpoint:
        raise OptionError(", ".join(given), f"given for {path}, which is no checkpoint", "a checkpoint for the path")
    try:
        if not is_checkpoint:
            return load_audit(path)
        return audit_checkpoint(
            path, optimizer=options.optimizer, policy=policy, model_key=options.model_key, optimizer_key=options.optimizer_key
        )  # fmt: skip
    except OSError as error:
        what = (error.strerror or str(error).removeprefix(f"{path}: ")).lower()
        raise OptionError("path", f"{path} ({what})", "a file that can be read") from None
    except (TypeError, ValueError) as error:
        if is_checkpoint and isinstance(error, ValueError):
            raise OptionError.saying(error) from None
        what = " ".join(str(error).partition("; accepted")[0].removeprefix(f"{path}: ").removeprefix("got ").split())
        raise OptionError("path", f"{path}: {what}", "what Audit.save wrote, or a checkpoint") from None


def _sheet(layers: Sequence[LayerAudit], rows: int) -> Sheet:
    shown = sorted(worst(layers).values(), key=lambda layer: layer.edq)
    left = len(shown) - rows if rows and len(shown) > rows else 0
    caption = (
        "Each parameter at its worst audited step. Lost: share of the updates that left the weight as it was; float32: the same, if weights"
        " were float32; EDQ: share of the intended update that arrived; frozen: share of a 16-bit moment's elements that did not move where"
        " they were to, of the worst moment." + (f" {counted(left, 'more parameter')}: --rows 0." if left else "")
    )
    sheet = Sheet(("parameter", "elements", "step", "lost\n%", "float32\n%", "EDQ", "frozen\n%"), caption=caption)
    for layer in shown[: rows or None]:
        frozen = max(layer.frozen.values(), default=None)
        lost, mended = f"{100 * layer.lost_share:.1f}", f"{100 * layer.mended_lost_share:.1f}"
        stuck = "" if frozen is None else f"{100 * frozen:.1f}"
        sheet.rows.append((layer.name, f"{layer.elements:,}", str(layer.step), lost, mended, f"{layer.edq:.3f}", stuck))
    return sheet
