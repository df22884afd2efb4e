"""Checks before a step, which refuse states from which a stepper cannot continue."""

from __future__ import annotations

from everybit_torch.streams import is_capturing

MAKES_WHOLE = "load_sharded(stepper, path), on every rank, which makes the state whole"


class Completeness:
    """Whether weights and state belong together."""

    def __init__(self) -> None:
        self._incomplete: str | None = None
        self._accepted = ""
        self.is_closed = False

    def mark_incomplete(self, reason: str, accepted: str = MAKES_WHOLE) -> None:
        """Mark the weights as incomplete: from here on only ``accepted`` goes on.

        Args:
            reason: What happened, as the beginning of a message.
            accepted: What makes them belong together again, as its end.
        """
        self._incomplete, self._accepted = reason, accepted

    def mark_complete(self) -> None:
        """They do from here on."""
        self._incomplete = None

    def require_open(self, name: str) -> None:
        """Refuse what needs the stepper's hooks and buffers.

        Raises:
            RuntimeError: The stepper is closed.
        """
        if self.is_closed:
            raise RuntimeError(
                f"{name}: make a new FlatStepper of the model. This one was closed, and has no hooks: gradients would not reach it."
            )

    def require(self, name: str) -> None:
        """Refuse what uses both.

        Args:
            name: The refused method.

        Raises:
            RuntimeError: They do not belong together, the stepper is closed, or a CUDA graph is being captured.
        """
        self.require_open(name)
        if is_capturing():
            raise RuntimeError(
                f"{name}: a CUDA graph is being captured, which a stepper's cycle cannot be part of, since its ranks agree on each anew;"
                " accepted is to call it outside of the capture."
            )
        if self._incomplete is not None:
            raise RuntimeError(f"{name}: {self._incomplete}; accepted is {self._accepted}.")
