"""Which gradients are infinite or NaN: where, how many, since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.reduction import chunk_size, chunks
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.layout import Slice
from everybit_torch.sharded.reports import NonFinite


class Shard(Protocol):
    """The check of this rank's part of a group.

    Attributes:
        gradients: Of the group.
        slices: The parts of parameters that lie in it, in order.
        parameters: One for each slice.
    """

    gradients: GradientBuffer
    slices: list[Slice]
    parameters: list[nn.Parameter]

    @property
    def without_padding(self) -> Tensor:
        """The main gradient of this part, 1-d."""
        ...


def count_nonfinite(x: Tensor) -> Tensor:
    """Number of elements that are not finite: int64, 0-d, on the device. Norms would overflow on large finite ones."""
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.reshape(-1)
    for low, high in chunks(flat.numel(), chunk_size(x.device)):
        part = flat[low:high]
        count += part.numel() - torch.isfinite(part).sum()
    return count


def has_nonfinite(shards: Sequence[Shard]) -> Tensor:
    """1 if a main gradient has an element that is not finite, else 0: int32, 0-d, on the device."""
    own = [shard.without_padding for shard in shards]
    # The largest magnitude is infinite or NaN exactly if an element is.
    largest = [torch.linalg.vector_norm(x, torch.inf) for x in own if x.numel()]
    device = shards[0].gradients.device
    if not largest:
        return torch.zeros((), dtype=torch.int32, device=device)
    return (~torch.isfinite(torch.stack([x.double() for x in largest]))).any().to(device, torch.int32)


def find_nonfinite(
    shards: Sequence[Shard], names: Sequence[str], local: Tensor, inner: Communicator, outer: Communicator
) -> tuple[NonFinite, ...]:
    """Every parameter whose gradient was not finite on some rank, or only after the sum. The host waits for the device once.

    Args:
        shards: This rank's.
        names: Of all parameters.
        local: For each of them, how many elements of this rank's own gradients were not finite.
        inner: The inner ranks.
        outer: The outer ranks.
    """
    number = {name: index for index, name in enumerate(names)}
    summed = torch.zeros_like(local)
    for shard in shards:
        for s, parameter in zip(shard.slices, shard.parameters, strict=True):
            own = shard.gradients.own[s.offset : s.offset + parameter.numel()]
            summed[number[s.placement.spec.name]] += count_nonfinite(own).to(summed.device)
    counts = torch.stack([local, summed])[None]
    for communicator in (inner, outer):
        gathered = counts.new_empty((communicator.size, *counts.shape))
        communicator.all_gather(gathered.view(-1), counts.reshape(-1), "counts of non-finite gradients").wait()
        counts = gathered.view(-1, 2, len(names))
    per_rank = counts.tolist()
    found = []
    for index, name in enumerate(names):
        before = [(rank, ranks[0][index]) for rank, ranks in enumerate(per_rank) if ranks[0][index]]
        after = [(rank, ranks[1][index]) for rank, ranks in enumerate(per_rank) if ranks[1][index]]
        if before:
            found += [NonFinite(name, rank, count, "backward") for rank, count in before]
        else:
            found += [NonFinite(name, rank, count, "reduction") for rank, count in after]
    return tuple(found)
