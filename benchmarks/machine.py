"""What a measurement was made on and with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "optree", "everybit", "torch-optimi", "torchao", "heavyball", "pytorch_optimizer", "torchopt", "bitsandbytes",
    "flashoptim", "apex", "numpy",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """Processor, accelerator, threads, versions, commit, command."""
    return {
        "processor": _processor(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def synchronize(device: str) -> None:
    """Wait until a device has done what it was told."""
    if device == "cuda":
        torch.cuda.synchronize()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
