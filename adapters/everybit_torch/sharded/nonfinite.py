"""Counts elements that are infinite or NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from everybit_torch.collectives import chunk_size, chunks


def count_nonfinite(x: Tensor) -> Tensor:
    """Number of infinite and NaN elements: int64, 0-d, on the device. A norm would overflow on large finite elements."""
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.reshape(-1)
    for low, high in chunks(flat.numel(), chunk_size(x.device)):
        part = flat[low:high]
        count += part.numel() - torch.isfinite(part).sum()
    return count
