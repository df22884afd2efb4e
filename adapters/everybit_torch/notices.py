"""Warnings that point at the line of the user's program."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

_PACKAGES = ("everybit", "everybit_torch", "torch")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither this library's nor torch's."""
    level, frame = 2, sys._getframe(1)  # stack level 2 is the caller
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def warn_of_no_gradient(optimizer: str) -> None:
    """Warn that an optimizer's parameters have no gradients any more."""
    warn(
        f"{optimizer}.step(): no parameter has a gradient any more, and nothing was stepped. Parameters that a model was given since"
        " (load_state_dict(assign=True), or assigning a new Parameter) are not the optimizer's."
    )


def warn_of_lacking_remainders(names: Sequence[str]) -> None:
    """Warn that a state dict has no remainders of weights which had some."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    warn(
        f"load_state_dict: the state dict lacks the remainder of the weights of {shown}: these weights are now those of the model's own"
        " dtype. torch.distributed.checkpoint leaves out the state of parameters that are frozen when it loads; let them require"
        " gradients until it has loaded, or use save_sharded and load_sharded."
    )
