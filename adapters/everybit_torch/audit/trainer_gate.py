"""A gate for Hugging Face's Trainer: ``Trainer(..., callbacks=[PrecisionGate()])``, for any optimizer that Trainer steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from everybit_torch.audit.gate import Gate


class PrecisionGate(TrainerCallback):
    """Say after some steps how many updates are lost, in which layers, and what would mend it; see :class:`everybit_torch.Gate`.

    Args:
        after: The step that is audited, counted from 1 since training began.
        every: Audit every so many steps after that, too; None: none.
        stop: Raise an error where something is found.
    """

    def __init__(self, *, after: int = 50, every: int | None = None, stop: bool = False) -> None:
        self._settings: dict[str, Any] = {"after": after, "every": every, "stop": stop}
        self._gate: Gate | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Begin to watch. All ranks audit, the first one reports."""
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])  # accelerate wraps it
        say = print if state.is_world_process_zero else _nothing
        self._gate = Gate(given["model"], optimizer, say=say, **self._settings)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Report, before gradients are set to zero."""
        if self._gate is not None:
            self._gate.step_ended()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
        """Watch no further steps."""
        if self._gate is not None:
            self._gate.remove()


def _nothing(_: str) -> None:
    """Say nothing."""
