"""A range of a tensor's elements, as distributed checkpoints understand it: a few boxes of the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from everybit_torch.torch_internals.dtensors import local, offset_of_local_part
from everybit_torch.torch_internals.tensors import wrapper


class Box(NamedTuple):
    """A rectangle of a tensor's elements that are consecutive in memory.

    Attributes:
        offsets: The first corner, by dimension.
        sizes: The extent, by dimension.
        start: Position of its first element in the requested range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """Elements ``low`` to ``high`` of a tensor, counted in memory order, as rectangles: at most ``2 * len(shape) - 1``.

    Raises:
        ValueError: The range is not within the tensor.
    """
    if not 0 <= low <= high <= math.prod(shape):
        raise ValueError(
            f"range {low} to {high}: accepted is a range within the {math.prod(shape)} elements of {tuple(shape)}."
        )
    return list(_boxes(tuple(shape), low, high, 0)) if low < high else []


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes of a tensor have the same elements, counted in each of them; None if they have none in common."""
    here, there = [], []
    for low, size, other_low, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True):
        start, stop = max(low, other_low), min(low + size, other_low + other_size)
        if start >= stop:
            return None
        here.append(slice(start - low, stop - low))
        there.append(slice(start - other_low, stop - other_low))
    return tuple(here), tuple(there)


def _boxes(shape: tuple[int, ...], low: int, high: int, start: int) -> Iterator[Box]:
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if first == last and high - low < row:
        for box in _boxes(shape[1:], low - first * row, high - first * row, start):
            yield Box((first, *box.offsets), (1, *box.sizes), box.start)
        return
    whole_from, whole_to = -(-low // row), high // row
    if low < whole_from * row:
        yield from _boxes(shape, low, whole_from * row, start)
    if whole_from < whole_to:
        rest = shape[1:]
        yield Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest), start + whole_from * row - low)
    if whole_to * row < high:
        yield from _boxes(shape, whole_to * row, high, start + whole_to * row - low)


# A program that saves or loads has imported these. They take longer than torch.distributed, and a stepper need not wait for them.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor


class ShardTensor(torch.Tensor):
    """Elements ``low`` to ``high`` of a tensor, or a box of it; it has the shape and dtype of the whole.

    ``torch.distributed.checkpoint`` saves and loads it, in any other cut too. No communication is needed: the cut follows from the
    layout. It cannot be computed with.

    Attributes:
        local: The elements that are here, 1-d.
    """

    local: Tensor
    _low: int
    _boxes: list[Box]

    @staticmethod
    def __new__(
        cls: type[ShardTensor], local: Tensor, shape: Sequence[int], low: int, found: list[Box] | None = None
    ) -> ShardTensor:
        """Wrap ``local``, 1-d, the elements from ``low`` on of a tensor of this ``shape``; or those of the boxes ``found``.

        Loading writes into ``local``.
        """
        whole: ShardTensor = wrapper(cls, shape, dtype=local.dtype, device=local.device)
        whole.local, whole._low = local, low
        whole._boxes = boxes(shape, low, low + local.numel()) if found is None else found
        return whole

    @classmethod
    def of(cls, x: DTensor) -> ShardTensor:
        """Wrap this rank's part of a DTensor, which is one box.

        Raises:
            ValueError: The part does not lie in a row, so that loading could not write into it.
        """
        part, offsets = local(x).detach(), offset_of_local_part(x)
        if not part.is_contiguous():
            raise ValueError(
                f"a part of shape {tuple(part.shape)} of a DTensor has strides {part.stride()}; accepted are contiguous parts."
            )
        if not part.numel():
            return cls(part.reshape(-1), x.shape, 0)
        low = sum(offset * math.prod(x.shape[dim + 1 :]) for dim, offset in enumerate(offsets))
        return cls(part.reshape(-1), x.shape, low, [Box(offsets, tuple(part.shape), 0)])

    def holding(self, local: Tensor) -> ShardTensor:
        """The same elements of the tensor, with these values."""
        return ShardTensor(local, self.shape, self._low, self._boxes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        high = self._low + self.local.numel()
        return f"ShardTensor({tuple(self.shape)}, {self.dtype}, elements {self._low} to {high})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copies only.

        Raises:
            TypeError: Anything else.
        """
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            (shard,) = args
            held: ShardTensor = shard.holding(function(shard.local, **(kwargs or {})))
            return held
        raise TypeError(
            f"{function}: a ShardTensor is a part of a tensor, to be saved or loaded; nothing is computed with it."
        )

    def views(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of the whole that are here: the offsets of each, and its elements as a view."""
        return [
            (box.offsets, self.local[box.start : box.start + math.prod(box.sizes)].view(box.sizes))
            for box in self._boxes
        ]

    # -- torch.distributed.checkpoint's protocol -----------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """One item for each box."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=TensorProperties.create_from_tensor(self.local), size=self.shape
                ),
            )
            for box in self._boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the chunks that this rank needs of a checkpoint."""
        return [_chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The box at an offset, as a view."""
        return next(view for offsets, view in self.views() if torch.Size(offsets) == index.offset)


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
