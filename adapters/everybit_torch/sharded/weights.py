"""The model's own tensors as pieces of flat buffers, whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from everybit_torch import streams
from everybit_torch.collectives.communicator import Communicator, Done, Pending
from everybit_torch.gradients import piece
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.strategies import Sharding

MOVED = (
    "{name}: was moved, cast or given other memory since the stepper was made, and is not in its buffer now. Cast and move a model first,"
    " then make its stepper; close() gives a model back."
)


class WeightBuffer:
    """The weights of one group of parameters, which become pieces of it.

    Args:
        group: Of the layout.
        parameters: The model's, in the group's order.
        sharding: What this rank steps.
        inner: The ranks that step different parts.
        device: Where the buffer lies.

    Attributes:
        whole: The weights of all parameters, with padding.
        own: The part that this rank's optimizer steps.
        own_range: Its elements.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[nn.Parameter],
        sharding: Sharding,
        inner: Communicator,
        device: torch.device,
    ) -> None:
        self.group, self.parameters, self._sharding, self._inner = group, list(parameters), sharding, inner
        self._lengths = group.sizes(inner.size) if sharding.state else ()
        self.whole = torch.zeros(group.padded, dtype=group.dtype, device=device)
        self.own_range = group.shard(inner.rank, inner.size) if sharding.state else (0, group.padded)
        self.own = self.whole[slice(*self.own_range)]
        for parameter, place in zip(self.parameters, group.placements, strict=True):
            values, tensor = (
                parameter.detach(),
                piece(self.whole, place.start, place.stop, torch.Size(place.spec.shape)),
            )
            tensor.copy_(values)
            del values
            streams.keep(parameter)  # which may have been made on another stream
            parameter.data = tensor

    @property
    def what(self) -> str:
        """The name of this buffer in error messages."""
        others = len(self.parameters) - 1
        return f"{self.group.placements[0].spec.name}" + (f" and {others} other parameters" if others else "")

    @property
    def nbytes(self) -> int:
        """The number of bytes that persist between steps."""
        return self.whole.nbytes

    def start_spread(self) -> Pending:
        """Start to gather the stepped weights on the ranks that keep copies of them."""
        if self._sharding.state:
            return self._inner.all_gather(self.whole, self.own, self.what, self._lengths)
        return Done()

    def stepped(self) -> None:
        """Autograd did not see that the values changed; a graph that needs the old ones must not run."""
        torch.autograd.graph.increment_version(self.parameters)
