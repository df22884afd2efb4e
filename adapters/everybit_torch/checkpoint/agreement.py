"""Agreement of the ranks on a value or an error: a result of one rank, or of each, becomes a value or an error on every rank."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from everybit_torch.checkpoint.single_file import with_message
from everybit_torch.collectives import Communicator

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
    with Communicator(group).explained("broadcast of what the first rank found"):
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
    return _on_all(function, lambda told: objects_of(told, group))


def _on_all(function: Callable[[], T], gather: Callable[[_Told | None], Sequence[_Told | None]]) -> T:
    """Call ``function``, and raise its exception, or else that of the first rank that has one, of which ``gather`` tells all ranks."""
    value: T | None = None
    error: Exception | None = None
    try:
        value = function()
    except Exception as raised:
        error = raised
    found = gather(None if error is None else _told(error))
    if error is not None:
        raise error
    for rank, told in enumerate(found):
        if told is not None:
            raise _again(told, f"on rank {rank}: {told[1]}")
    return value  # type: ignore[return-value]


def objects_of(own: T, group: dist.ProcessGroup) -> list[T]:
    """Gather the objects of all ranks of a group, in the order of the ranks. Collective.

    Raises:
        RuntimeError: A rank is gone.
    """
    found = [own] * dist.get_world_size(group)
    with Communicator(group).explained("all_gather of what ranks agree on"):
        dist.all_gather_object(found, own, group=group)
    return found


class Everyone:
    """All ranks of a stepper. They exchange JSON over the groups of the gradients, so that no further group is made.

    Args:
        communicators: The ranks along each dimension, the innermost dimension first.
    """

    def __init__(self, *communicators: Communicator) -> None:
        self._communicators = communicators

    @property
    def rank(self) -> int:
        """The number of this rank."""
        number, size = 0, 1
        for one in self._communicators:
            number, size = number + one.rank * size, size * one.size
        return number

    @property
    def device(self) -> torch.device:
        """The device of tensors that are sent to all of them."""
        return next((one.device for one in self._communicators if one.group is not None), torch.device("cpu"))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in the order of the ranks; what JSON can hold."""
        innermost, *others = self._communicators
        texts = self._gather(innermost, json.dumps(value))
        for communicator in others:
            rows = self._gather(communicator, json.dumps(texts))
            texts = [text for row in rows for text in json.loads(row)]
        return [json.loads(text) for text in texts]

    def broadcast(self, x: torch.Tensor, what: str) -> None:
        """``x`` becomes the first rank's."""
        for communicator in reversed(self._communicators):
            communicator.broadcast(x, what)

    @staticmethod
    def _gather(communicator: Communicator, text: str) -> list[str]:
        if communicator.size == 1:
            return [text]
        payload = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(communicator.device)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device=communicator.device)
        lengths = length.new_empty(communicator.size)
        communicator.all_gather(lengths, length, "what ranks agree on").wait()
        sizes = lengths.tolist()
        mine = payload.new_zeros(max(sizes))
        mine[: payload.numel()] = payload
        everyone = mine.new_empty(communicator.size * mine.numel())
        communicator.all_gather(everyone, mine, "what ranks agree on").wait()
        rows = zip(everyone.view(communicator.size, -1).tolist(), sizes, strict=True)
        return [bytes(row[:size]).decode() for row, size in rows]

    def on_all(self, function: Callable[[], T]) -> T:
        """Call ``function`` on all ranks, and return this rank's result; an exception on one rank is raised on all of them."""
        return _on_all(function, self.gather)


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
