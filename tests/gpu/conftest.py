"""What the tests that need a GPU share; `make gpu` runs them."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import DEVICE


@pytest.fixture
def device() -> torch.device:
    """The device, which modules of tests require."""
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
