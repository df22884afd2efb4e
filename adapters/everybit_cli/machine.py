"""The machine that a command works on: its versions and processor, its devices, and timing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optree
import torch

import everybit as eb
from everybit_cli.errors import OptionError


def versions() -> dict[str, str]:
    """Return the versions of everything that could change a number."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "optree": optree.__version__,
        "everybit": eb.__version__,
    }


def machine(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, torch's threads, and the accelerator if there is one in use."""
    found: dict[str, str | int] = {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def _processor() -> str:
    """The processor's name; Linux keeps it where Python's platform module does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def parsed_device(name: str) -> torch.device:
    """The device of ``--device``.

    Raises:
        OptionError: torch finds no device of that name.
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
    """Seconds that ``call`` takes, including the work that it started on the device."""
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
