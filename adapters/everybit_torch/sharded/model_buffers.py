"""One start for all ranks: the first rank's values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from everybit_torch.collectives.communicator import Communicator


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
