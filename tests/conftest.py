"""What all tests share."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

# The runner starts a process per core; tensors are small.
torch.set_num_threads(1)

# Compiling inside of a property takes as long as it takes; examples are the same on every machine.
settings.register_profile("everybit", deadline=None, derandomize=True)
settings.load_profile("everybit")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave modules and tests, millions of objects, out of garbage collection, and collect less often: compilers make many objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
