"""What all tests share."""

from __future__ import annotations

import torch
from hypothesis import settings

# The runner starts a process per core; tensors are small.
torch.set_num_threads(1)

# Compiling inside of a property takes as long as it takes; examples are the same on every machine.
settings.register_profile("everybit", deadline=None, derandomize=True)
settings.load_profile("everybit")
