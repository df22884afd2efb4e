"""The state of autograd's present pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def present_pass() -> int:
    """Return the number of the backward pass that runs."""
    return int(torch._C._current_graph_task_id())


def at_the_end_of_the_pass(function: Callable[[], object]) -> None:
    """Have the backward pass that runs call ``function`` at its end, unless it ends in an error."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)
