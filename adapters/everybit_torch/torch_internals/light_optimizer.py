"""``torch.optim.Optimizer`` without the import of torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_MARKS = "torch._compile"


class LightOptimizer(torch.optim.Optimizer):
    """``torch.optim.Optimizer``, which does not import Dynamo and Inductor for a model that is never compiled.

    torch marks some methods as not to be traced, and imports its compiler at the first call of one, which takes as long as
    ``import torch`` did. Until Dynamo is imported there is no trace and the mark has no meaning, so the method is called
    without it. Where the mark is put on in another way than expected, or something else is wrapped around the method, it is called as it
    is.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; see ``torch.optim.Optimizer``."""
        unmarked(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; see ``torch.optim.Optimizer``."""
        unmarked(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict; see ``torch.optim.Optimizer``."""
        return unmarked(torch.optim.Optimizer.state_dict)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; see ``torch.optim.Optimizer``."""
        unmarked(torch.optim.Optimizer.load_state_dict)(self, state_dict)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that an optimizer has stepped, though its ``step`` was not called: torch's schedulers check it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def hooks_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """List the methods by which hooks were registered on this optimizer that are still there, such as ``register_step_post_hook``."""
    kinds = (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
    return [f"register_{kind}_hook" for kind in kinds if getattr(optimizer, f"_optimizer_{kind}_hooks", None)]


def unmarked(method: F) -> F:
    """Return ``method`` without the mark that keeps Dynamo from tracing it, or itself if Dynamo is imported or there is no mark."""
    marked = getattr(method, "__globals__", {}).get("__name__") == _MARKS
    plain: F = getattr(method, "__wrapped__", method)
    return plain if marked and "torch._dynamo" not in sys.modules else method


def leave_scaling_to_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Have a ``GradScaler`` leave everything to ``optimizer.step()``, rather than look for gradients itself; returns what ends that."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def undo() -> None:
        del optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]

    return undo
