"""The state of autograd's present pass."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction


def in_a_backward_pass() -> bool:
    """Whether autograd is running; True where torch does not say."""
    task: Any = getattr(torch._C, "_current_graph_task_id", None)
    return task is None or task() != -1


def present_pass() -> int:
    """Return the number of the backward pass that runs."""
    return int(torch._C._current_graph_task_id())


def at_the_end_of_the_pass(function: Callable[[], object]) -> None:
    """Have the backward pass that runs call ``function`` at its end, unless it ends in an error."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def will_execute(node: Any) -> bool:
    """Whether the backward pass that runs will come to a node of its graph.

    Raises:
        RuntimeError: The node is what ``torch.autograd.grad`` was asked for, of which torch does not say it.
    """
    return bool(torch._C._will_engine_execute_node(node))


def recorded_nodes() -> int:
    """Return the number of nodes that this thread has recorded, which stays the same where nothing is recorded."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def reentrant_checkpoint() -> int | None:
    """Return what names the outermost reentrant checkpoint whose forward pass is going on, while its graph lives; None if there is none.

    Nothing is recorded inside it, so that autograd has no sign of it but the call on the stack.
    """
    code, found = CheckpointFunction.forward.__code__, None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            found = id(frame.f_locals[code.co_varnames[0]])
        frame = frame.f_back
    return found


def saved_tensors_hooks() -> tuple[Any, ...]:
    """The innermost hooks on saved tensors, such as those of a checkpoint; empty if there are none, or torch does not say."""
    bindings: Any = torch._C
    top: Any = getattr(bindings._autograd, "_top_saved_tensors_default_hooks", None)
    return tuple(top(True) or ()) if top is not None else ()
