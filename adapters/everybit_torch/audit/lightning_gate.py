"""A gate for Lightning: ``lightning.Trainer(..., callbacks=[PrecisionGate()])``, for any optimizers of a module."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from everybit_torch.audit.gate import Gate


class PrecisionGate(Callback):
    """Say after some steps how many updates are lost, in which layers, and what would mend it; see :class:`everybit_torch.Gate`.

    Args:
        after: The step that is audited, counted from 1 since training began.
        every: Audit every so many steps after that, too; None: none.
        stop: Raise an error where something is found.
    """

    def __init__(self, *, after: int = 50, every: int | None = None, stop: bool = False) -> None:
        self._settings: dict[str, Any] = {"after": after, "every": every, "stop": stop}
        self._gates: list[Gate] = []
        self._steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch. All ranks audit, the first one reports."""
        say = print if trainer.is_global_zero else _nothing
        self._gates = [Gate(pl_module, one, say=say, **self._settings) for one in trainer.optimizers]
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report, if the batch ended with a step."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            for gate in self._gates:
                gate.step_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Watch no further steps."""
        for gate in self._gates:
            gate.remove()


def _nothing(_: str) -> None:
    """Say nothing."""
