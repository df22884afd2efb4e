"""What the tests that need a GPU share; `make gpu` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.devices import DEVICE


@pytest.fixture
def device() -> torch.device:
    """The device, which modules of tests require."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def group(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device, with a process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1,
        device_id=device if on_gpu else None,
    )  # fmt: skip
    yield device
    dist.destroy_process_group()
