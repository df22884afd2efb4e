"""This rank's boxes of a tensor, as ``torch.distributed.checkpoint`` writes and reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everybit_torch.checkpoint.boxes import Box
from everybit_torch.torch_internals.tensors import wrapper

# A program that saves or loads has imported these. They take longer than torch.distributed, and a stepper need not wait for them.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class ShardTensor(torch.Tensor):
    """Some boxes of a tensor, with the shape and dtype of the whole.

    ``torch.distributed.checkpoint`` saves and loads it, in any other cut too. No communication is needed: the cut follows from the
    layout. It cannot be computed with.

    Attributes:
        local: The elements that are here, 1-d.
    """

    local: Tensor
    _boxes: Sequence[Box]

    @staticmethod
    def __new__(cls: type[ShardTensor], local: Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> ShardTensor:
        """Wrap ``local``, 1-d: the elements of some boxes of a tensor of this ``shape``. Loading writes into it."""
        whole: ShardTensor = wrapper(cls, shape, dtype=local.dtype, device=local.device)
        whole.local, whole._boxes = local, boxes
        return whole

    def holding(self, local: Tensor) -> ShardTensor:
        """The same elements of the tensor, with these values."""
        return ShardTensor(local, self.shape, self._boxes)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardTensor({tuple(self.shape)}, {self.dtype}, {self.local.numel()} elements here)"

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
        box = next(box for box in self._boxes if torch.Size(box.offsets) == index.offset)
        return self.local[box.start : box.start + math.prod(box.sizes)].view(box.sizes)


def _chunk(box: Box) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
