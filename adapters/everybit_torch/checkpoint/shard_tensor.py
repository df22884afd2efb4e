"""A range of a tensor's elements, as distributed checkpoints understand it: a few boxes of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everybit_torch.checkpoint.boxes import Box, boxes
from everybit_torch.torch_internals.dtensors import local, offset_of_local_part
from everybit_torch.torch_internals.tensors import wrapper

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
