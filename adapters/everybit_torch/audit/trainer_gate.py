"""A gate for Hugging Face's Trainer: ``Trainer(..., callbacks=[PrecisionGate()])``, for any optimizer that Trainer steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from everybit_torch.audit.gate import Gates


class PrecisionGate(Gates, TrainerCallback):
    """Say after some steps how many updates are lost, in which layers, and what would mend it; see :class:`everybit_torch.Gate`.

    Its arguments are those of :class:`~everybit_torch.audit.gate.Gates`.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Begin to watch."""
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])  # accelerate wraps it
        self.begin(given["model"], [optimizer], speaks=state.is_world_process_zero)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Report, before gradients are set to zero."""
        self.step_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Watch no further steps."""
        self.remove()
