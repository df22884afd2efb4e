"""The order in which a device works: its streams.

All calls of torch about them are here, so that tests can replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

Stream = Any  # torch.cuda.Stream, or what a test puts in its place

_HERE: AbstractContextManager[None] = nullcontext()
"""Within it work goes on on the present stream."""


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is queued on streams, of which torch lets us have several, and the host's memory can be pinned for it.

    Copies to and from other accelerators are waited for. There torch does not say that a copy from memory which is not pinned has read it
    when it returns.
    """
    return device.type == "cuda"


def copies_need_no_wait(device: torch.device) -> bool:
    """Whether ``non_blocking=True`` is right for a copy from the host's memory that is not pinned: it has read it when the call returns.

    CUDA stages such copies. A copy to the meta device is empty.
    """
    return has_streams(device) or device.type == "meta"


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues work on a device."""
    return torch.cuda.current_stream(device)


def make(device: torch.device) -> Stream:
    """Another stream of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def working_on(stream: Stream) -> AbstractContextManager[Any]:
    """Queue work of this thread on ``stream`` inside the context."""
    return torch.cuda.stream(stream)


def is_capturing() -> bool:
    """Whether calls on the present CUDA stream are captured in a graph, and not carried out.

    The host may then neither wait for the device, nor count its calls: they are made once, and carried out at every replay. The
    stream may not wait for work that is not captured, either.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def mark(device: torch.device) -> Any:
    """Return an event after the queue of a device's present stream, for another thread to wait for; None on a device without streams."""
    return current(device).record_event() if has_streams(device) else None


def come_after(event: Any, device: torch.device) -> None:
    """Order later work on the present stream of a device after an event of :func:`mark`. The host does not wait."""
    if event is not None:
        current(device).wait_event(event)


def keep(x: Tensor) -> None:
    """Keep a tensor's memory from being reused before the present stream is done with it, wherever the tensor is freed."""
    if has_streams(x.device):
        x.record_stream(current(x.device))


class Home:
    """The stream of each device for the work of hooks, whatever stream is current when they are called.

    Autograd calls a hook on the stream on which its module, or its parameter, was used in the forward pass, and callbacks at the end
    of a backward pass on the caller's. A buffer that several of these hooks use would be used on several streams without an order, and
    freed on another stream than it was allocated on. So all of them work on one: that on which the pass, or the step, began. If it is
    current, which is usual, there is no wait.
    """

    def __init__(self) -> None:
        self._of: dict[torch.device, Stream] = {}

    def begin(self, device: torch.device) -> None:
        """Work on the present stream of a device from here on, after all work queued before."""
        if not has_streams(device):
            return
        now, before = current(device), self._of.get(device)
        if now == before:
            return
        if before is not None and not is_capturing():
            now.wait_stream(before)
        self._of[device] = now

    def begin_everywhere(self) -> None:
        """Work on the present streams from here on, of all devices with queued work."""
        for device in list(self._of):
            self.begin(device)

    def entered(self, device: torch.device, given: Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context with work on the home stream, after the present stream's queue, and before later work on the present stream.

        Args:
            device: Where the work is done.
            given: A tensor that is used inside and may be freed after it.
        """
        if not has_streams(device):
            return _HERE
        now = current(device)
        home = self._of.setdefault(device, now)
        return _HERE if now == home else _elsewhere(now, home, given)


@contextmanager
def _elsewhere(now: Stream, home: Stream, given: Tensor | None) -> Iterator[None]:
    home.wait_stream(now)
    if given is not None:
        given.record_stream(home)
    try:
        with working_on(home):
            yield
    finally:
        now.wait_stream(home)
