"""The sum of the squares of this rank's gradients, in float64, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit import barriers
from everybit.combinators.chain import Chain, NamedChain
from everybit.transforms.stateless import ClipByGlobalNorm
from everybit_torch.sharded.shard_optimizer import LabelledTransform

# Elements that are widened at a time on an accelerator: 32 MiB of scratch, and few kernels to launch.
DEVICE_PIECE = 1 << 22


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements: float64, 0-d, on ``device``.

    Squares are taken and added up in float64: those of float32 numbers always fit there, so that no result has to be looked at and
    computed again, and the sum is finite exactly if they all are. What is widened at a time is what :func:`scratch_bytes` says.

    Args:
        gradients: 1-d, of any floating dtypes, on ``device``.
        device: Where they are.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = _piece_size(device)
    for gradient in gradients:
        for low in range(0, gradient.numel(), size):
            total += barriers.sum_of_squares(gradient[low : low + size])
    return total


def scratch_bytes(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """What :func:`sum_of_squares` allocates for a gradient of so many elements of a dtype; for several, the most of them."""
    return 0 if dtype is torch.float64 else min(numel, _piece_size(device)) * torch.float64.itemsize


def tells_finite(dtype: torch.dtype) -> bool:
    """Whether the sum of squares of numbers of a dtype is finite exactly if they are. Squares of large float64 numbers are not."""
    return dtype is not torch.float64


def answers_first(labelled: Mapping[str, LabelledTransform]) -> bool:
    """Whether the sum of the squares of all gradients is the answer to the first reduction of every transform.

    It is where there is one transform for all parameters, and clips by the global norm before it does anything else.
    """
    sources = {one.source for one in labelled.values()}
    return len(sources) == 1 and all(_clips_first(one.transform) for one in labelled.values())


def _clips_first(transform: eb.Transform[Any]) -> bool:
    first = transform
    if isinstance(transform, Chain):
        first = next(iter(transform.transforms), transform)
    elif isinstance(transform, NamedChain):
        first = next(iter(transform.transforms.values()), transform)
    return _clips_first(first) if first is not transform else type(transform) is ClipByGlobalNorm


def _piece_size(device: torch.device) -> int:
    return barriers.CHUNK if device.type in ("cpu", "meta") else DEVICE_PIECE
