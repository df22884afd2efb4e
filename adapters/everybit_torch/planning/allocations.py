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

    Attributes:
        live: Bytes of tensors that are not freed yet.
        peak: The most that ``live`` has been.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.live = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count its results."""
        given = {storage_identity(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        inside = INSIDE.get(function.name())
        if inside is None:
            outputs = function(*args, **(kwargs or {}))
        else:
            with self:
                outputs = inside(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            storage = output.untyped_storage() if isinstance(output, Tensor) else None
            if storage is not None and storage not in self._known and storage_identity(storage) not in given:
                self._known.add(storage)
                self.allocated(storage)
        return outputs

    def allocated(self, storage: UntypedStorage) -> None:
        """Count a new storage until it is freed."""
        self.change(storage.nbytes())
        weakref.finalize(storage, self.change, -storage.nbytes())

    def change(self, nbytes: int) -> None:
        """Count more live bytes, or fewer."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)
