"""This rank's shards in the host's memory: which of them lie there, and the copies that bring them to the device and back.

State, weights and gradients are brought a bucket at a time for a step, while the one before it is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everybit.stepping import OptimizerState
from everybit_torch import streams
from everybit_torch.collectives.communicator import Pending
from everybit_torch.gradients import Gathered
from everybit_torch.units import Unit, map_state

BUCKET = 1 << 24
"""Elements whose state is on the device at a time; there are two such buckets, one stepped and one on its way."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Which of a rank's shards are kept in the host's memory (pinned, where the device has streams).

    Attributes:
        state: The optimizer's state, residuals and main weights.
        weights: With ``optim_grads_params``: this rank's part of the weights, which is copied to the device when its unit is gathered.
        gradients: With ``optim_grads_params``: this rank's part of the main gradients; together with ``weights`` and ``state``.
    """

    state: bool = True
    weights: bool = False
    gradients: bool = False

    @classmethod
    def of(cls, given: bool | Offload) -> Offload:
        """Return the offload that a stepper's argument stands for; True is the state alone.

        Raises:
            TypeError: It is neither a bool nor an ``Offload`` of bools.
        """
        found = cls(given) if isinstance(given, bool) else given
        if not isinstance(found, cls) or not all(
            isinstance(x, bool) for x in (found.state, found.weights, found.gradients)
        ):
            raise TypeError(f"offload: got {given!r}; accepted are True, False, and Offload(...) of True and False.")
        return found

    @property
    def anything(self) -> bool:
        """Whether anything lies on the host."""
        return self.state or self.weights or self.gradients


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's, where there is nothing to move."""
    return device.type in ("cpu", "meta")


class HostCopies:
    """Tensors on the host and their copies on a device, which are made in order on a stream of their own, beside the computation.

    Where a device has no streams copies are made at once. What is on the host is as it should be only after :meth:`synchronize`.

    Args:
        device: Where copies are; None: where what is stepped is.
        offload: What lies on the host.
    """

    def __init__(self, device: torch.device | None = None, offload: Offload | None = None) -> None:
        self._device, self.offload = device, offload or Offload()
        self._stream: streams.Stream = None
        self._rooms: dict[torch.dtype, int] = {}
        self._made: dict[torch.dtype, Tensor] = {}

    def allocate(self, like: Tensor, numel: int) -> Tensor:
        """Memory for ``numel`` elements on the host; pinned where there is a device to copy to and from."""
        return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=streams.has_streams(like.device))

    def fetch(self, x: Tensor) -> Tensor:
        """A copy of state on the device, made at once; outside of a step."""
        return x.to(x.device if self._device is None else self._device, copy=True)

    def stepping(self, unit: Unit, grad: Gathered) -> tuple[Gathered | Fetched, Iterator[tuple[slice, Unit]]]:
        """Yield pieces as :meth:`pieces` does, with the part of the unit's gradient, which is on the device when the piece is."""
        if not self.offload.gradients:
            return grad, self.pieces(unit)
        fetched = Fetched()
        return fetched, self.pieces(unit, grad, fetched)

    def pieces(
        self, unit: Unit, grad: Gathered | None = None, fetched: Fetched | None = None
    ) -> Iterator[tuple[slice, Unit]]:
        """The pieces of a flat unit, with their state on the device: the next one's is on its way while one is stepped.

        The unit's tensor is on the device unless weights are offloaded, its state's elements are on the host, its counters on the device.

        Args:
            unit: The unit.
            grad: Its gradient, on the host.
            fetched: Is given the gradient's part for each piece.
        """
        device = unit.tensor.device if self._device is None else self._device
        pieces, queued = unit.pieces(BUCKET), streams.has_streams(device)

        def up(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=queued, copy=True)

        def fetch() -> tuple[slice, Unit, Tensor, OptimizerState[Any]] | None:
            with self.on_stream():
                found = next(pieces, None)
                if found is None:
                    return None
                where, piece = found
                tensor, home = piece.tensor, piece.state
                piece.state = map_state(home, up, lambda x: x.to(device))
                if self.offload.weights:
                    # Filled, and not copied: for a copy of memory that is not pinned the host waits.
                    piece.first_tensor = piece.first_on(device)
                    piece.tensor = up(tensor)
                if fetched is not None and grad is not None:
                    fetched.parts[where.start] = up(grad[where])
                return where, piece, tensor, home

        self.begin(device)
        ahead = fetch()
        while ahead is not None:
            where, piece, tensor, home = ahead
            self.end(device)
            ahead = fetch()
            yield where, piece
            self.begin(device)
            self._bring_back(piece, tensor, home)
        self.end(device)

    def _bring_back(self, piece: Unit, tensor: Tensor, state: OptimizerState[Any]) -> None:
        """Copy a piece to where it lies on the host. Who still has it keeps its counts, and no memory of the device."""
        pairs = list(zip(_elements(state), _elements(piece.state), strict=True))
        if self.offload.weights:
            pairs.append((tensor, piece.tensor))
        with self.on_stream():
            for old, new in pairs:
                old.copy_(new, non_blocking=self._stream is not None)
                self.keep(new)
        piece.tensor, piece.state = tensor, _with_counts(state, piece.state)

    # -- one tensor at a time ---------------------------------------------------------------------------------------------------------

    def allocate_on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host, for so many elements."""
        return self.allocate(torch.empty(0, dtype=dtype, device=self._device), numel).zero_()

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """There is to be room on the device for so many elements of a dtype, which those that need some have one after the other."""
        self._rooms[dtype] = max(numel, self._rooms.get(dtype, 0))

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """That room: it is used by who had it last until :meth:`begin_in_room`."""
        if dtype not in self._made:
            self._made[dtype] = torch.empty(self._rooms[dtype], dtype=dtype, device=self._device)
        return self._made[dtype][:numel]

    def begin_in_room(self) -> None:
        """Let the operations that are queued next on the current stream write to the room."""
        assert self._device is not None
        self.end(self._device)

    def bring(self, into: Tensor, values: Tensor) -> None:
        """Copy to the device. What is queued next on the present stream comes after that."""
        self._copy(into, values)
        assert self._device is not None
        self.end(self._device)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Copy to the host, in what was queued on the present stream. Nobody waits."""
        self._copy(into, values)

    def brought(self, values: Tensor) -> Tensor:
        """A copy on the device, for what is queued next on the present stream."""
        into = torch.empty(values.numel(), dtype=values.dtype, device=self._device)
        self.bring(into, values)
        self.keep(into)
        return into

    def bring_for(self, into: Tensor, values: Tensor, then: Callable[[], Pending]) -> Pending:
        """Copy to the device, and begin a collective with it, which comes after the copy; the present stream waits for neither."""
        self._copy(into, values)
        assert self._device is not None
        with self.on_stream():
            return _AfterCopy(then(), self.mark(self._device), self._device)

    def _copy(self, into: Tensor, values: Tensor) -> None:
        assert self._device is not None
        self.begin(self._device)
        with self.on_stream():
            into.copy_(values, non_blocking=streams.has_streams(self._device))

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


class Fetched:
    """A gradient whose parts are on the device, each until it is taken.

    Attributes:
        parts: By their first element.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Tensor] = {}

    def __getitem__(self, where: slice) -> Tensor:
        """Take a part."""
        return self.parts.pop(where.start)


class FromHost:
    """A vector on the host, whose parts are brought to the device as they are read."""

    def __init__(self, values: Tensor, copies: HostCopies, device: torch.device) -> None:
        self._values, self._copies = values, copies
        self.dtype, self.device = values.dtype, device

    def numel(self) -> int:
        """Number of elements."""
        return self._values.numel()

    def __getitem__(self, where: slice) -> Tensor:
        """Bring a part."""
        return self._copies.brought(self._values[where])


class _AfterCopy:
    """A collective that began after a copy; who waits for it waits for both."""

    def __init__(self, pending: Pending, copied: Any, device: torch.device) -> None:
        self._pending, self._copied, self._device = pending, copied, device

    def wait(self) -> None:
        self._pending.wait()
        streams.come_after(self._copied, self._device)

    def is_done(self) -> bool:
        return self._pending.is_done()


def _with_counts(state: OptimizerState[Any], counted: OptimizerState[Any]) -> OptimizerState[Any]:
    """A state with the counts of another."""
    counts: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        counts.append(x)
        return x

    map_state(counted, lambda x: x, note)
    known = iter(counts)
    return map_state(state, lambda x: x, lambda _: next(known))


def _elements(state: OptimizerState[Any]) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_state(state, note, lambda x: x)
    return found
