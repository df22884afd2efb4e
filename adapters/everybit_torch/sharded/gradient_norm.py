"""The norm of the gradients: who else is answered by it, and whether it tells that they are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators import Chain, NamedChain
from everybit.transforms import ClipByGlobalNorm
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.squares import sums_of_squares


def squares_of(buffers: Sequence[GradientBuffer], device: torch.device, *, as_written: bool) -> Tensor:
    """The sum of the squares of what this rank steps: float64, 0-d, on ``device``.

    Args:
        buffers: Of gradients, which are final.
        device: Where they are.
        as_written: Nobody has had the gradients in hand, so that sums which were found when they were written still hold.
    """
    known = [buffer.sum_of_squares() if as_written else None for buffer in buffers]
    total = torch.zeros((), dtype=torch.float64, device=device)
    unknown = [buffer.without_padding for buffer, one in zip(buffers, known, strict=True) if one is None]
    found = iter(sums_of_squares(unknown, device))
    for one in known:
        total += next(found) if one is None else one
    return total


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
    if isinstance(transform, Chain):
        return _clips_first(transform.transforms[0])
    if isinstance(transform, NamedChain):
        return _clips_first(next(iter(transform.transforms.values())))
    return type(transform) is ClipByGlobalNorm
