"""Parameters that FSDP2 shards under formats with one number for a block of elements: whether every shard consists of whole blocks.

FSDP2 gives each rank as many rows of a parameter as the first one, and the last ranks fewer, or none. Blocks are counted from the
parameter's own first element, so that the bits are those of one process where each shard begins at a multiple of the block. What is kept
for blocks is a DTensor of one dimension, which torch cuts by the same rule, counting blocks in the place of rows: both cuts have to agree,
or a state dict would name the wrong elements. All ranks come to the same answer, because it follows from shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from everybit.formats.blockwise import BLOCKS
from everybit.policies import AnyPolicy, policies_of
from everybit_torch.dtensors import dimensions_of_rows, is_dtensor, row_edges


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a parameter, as ranks hold them.

    Attributes:
        count: Of all ranks together.
        length: Elements of a row.
        ranks: That have rows of their own.
    """

    count: int
    length: int
    ranks: int

    @property
    def starts(self) -> list[int]:
        """The first row of each rank; the number of rows for ranks without any."""
        return row_edges(self.count, self.ranks)[:-1]

    def inside(self, block: int) -> int | None:
        """The first rank whose rows begin inside a block."""
        return next((r for r, s in enumerate(self.starts) if s < self.count and s * self.length % block), None)

    def disagreeing(self, block: int) -> int | None:
        """The first rank that has other blocks than torch gives it of a vector with a number for each block."""
        blocks = -(-self.count * self.length // block)
        theirs = row_edges(blocks, self.ranks)[:-1]
        ours = [-(-start * self.length // block) for start in self.starts]
        return next((rank for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)

    def fits(self, block: int) -> bool:
        """Whether a parameter so sharded can be stored with one number for each block."""
        return self.inside(block) is None and self.disagreeing(block) is None


def require_whole_blocks(name: str, parameter: Tensor, policy: AnyPolicy) -> None:
    """Refuse a sharded parameter of which a rank's part does not consist of whole blocks.

    Raises:
        ValueError: The message names the parameter, the shard, and what is accepted.
    """
    blocks = sorted({block for one in policies_of(policy) for block in one.blocks if block > 1}, reverse=True)
    if not blocks or not is_dtensor(parameter) or not parameter.numel():
        return
    rows = _Rows(parameter.shape[0], math.prod(parameter.shape[1:]), _ranks(name, parameter))
    for block in blocks:
        inside, other = rows.inside(block), rows.disagreeing(block)
        if inside is not None:
            start = rows.starts[inside]
            problem = f"shard {inside} begins at row {start}, which is element {start * rows.length} and lies inside a block of {block}"
        elif other is not None:
            problem = (
                f"its rows are no multiple of the {rows.ranks} ranks, and torch would cut the numbers for its blocks of {block} at another"
                f" place than row {rows.starts[other]}, where shard {other} begins"
            )
        else:
            continue
        raise ValueError(
            f"{name}: got shape {tuple(parameter.shape)}, whose rows have {rows.length} elements, under a policy that stores one number for"
            f" {block} elements, counted from the parameter's first: {problem}. Accepted are shards of whole blocks"
            f"{_suggested(rows, block, blocks)}; formats without blocks for this parameter, which eb.keep_wide(..., names=[...]) chooses by"
            " its name; and a FlatStepper, which shards at blocks."
        )


def _suggested(rows: _Rows, block: int, blocks: Sequence[int]) -> str:
    """The block nearest to one that does not fit, of those that do."""
    others = [one for one in blocks if one not in BLOCKS]
    fitting = [one for one in BLOCKS if rows.fits(one)] if block in BLOCKS and all(map(rows.fits, others)) else []
    smaller = [one for one in fitting if one < block]
    if not fitting:
        return ""
    return f", which a block of {smaller[-1] if smaller else fitting[0]} would give here"


def _ranks(name: str, parameter: Tensor) -> int:
    """The number of ranks that have rows of their own.

    Raises:
        ValueError: A part is no run of rows.
    """
    assert is_dtensor(parameter)
    cut = dimensions_of_rows(parameter)
    if cut is None:
        raise ValueError(
            f"{name}: got a parameter placed as {parameter.placements} under a policy with blocks of elements; accepted are Shard(0) along"
            " one dimension of the mesh, Replicate along the others, and formats without blocks."
        )
    return parameter.device_mesh.size(cut[0]) if cut else 1
