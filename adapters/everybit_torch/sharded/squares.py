"""Sums of squares in float64, for which the host does not wait: of what is in memory, and of what is being written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everybit.base import barriers
from everybit_torch.collectives.reduction import CHUNK
from everybit_torch.torch_internals.tensors import version

# Elements that are widened at a time on an accelerator: 32 MiB of scratch, and few kernels to launch.
DEVICE_PIECE = 1 << 22


def sums_of_squares(gradients: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The sum of the squares of all elements, of each tensor: float64, 0-d, on ``device``.

    Squares are taken and added up in float64: those of float32 numbers always fit there, so that no result has to be looked at and
    computed again, and a sum is finite exactly if they all are. What is widened at a time is what :func:`scratch_bytes` says.

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


def scratch_bytes(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that :func:`sums_of_squares` allocates for a gradient of ``numel`` elements; of several, pass the largest."""
    return 0 if dtype is torch.float64 else min(numel, _piece_size(device)) * torch.float64.itemsize


def _piece_size(device: torch.device) -> int:
    # As large as what is written at a time, so that both ways add up in one order.
    return CHUNK if device.type in ("cpu", "meta") else DEVICE_PIECE


class Squares:
    """The sum of the squares of a tensor that is being written, chunk by chunk: the same bits as :func:`sums_of_squares` of it.

    Args:
        filled: Elements that count; after them comes padding.
        device: Of the tensor.

    Attributes:
        total: The sum so far: float64, 0-d.
    """

    def __init__(self, filled: int, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._filled, self._seen = filled, 0
        self._scratch: Tensor | None = None
        self._written_at: int | None = None

    @classmethod
    def begin(cls, into: Tensor, filled: int) -> Squares | None:
        """Begin before the tensor is written. None on accelerators, which write larger chunks than are to be widened at a time."""
        return cls(filled, into.device) if into.device.type == "cpu" else None

    def add(self, chunk: Tensor) -> None:
        """The next chunk was written."""
        part = chunk[: max(self._filled - self._seen, 0)]
        if part.numel():
            if self._scratch is None:
                numel = scratch_bytes(self._filled, part.dtype, part.device) // torch.float64.itemsize
                self._scratch = torch.empty(numel, dtype=torch.float64, device=part.device)
            self.total += _of_one(part, self._scratch, CHUNK)
        self._seen += chunk.numel()

    def end(self, written: Tensor) -> None:
        """All was written."""
        self._scratch = None
        self._written_at = version(written) if self._seen >= self._filled else None

    def is_complete_for(self, written: Tensor) -> bool:
        """Whether all was seen, and nobody has written to the tensor since, as far as autograd sees it."""
        return self._written_at is not None and self._written_at == version(written)
