"""Where a command works: a device by name, how many threads, and how long something takes there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from everybit_torch.cli.errors import OptionError


def parsed_device(name: str) -> torch.device:
    """The device of ``--device``.

    Raises:
        OptionError: torch finds none of that name here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if name not in here:
        found = ", ".join(here) + ("" if count else " (torch finds no CUDA device here)")
        raise OptionError("--device", name, found)
    return torch.device(name)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """CPU threads of torch set to ``count``, unless it is 0, and set back afterwards."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``call`` takes, with what it started on the device."""
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
