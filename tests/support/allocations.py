"""What everybit allocates, counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from everybit_torch.planning.allocations import AllocationCounter

SMALLEST = 64
"""Tensors of fewer bytes are not counted."""


@contextmanager
def counting(*, everything: bool = False) -> Iterator[AllocationCounter]:
    """Count what everybit allocates, told by the stack, or everything; in storages whose memory comes and goes too.

    Not what ranks compare: the communication's thread lets go of it at a moment that nobody knows.
    """

    def ours() -> bool:
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename.endswith(("sharded/fingerprint.py", "checkpoint/agreement.py")):
                return False
            if (
                not everything
                and "everybit_torch" in frame.f_code.co_filename
                and "allocations" not in frame.f_code.co_filename
            ):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return everything

    resize = torch.UntypedStorage.resize_
    with AllocationCounter(ours, smallest=SMALLEST) as counter:

        def counted(self: torch.UntypedStorage, size: int) -> Any:
            result = resize(self, size)
            counter.resized(self)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
        try:
            yield counter
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
