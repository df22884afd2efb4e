"""A gate: after some steps it says how many updates of a training run are lost, and can stop the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from everybit_torch.audit.intended import nonfinite
from everybit_torch.audit.layers import Audit, LayerAudit, worst
from everybit_torch.audit.verdict import judge
from everybit_torch.torch_internals.dtensors import local

LAYERS = 5
"""The number of layers that are named: those that miss most, by their elements."""

SKIPPED = 3
"""Steps in a row that were skipped, from which on it is said: finding a loss scale at the beginning skips one or two."""


_NEVER = 1 << 62


class LostUpdatesError(RuntimeError):
    """A gate with ``stop=True`` found that updates are lost, or that no step is taken."""


class Gate:
    """Watch an optimizer, and say what becomes of its updates.

    It is for any optimizer of ``torch.optim``; those of everybit are watched too, if their parameters are whole. The numbers of the run are
    not changed. On sharded parameters every rank needs a gate, and all find the same.

    Args:
        model: The model, for the names of parameters.
        optimizer: Its optimizer.
        after: The step that is audited, counted from 1.
        every: Audit every so many steps after that, too; None: none.
        stop: Raise an error where something is found.
        say: Is called with each report.

    Raises:
        TypeError: As :class:`Audit`.
        ValueError: As :class:`Audit`.

    Examples:
        >>> import torch
        >>> from everybit_torch import Gate
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        >>> gate = Gate(model, optimizer, after=1)
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> gate.step_ended()  # doctest: +ELLIPSIS
        Step 1: Updates are lost: ...
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        after: int = 50,
        every: int | None = None,
        stop: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self._audit = Audit(model, optimizer, every=_NEVER if every is None else every, first=after)
        self._model, self._stop, self._say = model, stop, say
        self._seen = self._skipped = self._steps = 0

    def step_ended(self) -> None:
        """Report, if this step was audited or if steps are skipped; to be called after each step, before gradients are set to zero.

        Raises:
            LostUpdatesError: Updates are lost or steps are skipped, with ``stop=True``.
        """
        self._steps += 1
        self._skipped = self._skipped + 1 if self._audit.step == self._seen else 0
        self._seen = self._audit.step
        if self._skipped == SKIPPED or (
            self._skipped > SKIPPED and self._skipped.bit_count() == 1
        ):  # less and less often
            self._report(self._of_skipped(), found=True)
        if layers := self._audit.layers:
            self._audit.layers = []
            lines, found = described(layers)
            self._report([f"Step {self._steps}: {lines[0]}", *lines[1:]], found=found)

    def remove(self) -> None:
        """Watch no further steps."""
        self._audit.remove()

    def _of_skipped(self) -> list[str]:
        counts = {name: nonfinite(local(p.grad)) for name, p in self._model.named_parameters() if p.grad is not None}
        bad = [name for name, count in counts.items() if count]
        why = (
            f"Gradients are not finite in {', '.join(bad[:LAYERS])}." if bad else "Gradients that are left are finite."
        )
        return [
            f"Step {self._steps}: the last {self._skipped} steps were skipped: the optimizer took none, and no weight has changed. {why}"
        ]

    def _report(self, lines: list[str], *, found: bool) -> None:
        text = "\n".join(lines)
        if found and self._stop:
            raise LostUpdatesError(text)
        self._say(text)


class Gates:
    """What the callbacks of training programs share: settings, and a gate for each optimizer.

    Args:
        after: The step that is audited, counted from 1 since training began.
        every: Audit every so many steps after that, too; None: none.
        stop: Raise an error where something is found.
    """

    def __init__(self, *, after: int = 50, every: int | None = None, stop: bool = False) -> None:
        self._after, self._every, self._stop = after, every, stop
        self._gates: list[Gate] = []

    def begin(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, speaks: bool) -> None:
        """Begin to watch. All ranks audit, and a rank that speaks prints reports. Gates of training that an error ended are removed."""
        self.remove()
        say = print if speaks else _nothing
        self._gates = [
            Gate(model, one, after=self._after, every=self._every, stop=self._stop, say=say) for one in optimizers
        ]

    def step_ended(self) -> None:
        """Let every gate report."""
        for gate in self._gates:
            gate.step_ended()

    def remove(self) -> None:
        """Watch no further steps."""
        for gate in self._gates:
            gate.remove()
        self._gates = []


def _nothing(_: str) -> None:
    """Say nothing."""


def described(layers: list[LayerAudit]) -> tuple[list[str], bool]:
    """Return what an audited step lost, in lines, and whether anything is found."""
    verdict = judge(layers)
    if not verdict.findings:
        return ["Nothing is lost: the updates reach the weights.", *verdict.notes], False
    most = sorted(worst(layers).values(), key=lambda layer: (layer.edq - 1) * layer.elements)[:LAYERS]
    rows = [f"  {one.name}: {one.lost_share:.0%} lost, {one.edq:.0%} of the movement arrives" for one in most]
    return [verdict.findings[0], *rows, *verdict.findings[1:], *verdict.notes, verdict.advice], True
