"""What the tests that need a GPU share; `make gpu` runs them."""

from __future__ import annotations

import pytest
import torch

from tests.support.devices import DEVICE


@pytest.fixture
def device() -> torch.device:
    """The device; a test that asks for it is skipped where it is missing."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device; `make gpu` runs this on one")
    return torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
