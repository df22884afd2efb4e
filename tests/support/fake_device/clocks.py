"""What comes before what: vector clocks of whoever works (streams, communicators, the host), and streams and events that pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Clock:
    """One that works: its operations are numbered, and it knows up to which number of each other one it comes after.

    Args:
        name: Of the stream, or whoever it is.

    Attributes:
        seen: By name, the last operation that everything which starts from here on comes after; its own is the last that it started.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {name: 0}

    def start(self) -> int:
        """Number an operation."""
        self.seen[self.name] += 1
        return self.seen[self.name]

    def learn(self, seen: Mapping[str, int]) -> None:
        """What starts from here on comes after all of this."""
        for name, number in seen.items():
            if self.seen.get(name, 0) < number:
                self.seen[name] = number

    def comes_after(self, name: str, number: int) -> bool:
        """Whether what starts from here on comes after somebody's operation of this number."""
        return self.seen.get(name, 0) >= number


class FakeEvent:
    """A place in the order of a stream, as ``torch.cuda.Event``.

    Args:
        host: The host's clock.
    """

    def __init__(self, host: Clock) -> None:
        self._host = host
        self.seen: dict[str, int] = {}

    def record(self, stream: FakeStream) -> FakeEvent:
        """The event is where the stream is now."""
        stream.clock.learn(self._host.seen)
        self.seen = dict(stream.clock.seen)
        return self

    def wait(self, stream: FakeStream) -> None:
        """What is queued on the stream from here on comes after the event."""
        stream.clock.learn(self.seen)

    def synchronize(self) -> None:
        """The host waits for the event."""
        self._host.learn(self.seen)


class FakeStream:
    """A queue of work, as ``torch.cuda.Stream``.

    Args:
        name: In messages.
        host: The host's clock.
    """

    def __init__(self, name: str, host: Clock) -> None:
        self.clock, self._host = Clock(name), host

    @property
    def name(self) -> str:
        return self.clock.name

    def record_event(self, event: Any = None) -> FakeEvent:
        """Return an event at the stream's present place."""
        found = FakeEvent(self._host) if event is None else event
        found.record(self)
        assert isinstance(found, FakeEvent)
        return found

    def wait_event(self, event: FakeEvent) -> None:
        event.wait(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for everything on the stream."""
        self.record_event().synchronize()

    def __repr__(self) -> str:
        return f"stream {self.name!r}"
