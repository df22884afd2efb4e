"""Makes values the same on all ranks: a model's at the start, and buffers such as running statistics on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from everybit.base import require_word
from everybit_torch.collectives import Communicator

BufferValues = Literal["first", "mean"]
"""The values that buffers are set to: those of the first rank, or the mean over all ranks."""


def synchronize_values(
    model: nn.Module, communicators: Sequence[Communicator], parameters: Sequence[nn.Parameter]
) -> None:
    """Copy the first rank's values of these parameters, and of all buffers, to all ranks."""
    ids = {id(parameter) for parameter in parameters}
    named = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in ids]
    for name, tensor in [*named, *model.named_buffers()]:
        for communicator in communicators:
            values = tensor.detach()
            whole = values if values.is_contiguous() else values.contiguous()
            communicator.broadcast(whole, name)
            if whole is not values:
                values.copy_(whole)


def synchronize_buffers(model: nn.Module, communicators: Sequence[Communicator], values: BufferValues) -> None:
    """Make the buffers of a model the same on all ranks. Every rank has to call it.

    Args:
        model: The model.
        communicators: The outer and the inner ranks.
        values: The result. A mean is computed in float64, in the order of the ranks, and rounded once; values of other types are
            the first rank's.

    Raises:
        ValueError: ``values`` is neither of the two.
    """
    require_word("values", values, BufferValues)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if values == "mean" and buffer.is_floating_point():
                _average(buffer, communicators, name)
            else:
                whole = buffer.detach().contiguous()
                for communicator in communicators:
                    communicator.broadcast(whole, name)
                buffer.copy_(whole)


def _average(buffer: Tensor, communicators: Sequence[Communicator], name: str) -> None:
    total, ranks = buffer.detach().double().reshape(-1), 1
    for communicator in reversed(communicators):
        everyone = total.new_empty((communicator.size, total.numel()))
        communicator.all_gather(everyone.view(-1), total, name).wait()
        total, ranks = everyone[0].clone(), ranks * communicator.size
        for other in everyone[1:]:
            total += other
    buffer.copy_((total / ranks).view(buffer.shape))
