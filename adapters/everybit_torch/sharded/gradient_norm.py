"""The sum of the squares of this rank's gradients, in float64, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everybit_torch.stepping import PIECE

# Elements that are widened at a time on an accelerator: 32 MiB of scratch, and few kernels to launch.
DEVICE_PIECE = 1 << 22


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements: float64, 0-d, on ``device``.

    Squares are taken and added up in float64: those of float32 numbers always fit there, so that no result has to be looked at and
    computed again. All pieces are widened in one scratch buffer, which is what :func:`scratch_bytes` says.

    Args:
        gradients: 1-d, of any floating dtypes, on ``device``.
        device: Where they are.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = _piece_size(device)
    narrow = [x.numel() for x in gradients if x.dtype is not torch.float64]
    scratch = torch.empty(min(max(narrow, default=0), size), dtype=torch.float64, device=device)
    for gradient in gradients:
        for low in range(0, gradient.numel(), size):
            part = gradient[low : low + size]
            wide = part if part.dtype is torch.float64 else scratch[: part.numel()].copy_(part)
            total += torch.dot(wide, wide)
    return total


def scratch_bytes(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """What :func:`sum_of_squares` allocates for a gradient of so many elements of a dtype; for several, the most of them."""
    return 0 if dtype is torch.float64 else min(numel, _piece_size(device)) * torch.float64.itemsize


def _piece_size(device: torch.device) -> int:
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE
