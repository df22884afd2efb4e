"""A model in a checkpoint of ``torch.distributed.checkpoint``, read a range of elements at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from everybit_torch.sharded.checked_storage import read_piece
from everybit_torch.sharded.construction.reading import Entry, Request, common, require_same, within
from everybit_torch.sharded.save_folders import latest_checkpoint, read_inventory_of

PREFIX = "model."
"""Before the model's names in checkpoints that hold something beside it."""


class CheckpointFiles:
    """The model's tensors in a checkpoint.

    Whole pieces are read, however little of one is needed, so that their checksums can be compared; a piece is what one rank wrote of a
    tensor.

    Args:
        path: The checkpoint, or the directory of a run's.
        prefix: Of the model's names; None: :data:`PREFIX` if one of ``first`` is there with it.
        first: The names of the model's first tensor.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged; the message names the file.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str | None, first: Sequence[str]) -> None:
        place = latest_checkpoint(path)
        self.where = str(place)
        self._inventory = read_inventory_of(Path(place))
        if prefix is None:
            prefix = PREFIX if any(PREFIX + name in self._inventory.tensors for name in first) else ""
        self._prefix = prefix
        self.others = frozenset(
            name.removeprefix(prefix) for name in self._inventory.others if prefix and name.startswith(prefix)
        )

    @property
    def is_checked(self) -> bool:
        """Whether its pieces have checksums."""
        return self._inventory.checked

    @property
    def table(self) -> Mapping[str, Entry]:
        """All tensors of the model, by the model's names."""
        return {
            name.removeprefix(self._prefix): Entry(tensor.dtype, tensor.shape)
            for name, tensor in self._inventory.tensors.items()
            if name.startswith(self._prefix)
        }

    def deliver(self, requests: Sequence[Request]) -> None:
        """Read what is asked for."""
        known = self.table.keys()
        for request in requests:
            if request.low == request.high:
                continue
            first, *others = [name for name in request.names if name in known]
            self._read(first, request)
            for name in others:
                # Through memory of the first's dtype, which is the other's.
                one, other = (self._own_dtype(name, request) for name in (first, name))
                require_same(one, other, (first, name), self.where)

    def _own_dtype(self, name: str, request: Request) -> Tensor:
        dtype = self._inventory.tensors[self._prefix + name].dtype
        found = request.into.new_empty(request.high - request.low, dtype=dtype, device="cpu")
        self._read(name, Request(request.names, request.low, request.high, found, request.part))
        return found

    def _read(self, name: str, request: Request) -> None:
        saved = self._inventory.tensors[self._prefix + name]
        wanted = request.boxes(saved.shape)
        for piece in saved.pieces:
            shared = [(box, both) for box in wanted if (both := common(box, piece.offsets, piece.sizes)) is not None]
            if not shared:
                continue
            values = read_piece(self._inventory, self._prefix + name, piece)
            for box, both in shared:
                target = request.into[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
                within(target, box.offsets, both).copy_(within(values, piece.offsets, both))
            del values
