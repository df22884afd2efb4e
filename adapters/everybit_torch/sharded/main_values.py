"""The weights that are trained, with all the precision that parameters and state hold together: gathered one group at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everybit.base import dtype_name, torch_dtype
from everybit.policies import resolve
from everybit_torch.full_precision import PIECE, export_piece
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.model_buffers import ModelBuffers
from everybit_torch.sharded.shard_optimizer import LabelledTransform, ShardOptimizer


def main_dtype(group: Group, labelled: Mapping[str, LabelledTransform]) -> torch.dtype:
    """The dtype in which a trained group's steps are computed, which holds all of its weights' bits."""
    resolved = resolve(labelled[group.label].policy, dtype_name(group.dtype, field="parameter"))
    return torch_dtype(resolved.policy.compute)


class MainValues:
    """The weights in full precision of a stepper, as ``TorchOptimizer.export_fp32`` returns them.

    Args:
        optimizer: Of the stepper, with the state.
        buffers: Of the stepper.
        labelled: What the labels mean.
    """

    def __init__(
        self, optimizer: ShardOptimizer, buffers: ModelBuffers, labelled: Mapping[str, LabelledTransform]
    ) -> None:
        self._optimizer, self._buffers, self._labelled = optimizer, buffers, labelled
        # One for all groups: a backend may hold on to what it sent for a moment.
        trained = [group for group in buffers.layout.groups if group.requires_grad]
        most = max(group.padded * main_dtype(group, labelled).itemsize for group in trained)
        self._room = torch.empty(most, dtype=torch.uint8, device=buffers.device)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each trained parameter's values, by its first name."""
        return {
            place.spec.name: main_dtype(group, self._labelled)
            for group in self._buffers.layout.groups
            if group.requires_grad
            for place in group.placements
        }

    @torch.no_grad()
    def of_group(self, number: int) -> Tensor:
        """The values of one of the layout's groups, in the order of its buffer: 1-d, until the next is asked for.

        Every data-parallel rank has to call it.
        """
        buffers, weights = self._buffers, self._buffers.weights[number]
        group, kind = weights.group, buffers.sharding
        dtype = main_dtype(group, self._labelled)
        values = self._room[: group.padded * dtype.itemsize].view(dtype).zero_()
        low, high = buffers.own_range(group)
        self._write_own(number, values[low:high])
        what = f"the main weights of {weights.what}"
        start, stop = group.shard(buffers.inner.rank, buffers.inner.size) if kind.state else (0, group.padded)
        if kind.outer == "optim":
            within = group.sizes_within(buffers.inner.rank, buffers.inner.size, buffers.outer.size)
            buffers.outer.all_gather(values[start:stop], values[low:high], what, within).wait()
        if kind.state:
            buffers.inner.all_gather(values, values[start:stop], what, group.sizes(buffers.inner.size)).wait()
        return values

    def _write_own(self, number: int, values: Tensor) -> None:
        weights = self._buffers.weights[number]
        shard = next(one for one in self._optimizer.shards if one.weights is weights)
        for stored, where, piece in self._optimizer.pieces_of(shard, PIECE):
            export_piece(stored, piece.tensor, piece.state, values[where])
