"""Optimizer state in the host's memory, brought to the device a bucket at a time while the one before it is stepped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from everybit.entries import fields as named_fields
from everybit.optimizer import OptimizerState
from everybit_torch.units import Unit, map_state

BUCKET = 1 << 24
"""Elements whose state is on the device at a time; there are two such buckets, one stepped and one on its way."""


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's, where there is nothing to move."""
    return device.type in ("cpu", "meta")


def on_host(x: Tensor, numel: int) -> Tensor:
    """Memory for ``numel`` elements like those of ``x``, on the host; pinned where there is a device to copy to and from."""
    return torch.empty(numel, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")


class HostCopies:
    """Copies between the host's memory and a device's, in order on one stream of their own, while the device computes on another.

    Where there is no such device copies are made at once.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._last: Any = None

    def begin(self, device: torch.device) -> None:
        """Order the next copies after the work that is queued on the device."""
        if device.type != "cuda":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def on_stream(self) -> AbstractContextManager[Any]:
        """Copies inside are made on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def end(self, device: torch.device) -> None:
        """Order work that is queued on the device from here on after the copies so far. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(device).wait_stream(self._stream)
            self._last = self._stream.record_event()

    def keep(self, x: Tensor) -> None:
        """Keep a tensor's memory from being reused before the copies so far are made."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for all copies: it may read its memory then."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


def step_streamed(
    unit: Unit, grad: Tensor, step: Callable[[Unit, Tensor], Any], copies: HostCopies, bucket: int | None = None
) -> list[Any]:
    """Step a flat unit whose state is on the host: state in, step, state out, bucket by bucket.

    The state on the host is as it should be only after ``copies.synchronize()``.

    Args:
        unit: Its tensor is on the device, its state's elements are on the host, its counters on the device.
        grad: On the device.
        step: Steps a part, which is on the device, in place.
        copies: The same for every call, so that a call reads what the one before it wrote.
        bucket: Elements at a time; None: :data:`BUCKET`.

    Returns:
        What ``step`` returned, for each bucket.
    """
    size = unit.piece_size(BUCKET if bucket is None else bucket)
    (tensor,) = unit.tensors
    device = tensor.device

    def fetch(start: int) -> OptimizerState[Any]:
        with copies.on_stream():
            here = unit.cut_state(start, min(start + size, tensor.numel()), torch.clone)
            return map_state(here, lambda x: x.to(device, non_blocking=True, copy=True), lambda x: x)

    results = []
    starts = list(range(0, max(tensor.numel(), 1), size))
    copies.begin(device)
    ahead = fetch(0)
    counters: list[Tensor] = []
    for number, start in enumerate(starts):
        state = ahead
        copies.end(device)
        if number + 1 < len(starts):
            ahead = fetch(starts[number + 1])
        here = [tensor[start : start + size]]
        whole = None if unit.whole is None else unit.whole.cut(start, start + len(here[0]))
        part = Unit(unit.group, here, [], state, unit.first + start, flat=True, stored=unit.stored, whole=whole)
        results.append(step(part, grad[start : start + size]))
        copies.begin(device)
        with copies.on_stream():
            into = unit.cut_state(start, min(start + size, tensor.numel()), lambda x: x)
            for old, new in zip(_elements(into), _elements(state), strict=True):
                old.copy_(new, non_blocking=True)
        for x in _elements(state):
            copies.keep(x)
        counters = [value for _, value, is_slot in named_fields(state) if not is_slot]
    # Every bucket counted from the same step; so does the whole, once.
    for counter, value in zip([v for _, v, is_slot in named_fields(unit.state) if not is_slot], counters, strict=True):
        counter.copy_(value)
    copies.end(device)
    return results


def _elements(state: OptimizerState[Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_state(state, note, lambda x: x)
    return found
