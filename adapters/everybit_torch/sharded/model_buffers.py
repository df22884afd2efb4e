"""The flat buffers of a model: weights, gradients and this rank's shards of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from everybit.base import dtype_name, torch_dtype
from everybit.policies import resolve
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.collectives.reduction import FusedSum, Wire
from everybit_torch.memory_pool import MemoryPool, keeps_memory
from everybit_torch.sharded.gradient_buffers import GradientBuffer
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.layout import Group, Layout
from everybit_torch.sharded.shard_optimizer import Shard
from everybit_torch.sharded.strategies import Sharding
from everybit_torch.sharded.weights import WeightBuffer


class ModelBuffers:
    """The buffers that a layout describes, with the model's values in them.

    Args:
        layout: Of the model.
        parameters: The model's, by name. Those that are trained become pieces of the buffers.
        labelled: How each label's are stored.
        sharding: What is sharded.
        inner: The ranks that buffers are sharded over.
        outer: The ranks that hold copies of the same shards.
        device: Where everything lies.
        fused: Adds up what an exact wire has received.

    Attributes:
        pool: Lends memory to buffers of units.
        weights: By the number of the group in the layout; of those that are trained.
        gradients: Likewise.
        shards: This rank's.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, nn.Parameter],
        labelled: Mapping[str, LabelledTransform],
        sharding: Sharding,
        inner: Communicator,
        outer: Communicator,
        device: torch.device,
        *,
        fused: FusedSum | None = None,
    ) -> None:
        self.inner, self.outer, self._sharding = inner, outer, sharding
        self.weights: dict[int, WeightBuffer] = {}
        self.gradients: dict[int, GradientBuffer] = {}
        self.shards: list[Shard] = []
        self.pool = MemoryPool(keeps=keeps_memory(device))
        for number, group in enumerate(layout.groups):
            if group.requires_grad:
                members = [parameters[place.spec.name] for place in group.placements]
                weights = self.weights[number] = WeightBuffer(group, members, sharding, inner, device)
                main, wires = self._stored(group, labelled)
                gradients = self.gradients[number] = GradientBuffer(
                    group, sharding, inner, outer, main, *wires, device, pool=self.pool, fused=fused
                )
                self.shards.append(Shard.of(weights, gradients))

    @property
    def sharing(self) -> tuple[Communicator, ...]:
        """The communicators over which the parts of one gradient lie; copies are counted once."""
        return (self.inner,) if self._sharding.state else ()

    def send_as(self, labelled: Mapping[str, LabelledTransform]) -> None:
        """Send gradients as these policies say; what they are accumulated in stays."""
        for buffer in self.gradients.values():
            _, (buffer.wire, buffer.outer_wire) = self._stored(buffer.group, labelled)

    @property
    def wires(self) -> list[tuple[Wire, Wire]]:
        """How gradients are sent, buffer by buffer; may be set."""
        return [(buffer.wire, buffer.outer_wire) for buffer in self.gradients.values()]

    @wires.setter
    def wires(self, wires: Sequence[tuple[Wire, Wire]]) -> None:
        for buffer, (wire, outer_wire) in zip(self.gradients.values(), wires, strict=True):
            buffer.wire, buffer.outer_wire = wire, outer_wire

    def _stored(self, group: Group, labelled: Mapping[str, LabelledTransform]) -> tuple[torch.dtype, tuple[Wire, Wire]]:
        """The dtype of a group's main gradient, and how it is sent."""
        resolved = resolve(labelled[group.label].policy, dtype_name(group.dtype, field="parameter"))
        return torch_dtype(resolved.grads_main), Wire.pair(resolved, self.inner.size, self.outer.size)


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
