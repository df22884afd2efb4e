"""Memory as an allocator with streams has it: who reads and writes which bytes, in what order, and when they may be given out again."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Literal

from tests.support.fake_device.clocks import Clock

Place = Literal["device", "host", "pinned"]


class HazardError(AssertionError):
    """Two uses of memory that nothing orders; or an operation on tensors of the host and of the device."""


@dataclass(slots=True)
class Access:
    """A use of bytes.

    Attributes:
        low: The address of the first.
        high: The address after the last.
        clock: Of who used them.
        number: Of the operation.
        writes: Whether they were written.
        what: The operation.
        where: The line that asked for it.
    """

    low: int
    high: int
    clock: Clock
    number: int
    writes: bool
    what: str
    where: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"{self.what} on {self.clock.name!r} {verb} {self.high - self.low} bytes at {self.where}"


@dataclass(slots=True)
class Block:
    """Memory that was allocated at once.

    Attributes:
        start: Its address.
        nbytes: Its length.
        place: Where it would be.
        owner: The clock of the stream whose allocations it is given to when it is free.
        where: The line that allocated it.
        accesses: Uses that a later one may have to come after.
        recorded: Names of streams of which ``record_stream`` told.
        ready: What comes before a gradient that autograd hands on.
    """

    start: int
    nbytes: int
    place: Place
    owner: Clock
    where: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)
    ready: dict[str, int] | None = None

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of {self.place} memory, allocated on {self.owner.name!r} at {self.where}"


class Memory:
    """All blocks, by address; and uses of freed ones that their owners do not come after yet.

    Args:
        host: The host's clock: what it does is over when it goes on.
    """

    def __init__(self, host: Clock) -> None:
        self._host = host
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._freed: dict[str, list[tuple[Access, Block, str]]] = {}

    def find(self, address: int) -> Block | None:
        """The block that an address is in."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._starts[index]]
        return block if address < block.start + block.nbytes else None

    def live(self, place: Place) -> int:
        """Bytes of all blocks at a place."""
        return sum(block.nbytes for block in self._blocks.values() if block.place == place)

    def allocate(self, start: int, nbytes: int, place: Place, owner: Clock, *, fresh: bool = True) -> Block:
        """Add a block; one that is not ``fresh`` was there before it was seen.

        Raises:
            HazardError: The stream may be given memory that was freed while another one was still to use it.
        """
        while (stale := self.find(start) or self._next(start, nbytes)) is not None:
            self._forget(stale)
        if place != "pinned" and fresh:
            self._require_over(owner, nbytes)
        block = Block(start, nbytes, place, owner, where())
        insort(self._starts, start)
        self._blocks[start] = block
        return block

    def free(self, block: Block) -> None:
        """Give a block back. What is pinned stays until the copies that torch knows of are over."""
        if self._blocks.get(block.start) is not block:
            return
        self._forget(block)
        if block.place == "pinned":
            return
        for one in block.accesses:
            recorded = one.clock is self._host or one.clock.name in block.recorded
            if not recorded and not block.owner.comes_after(one.clock.name, one.number):
                self._freed.setdefault(block.owner.name, []).append((one, block, where()))

    def access(self, block: Block, access: Access) -> None:
        """Note a use.

        Raises:
            HazardError: It does not come after one that it has to come after.
        """
        kept = []
        for one in block.accesses:
            apart = one.high <= access.low or access.high <= one.low
            if not apart and (one.writes or access.writes) and not access.clock.comes_after(one.clock.name, one.number):
                raise HazardError(f"{access}, and nothing orders that after: {one} ({block})")
            # A later use has to come after this one, and by that after those.
            inside = access.low <= one.low and one.high <= access.high
            if not (inside and (access.writes or (not one.writes and one.clock is access.clock))):
                kept.append(one)
        kept.append(access)
        block.accesses = kept

    def _require_over(self, owner: Clock, nbytes: int) -> None:
        for one, block, freed in self._freed.pop(owner.name, []):
            if not owner.comes_after(one.clock.name, one.number):
                raise HazardError(
                    f"{nbytes} bytes are allocated on {owner.name!r} at {where()}, and may be those that were freed at {freed} ({block})"
                    f" before this was over: {one}; accepted are record_stream, or to order {owner.name!r} after it"
                )

    def _next(self, start: int, nbytes: int) -> Block | None:
        index = bisect_right(self._starts, start)
        if index < len(self._starts) and self._starts[index] < start + nbytes:
            return self._blocks[self._starts[index]]
        return None

    def _forget(self, block: Block) -> None:
        del self._blocks[block.start]
        self._starts.remove(block.start)


def where() -> str:
    """The innermost line that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if ("everybit" in name or "/tests/" in name) and "/fake_device/" not in name and "site-packages" not in name:
            return f"{'/'.join(name.rsplit('/', 2)[1:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
