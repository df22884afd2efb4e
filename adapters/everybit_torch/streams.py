"""The order in which a device works: its streams.

All that is asked of torch about them is here, so that tests can put something else in its place.
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

    CUDA stages such copies. To the meta device nothing is copied.
    """
    return has_streams(device) or device.type == "meta"


def current(device: torch.device) -> Stream:
    """The stream on which this thread queues work on a device."""
    return torch.cuda.current_stream(device)


def make(device: torch.device) -> Stream:
    """Another stream of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def working_on(stream: Stream) -> AbstractContextManager[Any]:
    """Make ``stream`` the one on which this thread queues work inside the context."""
    return torch.cuda.stream(stream)


def is_capturing() -> bool:
    """Whether what is asked of the present CUDA stream is captured in a graph, and not carried out.

    The host may then neither wait for the device, nor count what it asks for: it is asked for once, and carried out at every replay. The
    stream may not wait for work that is not captured, either.
    """
    if torch.compiler.is_compiling():
        return False
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def mark(device: torch.device) -> Any:
    """An event after what is queued on the present stream of a device, for another thread to wait for; None where nothing is queued."""
    return current(device).record_event() if has_streams(device) else None


def come_after(event: Any, device: torch.device) -> None:
    """Order what is queued on the present stream of a device from here on after an event of :func:`mark`. The host does not wait."""
    if event is not None:
        current(device).wait_event(event)


def keep(x: Tensor) -> None:
    """Keep a tensor's memory from being used again before the present stream is done with it, whoever frees it on whichever stream."""
    if has_streams(x.device):
        x.record_stream(current(x.device))


class Home:
    """For each device the stream on which work is done that hooks ask for, whatever stream is current when they are called.

    Autograd calls a hook on the stream on which its module, or its parameter, was used in the forward pass, and what it calls at the end
    of a backward pass on the caller's. A buffer that several of these hooks use would be used on several streams that nothing orders, and
    freed on another one than it was allocated on. So all of them work on one: that on which the pass, or the step, began. Where it is
    current, which is usual, nothing is waited for.
    """

    def __init__(self) -> None:
        self._of: dict[torch.device, Stream] = {}

    def begin(self, device: torch.device) -> None:
        """Work on the present stream of a device from here on, after all that was asked for before."""
        if not has_streams(device):
            return
        now, before = current(device), self._of.get(device)
        if now == before:
            return
        if before is not None and not is_capturing():
            now.wait_stream(before)
        self._of[device] = now

    def begin_everywhere(self) -> None:
        """Work on the present streams from here on, of all devices on which something was asked for."""
        for device in list(self._of):
            self.begin(device)

    def entered(self, device: torch.device, given: Tensor | None = None) -> AbstractContextManager[None]:
        """Work inside is done on the home stream, after what is queued on the present one, and before what is queued on that next.

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
