"""The hardware and software that a result was made with, without which numbers cannot be compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import optree
import torch

import everybit as eb


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
