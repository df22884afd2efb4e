"""Streams without a device: every operation is on one, and two that touch the same memory must be in an order that events say.

It keeps a vector clock for each stream and for the host, as race detectors do (Lamport 1978). Operations are carried out at once, so that
results say nothing; what is found are pairs that a device could have carried out in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


@dataclass
class Access:
    """What touched some bytes of a storage."""

    start: int
    stop: int
    stream: str
    time: int
    writes: bool
    what: str


@dataclass
class Memory:
    """A storage, the accesses to it, and whether it is the host's."""

    on_host: bool
    accesses: list[Access] = field(default_factory=list)


@dataclass
class FakeStream:
    """A stream of the recorder."""

    name: str
    of: Streams

    def synchronize(self) -> None:
        """Let the host come after all that is queued."""
        self.of.join("host", self.of.clocks[self.name])


class Streams(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in the place of the module ``streams``, and finds what is in no order while it is entered.

    Attributes:
        races: Pairs of operations on the same memory without an order.
        operations: The number of operations on each stream.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clocks: dict[str, Clock] = {"host": {}, "compute": {}}
        self.now = "compute"
        self.races: list[str] = []
        self.operations: Clock = {}
        self._memory: dict[int, Memory] = {}

    # -- what `streams` has -----------------------------------------------------------------------------------------------------

    def has_streams(self, device: torch.device) -> bool:  # all of them
        """Every device has streams."""
        return True

    def make(self, device: torch.device) -> FakeStream:  # there is one device
        """Another stream."""
        name = f"stream {len(self.clocks) - 1}"
        self.clocks[name] = {}
        return FakeStream(name, self)

    @contextmanager
    def working_on(self, stream: FakeStream) -> Iterator[None]:
        """Queue work on a stream."""
        before, self.now = self.now, stream.name
        try:
            yield
        finally:
            self.now = before

    def mark(self, device: torch.device) -> Clock:  # there is one device
        """An event."""
        return self.clocks[self.now].copy()

    def come_after(self, event: Clock | None, device: torch.device) -> None:  # there is one device
        """Order later work of the present stream after an event."""
        if event is not None:
            self.join(self.now, event)

    # -- clocks -----------------------------------------------------------------------------------------------------------------

    def join(self, stream: str, clock: Mapping[str, int]) -> None:
        """Let a stream come after all that a clock knows."""
        own = self.clocks[stream]
        for name, time in clock.items():
            own[name] = max(own.get(name, 0), time)

    def is_on_host(self, x: Tensor) -> None:
        """Say that a tensor's memory is the host's."""
        self._of(x, new=True).on_host = True

    def _of(self, x: Tensor, *, new: bool = False) -> Memory:
        storage = x.untyped_storage()
        if storage._cdata not in self._memory or new:
            memory = self._memory[storage._cdata] = Memory(on_host=False)
            weakref.finalize(storage, self._memory.pop, storage._cdata, None)
            # torch's allocator gives memory back to work of the stream that had it, without waiting: other streams have no order with it.
            clock = self.clocks[self.now]
            memory.accesses.append(Access(0, storage.nbytes(), self.now, clock.get(self.now, 0), True, "allocated"))
        return self._memory[storage._cdata]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry an operation out, and compare it with what touched its memory before."""
        given = kwargs or {}
        out = function(*args, **given)
        written = self._written(function, args, given)
        read = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor) and not any(x is one for one in written)]
        aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if aliases:
            return out
        known = {x.untyped_storage()._cdata for x in (*written, *read)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known]
        for x in made:
            self._of(x, new=True)
        touched = [*((x, True) for x in (*written, *made)), *((x, False) for x in read)]
        self._carried_out(
            str(function), [one for one in touched if one[0].numel()], is_async=self._is_async(args, given)
        )
        return out

    def _carried_out(self, what: str, touched: list[tuple[Tensor, bool]], *, is_async: bool) -> None:
        places = [self._of(x).on_host for x in (one for one, _ in touched)]
        stream = "host" if places and all(places) else self.now
        self.join(stream, self.clocks["host"])  # which has queued it
        clock = self.clocks[stream]
        time = clock[stream] = clock.get(stream, 0) + 1
        self.operations[stream] = self.operations.get(stream, 0) + 1
        for x, writes in touched:
            memory, size = self._of(x), x.element_size()
            start = int(x.storage_offset()) * size
            stop = start + (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * size
            for one in memory.accesses:
                overlaps = one.start < stop and start < one.stop
                if overlaps and (writes or one.writes) and clock.get(one.stream, 0) < one.time:
                    self.races.append(f"{what} on {stream} and {one.what} on {one.stream}")
            if writes:
                memory.accesses = [one for one in memory.accesses if one.start < start or one.stop > stop]
            memory.accesses.append(Access(start, stop, stream, time, writes, what))
        if any(places) and not is_async:
            self.join("host", clock)  # the host waits for such a copy

    @staticmethod
    def _is_async(args: Any, given: Mapping[str, Any]) -> bool:
        return given.get("non_blocking", args[2] if len(args) > 2 else False) is True

    @staticmethod
    def _written(function: Any, args: Any, given: Mapping[str, Any]) -> list[Tensor]:
        found: list[Tensor] = []
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else given.get(argument.name)
                found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        return found
