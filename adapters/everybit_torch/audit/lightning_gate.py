"""A gate for Lightning: ``lightning.Trainer(..., callbacks=[PrecisionGate()])``, for any optimizers of a module."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from everybit_torch.audit.gate import Gates


class PrecisionGate(Gates, Callback):
    """Say after some steps how many updates are lost, in which layers, and what would mend it; see :class:`everybit_torch.Gate`.

    Its arguments are those of :class:`~everybit_torch.audit.gate.Gates`.
    """

    _steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self.begin(pl_module, trainer.optimizers, speaks=trainer.is_global_zero)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report, if the batch ended with a step."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self.step_ended()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Watch no further steps."""
        self.remove()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Watch no further steps."""
        self.remove()
