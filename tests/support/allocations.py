"""What everybit allocates, counted."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everybit_torch.planning.allocations import AllocationCounter

SMALLEST = 64
"""Storages of fewer bytes are not counted."""


class Ours(AllocationCounter):  # type: ignore[no-untyped-call]
    """Counts what everybit allocates, told by the stack, or everything; also in storages that are given memory later.

    Not what ranks compare: the communication's thread lets go of it at a moment that nobody knows.
    """

    def __init__(self, *, everything: bool = False) -> None:
        super().__init__()
        self._everything = everything
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def allocated(self, storage: torch.UntypedStorage) -> None:
        empty = not storage.nbytes()
        if (empty or storage.nbytes() >= SMALLEST) and self._is_ours():
            size = self._sizes[storage] = [0]
            weakref.finalize(storage, self._resize, size, 0)
            self._resize(size, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Operations are seen, and resizing is not."""
        if storage in self._sizes:
            self._resize(self._sizes[storage], storage.nbytes() if storage.nbytes() >= SMALLEST else 0)

    def _resize(self, size: list[int], nbytes: int) -> None:
        self.change(nbytes - size[0])
        size[0] = nbytes

    def _is_ours(self) -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.endswith(("sharded/fingerprint.py", "checkpoint/agreement.py")):
                return False
            if not self._everything and "everybit_torch" in name and "allocations" not in name:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return self._everything


@contextmanager
def counting(*, everything: bool = False) -> Iterator[AllocationCounter]:
    """Count what everybit allocates, or everything."""
    resize = torch.UntypedStorage.resize_
    with Ours(everything=everything) as counter:

        def counted(self: torch.UntypedStorage, size: int) -> Any:
            result = resize(self, size)
            counter.resized(self)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        try:
            yield counter
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
