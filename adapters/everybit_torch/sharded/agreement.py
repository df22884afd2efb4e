"""Agreement of the ranks on a value or an error: a result of one rank, or of each, becomes a value or an error on every rank."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from everybit_torch.checkpoint_file import with_message

T = TypeVar("T")

_Told = tuple[str, str]
"""The kind of an error, and its message."""


def from_first(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call ``function`` on the first rank, and return its result on all ranks; an exception is raised on all of them."""
    if group is None:
        return function()
    require_group(group)
    outcome: list[Any] = [None]
    error: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            outcome = [(function(), None)]
        except Exception as raised:
            error, outcome = raised, [(None, _told(raised))]
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    value, told = outcome[0]
    if error is not None:
        raise error
    if told is not None:
        raise _again(told, f"on the first rank: {told[0]}: {told[1]}")
    return value  # type: ignore[no-any-return]


def on_all(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call ``function`` on all ranks, and return this rank's result; an exception on one rank is raised on all of them."""
    if group is None:
        return function()
    require_group(group)
    value: T | None = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as raised:
        error = raised
    found: list[_Told | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, None if error is None else _told(error), group=group)
    if error is not None:
        raise error
    for rank, told in enumerate(found):
        if told is not None:
            raise _again(told, f"on rank {rank}: {told[1]}")
    return value  # type: ignore[return-value]


def require_same_call(call: str, ready: str, problem: str | None, group: dist.ProcessGroup | None) -> None:
    """Compare what ranks are about to do together. Every rank has to call it.

    Args:
        call: What this rank does, with its arguments.
        ready: What has to be the same for it.
        problem: Why this rank cannot do it; None if it can.
        group: The ranks; None for one process.

    Raises:
        RuntimeError: Some rank cannot, or ranks do different things; the same on every rank.
    """
    found: list[Any] = [(call, ready, problem)]
    if group is not None:
        require_group(group)
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (call, ready, problem), group=group)
    for rank, (other, state, reason) in enumerate(found):
        if reason is not None:
            raise RuntimeError(reason if problem is not None else f"on rank {rank}: {reason}")
        if other != found[0][0]:
            raise RuntimeError(
                f"rank 0 calls {found[0][0]}, and rank {rank} calls {other}; accepted is the same call on every rank."
            )
        if state != found[0][1]:
            raise RuntimeError(
                f"{call}: rank 0 has {found[0][1] or 'no unit'} gathered, and rank {rank} {state or 'none'}; accepted is a call at the same"
                " place of the program on every rank."
            )


def require_group(group: dist.ProcessGroup | None) -> None:
    """Refuse to go on without the other ranks.

    Raises:
        RuntimeError: The process group was destroyed.
    """
    if group is not None and not dist.is_initialized():
        raise RuntimeError(
            "save_sharded: the process group was destroyed while a checkpoint was written, which is not whole; wait for the save (result())"
            " before destroy_process_group()."
        )


def same_kind(error: BaseException, message: str) -> Exception:
    """An error that says ``message``, of the same kind if that is a plain one."""
    if isinstance(error, OSError):
        return with_message(error, message)
    return _again(_told(error), message)


def _told(error: BaseException) -> _Told:
    return type(error).__name__, str(error)


def _again(told: _Told, message: str) -> Exception:
    kind = getattr(builtins, told[0], None)
    if isinstance(kind, type) and issubclass(kind, (ValueError, TypeError, OSError)) and kind is not UnicodeDecodeError:
        return kind(message)
    return RuntimeError(message)
