"""What stands in for a CUDA graph on a CPU: operators, carried out again on the same memory without the host's code around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.readbacks import numbers_on_a_device


class FakeGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of what is captured, with their arguments: numbers that the host computed are what they were then.

    What is captured is carried out as well, unlike on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, outputs))
        return outputs

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Remember what is asked for in here; the library is told that a graph is being captured."""
        with (
            mock.patch.object(torch.cuda, "is_initialized", return_value=True),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
            numbers_on_a_device(),
            self,
        ):
            yield

    def replay(self) -> None:
        """Carry all of it out again."""
        for function, args, kwargs, outputs in self._calls:
            again = function(*args, **kwargs)
            for held, made in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(held, Tensor) and held.numel() and held.data_ptr() != made.data_ptr():
                    held.copy_(made)
