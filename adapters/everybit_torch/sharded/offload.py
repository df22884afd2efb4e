"""Optimizer state in the host's memory, brought to the device a bucket at a time while the one before it is stepped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from everybit.optimizer import OptimizerState
from everybit_torch import streams
from everybit_torch.units import Unit, map_state

BUCKET = 1 << 24
"""Elements whose state is on the device at a time; there are two such buckets, one stepped and one on its way."""


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's, where there is nothing to move."""
    return device.type in ("cpu", "meta")


class HostCopies:
    """State on the host, and its copies on a device: made in order on one stream of their own, while the device computes on another.

    Where a device has no streams copies are made at once. The state on the host is as it should be only after :meth:`synchronize`.
    """

    def __init__(self) -> None:
        self._stream: streams.Stream = None

    def allocate(self, like: Tensor, numel: int) -> Tensor:
        """Memory for ``numel`` elements on the host; pinned where there is a device to copy to and from."""
        return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=streams.has_streams(like.device))

    def pieces(self, unit: Unit) -> Iterator[tuple[slice, Unit]]:
        """The pieces of a flat unit, with their state on the device: the next one's is on its way while one is stepped.

        The unit's tensor is on the device, its state's elements are on the host, its counters on the device.
        """
        device, pieces = unit.tensor.device, unit.pieces(BUCKET)
        queued = streams.has_streams(device)

        def fetch() -> tuple[slice, Unit, OptimizerState[Any]] | None:
            with self.on_stream():
                found = next(pieces, None)
                if found is None:
                    return None
                where, piece = found
                home = piece.state
                piece.state = map_state(home, lambda x: x.to(device, non_blocking=queued, copy=True), lambda x: x)
                return where, piece, home

        self.begin(device)
        ahead = fetch()
        while ahead is not None:
            where, piece, home = ahead
            self.end(device)
            ahead = fetch()
            yield where, piece
            self.begin(device)
            with self.on_stream():
                for old, new in zip(_elements(home), _elements(piece.state), strict=True):
                    old.copy_(new, non_blocking=queued)
            for x in _elements(piece.state):
                self.keep(x)
        self.end(device)

    def begin(self, device: torch.device) -> None:
        """Order the next copies after the work that is queued on the device."""
        if not streams.has_streams(device):
            return
        if self._stream is None:
            self._stream = streams.make(device)
        self._stream.wait_stream(streams.current(device))

    def on_stream(self) -> AbstractContextManager[Any]:
        """Copies inside are made on this stream."""
        return nullcontext() if self._stream is None else streams.working_on(self._stream)

    def end(self, device: torch.device) -> None:
        """Order work that is queued on the device from here on after the copies so far. The host does not wait."""
        if self._stream is not None:
            streams.current(device).wait_stream(self._stream)

    def mark(self, device: torch.device) -> Any:
        """An event after the copies so far; None where they are made at once."""
        with self.on_stream():
            return None if self._stream is None else streams.mark(device)

    def keep(self, x: Tensor) -> None:
        """Keep a tensor's memory from being reused before the copies so far are made."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def synchronize(self) -> None:
        """The host waits for all copies: it may read and write its memory then."""
        if self._stream is not None:
            self._stream.synchronize()


def _elements(state: OptimizerState[Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_state(state, note, lambda x: x)
    return found
