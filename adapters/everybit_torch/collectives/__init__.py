"""Collectives over ranks: groups, sums, and the numbers that are sent. Knows neither models nor optimizers."""

from everybit_torch.collectives.all_to_all import AllToAll
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.collectives.meshes import Mesh, communicators, ranks_of, sizes_of
from everybit_torch.collectives.reduction import (
    FusedSum, GradientWires, Mode, Reduction, Wire, accumulate, all_reduce_into, as_sent, cast, chunk_size, chunks, divide,
    reduce_scatter_into,
)  # fmt: skip

__all__ = [
    "AllToAll", "Communicator", "FusedSum", "GradientWires", "GroupAxis", "Mesh", "Mode", "Reduction", "Wire",
    "accumulate", "all_reduce_into", "as_sent", "cast", "chunk_size", "chunks", "communicators", "divide", "ranks_of",
    "reduce_scatter_into", "sizes_of",
]  # fmt: skip
