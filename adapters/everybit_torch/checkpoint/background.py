"""Saves in the background: the host's memory into which a checkpoint is copied, and the result. Its error is raised once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everybit_torch import streams
from everybit_torch.ambient import in_plain_mode
from everybit_torch.checkpoint.shard_tensor import ShardTensor


class PendingSave(Future[Path]):
    """The future of an asynchronous save: its result is the directory, its exception the error of the save."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # a collective is not cancelled
        self._asked = False

    def result(self, timeout: float | None = None) -> Path:
        """The directory, when every rank has written.

        Raises:
            BaseException: What went wrong; the next save does not raise it then.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, or None; once it was returned, the next save does not raise it."""
        error = super().exception(timeout)
        self._asked = True
        return error

    def carry_out(self, write: Callable[[], Path]) -> None:
        """Set the result or the exception of a function."""
        try:
            path = write()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(path)

    def unseen(self) -> BaseException | None:
        """Wait for the save, and return its error unless the error was read before."""
        asked = self._asked
        error = self.exception()
        return None if asked else error


class StagingMemory:
    """The memory of a stepper's asynchronous saves: a tensor on the host for each tensor that is saved.

    It is allocated by the first of them and used again by the next. Where the model's device has streams it is pinned, and filled by
    copies on a stream of their own, so that the device allocates no memory.

    Args:
        device: The model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: streams.Stream = None
        self._memory: dict[str, Tensor] = {}
        self._copied: Any = None

    @property
    def nbytes(self) -> int:
        """How many bytes of the host's memory are kept for the next asynchronous save."""
        return sum(memory.nbytes for memory in self._memory.values())

    def free(self) -> None:
        """Give the memory back; the next asynchronous save allocates it again. A save under way keeps its tensors."""
        self._memory = {}

    @in_plain_mode
    def copy(
        self, parts: Mapping[str, Tensor], is_shown: Callable[[str, Tensor], bool]
    ) -> tuple[dict[str, Tensor], Any]:
        """Start to copy tensors to the staging memory, which no other code reads.

        Args:
            parts: By name. The same memory under several names is copied once.
            is_shown: Whether users may write to a tensor at any time: work queued on the present stream next comes after its
                copy. What only the stepper writes to is written after :meth:`order`.

        Returns:
            The copies by name, and an event after them, for which the host has to wait before it reads them; None where it need not.
        """
        memory: dict[str, Tensor] = {}
        copies: dict[tuple[int, int, torch.dtype], Tensor] = {}
        found: dict[str, Tensor] = {}
        self._begin()
        for shown in (True, False):
            for name, part in parts.items():
                if is_shown(name, part) is shown:
                    source = part.local if isinstance(part, ShardTensor) else part
                    key = (source.data_ptr(), source.numel(), source.dtype)
                    if key not in copies or not source.numel():
                        copies[key] = memory[name] = self._room_for(name, source)
                        self._start(copies[key], source)
                    copy = copies[key].view(source.shape)
                    found[name] = part.holding(copy) if isinstance(part, ShardTensor) else copy
            if shown and self._stream is not None:
                streams.current(self._device).wait_stream(self._stream)
        self._memory = memory
        with self._on_stream():
            self._copied = None if self._stream is None else streams.mark(self._device)
        return {name: found[name] for name in parts}, self._copied

    def order(self) -> None:
        """Order work that is queued on the present stream from here on after the copies. The host does not wait."""
        streams.come_after(self._copied, self._device)

    def _room_for(self, name: str, source: Tensor) -> Tensor:
        known = self._memory.get(name)
        if known is not None and known.dtype is source.dtype and known.numel() == source.numel():
            return known
        pinned = streams.has_streams(source.device)
        return torch.empty(source.numel(), dtype=source.dtype, device="cpu", pin_memory=pinned)

    def _start(self, into: Tensor, source: Tensor) -> None:
        with self._on_stream():
            into.view(source.shape).copy_(source, non_blocking=streams.has_streams(source.device))
        if self._stream is not None and streams.has_streams(source.device):
            source.record_stream(self._stream)

    def _begin(self) -> None:
        """Order the next copies after the work that is queued on the device."""
        if streams.has_streams(self._device):
            if self._stream is None:
                self._stream = streams.make(self._device)
            self._stream.wait_stream(streams.current(self._device))

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else streams.working_on(self._stream)
