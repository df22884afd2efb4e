"""The state of autograd's present pass, and hooks on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor


def present_pass() -> int:
    """Return the number of the backward pass that runs."""
    return int(torch._C._current_graph_task_id())


def at_the_end_of_the_pass(function: Callable[[], object]) -> None:
    """Have the backward pass that runs call ``function`` at its end, unless it ends in an error."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def weakly(method: Callable[[Any], None]) -> Callable[[Tensor], None]:
    """Return a hook that calls a method as long as its object is held by something else.

    A tensor holds its hooks where Python's collector does not look. A hook that holds the tensor's model is never freed, nor is the model.
    """
    known = WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        found = known()
        if found is not None:
            found(tensor)

    return hook
