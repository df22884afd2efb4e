"""Agreement of the ranks on a value or an error: a result of one rank, or of each, becomes a value or an error on every rank."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from everybit_torch.checkpoint.atomic_files import with_message
from everybit_torch.collectives import Communicator

T = TypeVar("T")

_Told = tuple[str, str]
"""The kind of an error, and its message."""


def gathered(value: Any, ranks: Communicator) -> list[Any]:
    """Gather every rank's ``value``, which JSON can hold, in the order of the ranks. Collective.

    Raises:
        RuntimeError: A rank is gone, or the process group was destroyed.
    """
    if ranks.group is None:
        return [json.loads(json.dumps(value))]
    if not dist.is_initialized():
        raise RuntimeError(
            "the process group was destroyed; wait for a save that is under way (result()) before destroy_process_group()."
        )
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(ranks.device)
    lengths = torch.empty(ranks.size, dtype=torch.int64, device=ranks.device)
    ranks.all_gather(lengths, lengths.new_tensor([payload.numel()]), "what ranks agree on").wait()
    sizes = lengths.tolist()
    mine = payload.new_zeros(max(sizes))
    mine[: payload.numel()] = payload
    everyone = mine.new_empty(ranks.size * mine.numel())
    ranks.all_gather(everyone, mine, "what ranks agree on").wait()
    rows = zip(everyone.view(ranks.size, -1).tolist(), sizes, strict=True)
    return [json.loads(bytes(row[:size])) for row, size in rows]


def from_first(function: Callable[[], T], ranks: Communicator) -> T:
    """Call ``function`` on the first rank, and return its result on all ranks; an exception is raised on all of them."""
    value, error = _outcome(function) if ranks.rank == 0 else (None, None)
    found, told = gathered((value, None if error is None else _told(error)), ranks)[0]
    if error is not None:
        raise error
    if told is not None:
        raise _again(told, f"on the first rank: {told[0]}: {told[1]}")
    return cast(T, found)


def on_all(function: Callable[[], T], ranks: Communicator) -> T:
    """Call ``function`` on all ranks, and return this rank's result; an exception on one rank is raised on all of them."""
    value, error = _outcome(function)
    found = gathered(None if error is None else _told(error), ranks)
    if error is not None:
        raise error
    for rank, told in enumerate(found):
        if told is not None:
            raise _again(told, f"on rank {rank}: {told[1]}")
    return cast(T, value)


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """A function's result, or its exception."""
    try:
        return function(), None
    except Exception as raised:
        return None, raised


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
