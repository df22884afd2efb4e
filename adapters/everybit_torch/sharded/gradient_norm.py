"""The norm of the gradients: who else is answered by it, and whether it tells that they are finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators import Chain, NamedChain
from everybit.protocol import any_per_tensor
from everybit.transforms import ClipByGlobalNorm
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.shard_optimizer import LabelledTransform
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
    unknown = [buffer.to_read for buffer, one in zip(buffers, known, strict=True) if one is None]
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


def reduces_otherwise(labelled: Mapping[str, LabelledTransform]) -> bool:
    """Whether a transform asks for something over everything that the norm of all gradients does not answer."""
    if answers_first(labelled):
        return any(_reduces_later(one.transform) for one in labelled.values())
    return any(_reduces(one.transform) for one in labelled.values())


def _parts(transform: eb.Transform[Any]) -> list[eb.Transform[Any]]:
    """Return the transforms that a transform is made of, as far as they are known."""
    if isinstance(transform, Chain):
        return list(transform.transforms)
    if isinstance(transform, NamedChain):
        return list(transform.transforms.values())
    inner = getattr(transform, "transform", None)
    return [] if inner is None else [inner]


def _reduces(transform: eb.Transform[Any]) -> bool:
    parts = _parts(transform)
    if parts:
        return any(_reduces(part) for part in parts)
    return transform.reduces and not any_per_tensor([transform])


def _reduces_later(transform: eb.Transform[Any]) -> bool:
    """Whether a transform that clips first asks for something over everything after that."""
    first, *others = _parts(transform) or [transform]
    return any(map(_reduces, others)) or (first is not transform and _reduces_later(first))


def _clips_first(transform: eb.Transform[Any]) -> bool:
    first = next(iter(_parts(transform)), transform) if isinstance(transform, (Chain, NamedChain)) else transform
    return _clips_first(first) if first is not transform else type(transform) is ClipByGlobalNorm
