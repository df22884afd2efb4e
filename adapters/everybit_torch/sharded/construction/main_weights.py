"""Main weights from values with more bits than the model's dtype: the model's are rounded, and what is kept beside them has the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from everybit_torch.full_precision import PIECE, begin_at
from everybit_torch.sharded.shard_optimizer import Shard, ShardOptimizer
from everybit_torch.units import write


@torch.no_grad()
def store(optimizer: ShardOptimizer, shard: Shard, values: Tensor) -> None:
    """Begin with these weights: the shard's, and everything that the optimizer keeps for it, as before a first step.

    Args:
        optimizer: Whose shard it is.
        shard: Of a group.
        values: Of the elements that this rank steps, in the dtype in which steps are computed.
    """
    for stored, where, piece in optimizer.pieces_of(shard, PIECE):
        # Without a name for what is returned, which would keep it while the next piece is computed.
        write(
            ([piece.tensor], piece.state),
            begin_at(stored, values[where].view(piece.tensor.shape), piece.tensor, piece.state.step, piece.first),
        )
