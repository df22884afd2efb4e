"""Sums of squares in float64, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everybit.base import barriers
from everybit_torch.collectives.reduction import CHUNK

# Elements that are widened at a time on an accelerator: 32 MiB of scratch, and few kernels to launch.
DEVICE_PIECE = 1 << 22


def sums_of_squares(gradients: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The sum of the squares of all elements, of each tensor: float64, 0-d, on ``device``.

    Squares are taken and added up in float64: those of float32 numbers always fit there, so that no result has to be looked at and
    computed again, and a sum is finite exactly if they all are.

    Args:
        gradients: 1-d, of any floating dtypes, on ``device``.
        device: Where they are.
    """
    size = _piece_size(device)
    narrow = [x.numel() for x in gradients if x.dtype is not torch.float64]
    # Widened in one place: memory that is allocated for each piece comes back from the operating system page by page.
    scratch = torch.empty(min(max(narrow, default=0), size), dtype=torch.float64, device=device)
    return [_of_one(gradient, scratch, size) for gradient in gradients]


def _of_one(gradient: Tensor, scratch: Tensor, size: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=gradient.device)
    for low in range(0, gradient.numel(), size):
        part = gradient[low : low + size]
        wide = part if part.dtype is torch.float64 else scratch[: part.numel()].copy_(part)
        total += barriers.sum_of_squares(wide)
    return total


def _piece_size(device: torch.device) -> int:
    return CHUNK if device.type in ("cpu", "meta") else DEVICE_PIECE
