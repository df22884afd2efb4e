"""Ports for ranks that meet at an address."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port to which nothing is bound, below those that Linux gives to connections, which other tests open all the time."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 ports is free")
