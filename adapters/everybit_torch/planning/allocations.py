"""Counts the memory that torch operations allocate, to the byte: on real tensors, or on meta tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from everybit.linalg import iterated, whitening
from everybit.linalg import operations as matrix_operations
from everybit_torch.torch_internals.tensors import storage_identity

INSIDE: Mapping[str, Callable[..., Any]] = {
    "everybit::orthogonalized": iterated,
    **matrix_operations.INSIDE,
    **whitening.INSIDE,
}
"""What everybit's own operators do, which allocate several times what they return."""


class AllocationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every storage that an operation makes is counted until it is freed.

    Memory that an operation of torch allocates for itself and frees before it returns is not seen; that of everybit's own is.

    Args:
        counts: Asked at each allocation whether it is to be counted; None: all are.
        smallest: Storages of fewer bytes are not counted.

    Attributes:
        live: Bytes of tensors that are not freed yet.
        peak: The most that ``live`` has been.
    """

    def __init__(self, counts: Callable[[], bool] | None = None, *, smallest: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._smallest = smallest
        self._counts = counts
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._sizes: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self.live: int = 0
        self.peak: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count its results."""
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        inside = INSIDE.get(function.name())
        if inside is None:
            outputs = function(*args, **(kwargs or {}))
        else:
            with self:
                outputs = inside(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                if storage not in self._known and not any(
                    storage_identity(storage) == storage_identity(one) for one in given
                ):
                    self._known.add(storage)
                    empty = not storage.nbytes()  # it may be given memory later
                    if (empty or storage.nbytes() >= self._smallest) and (self._counts is None or self._counts()):
                        self._change(self._size_of(storage), storage.nbytes())
        return outputs

    def resized(self, storage: UntypedStorage) -> None:
        """A storage has another size now: operations are seen, resizing is not."""
        if storage in self._sizes:
            nbytes = storage.nbytes()
            self._change(self._sizes[storage], nbytes if nbytes >= self._smallest else 0)

    def _size_of(self, storage: UntypedStorage) -> list[int]:
        """The counted bytes of a storage, which are changed to 0 when it is freed."""
        if storage not in self._sizes:
            self._known.add(storage)
            size = self._sizes[storage] = [0]
            weakref.finalize(storage, self._change, size, 0)
        return self._sizes[storage]

    def _change(self, size: list[int], nbytes: int) -> None:
        self.live += nbytes - size[0]
        self.peak = max(self.peak, self.live)
        size[0] = nbytes
