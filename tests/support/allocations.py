"""What everybit allocates, counted."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.torch_internals import tensors


@contextmanager
def counting(*, everything: bool = False) -> Iterator[AllocationCounter]:
    """Count what everybit allocates, told by the stack, or everything; in storages whose memory comes and goes too.

    Not what ranks compare: the communication's thread lets go of it at a moment that nobody knows.
    """

    def ours() -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith(("sharded/fingerprint.py", "sharded/agreement.py")):
                return False
            if (
                not everything
                and "everybit_torch" in frame.f_code.co_filename
                and "allocations" not in frame.f_code.co_filename
            ):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return everything

    resize, exchange = torch.UntypedStorage.resize_, tensors.exchange_memory
    with AllocationCounter(ours, smallest=SMALLEST) as counter:

        def counted(self: torch.UntypedStorage, size: int) -> Any:
            result = resize(self, size)
            counter.resized(self)
            return result

        def exchanged(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
            exchange(one, other)
            counter.exchanged(one, other)

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        tensors.exchange_memory = exchanged
        try:
            yield counter
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            tensors.exchange_memory = exchange


def settled(counter: AllocationCounter) -> int:
    """The bytes that are allocated, once nothing changes: the communication's threads let go of what they sent a moment later."""
    found, alike = counter.live, 0
    for _ in range(200):
        if alike == 4:
            break
        time.sleep(0.01)
        found, alike = counter.live, alike + 1 if counter.live == found else 0
    return found
