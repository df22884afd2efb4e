"""The attributes of a tensor that torch has no public function for: who holds its memory, and how often it was written to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)

foreach_copy: Any = getattr(torch, "_foreach_copy_", None)
"""Copies the tensors of one list over those of another, in one call."""

foreach_norm: Any = getattr(torch, "_foreach_norm", None)
"""The function that ``clip_grad_norm_`` calls; None in a torch without it, which then calls ``torch.linalg.vector_norm``."""

check_and_unscale: Any = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
"""The function that ``torch.amp.GradScaler.unscale_`` calls; None in a torch without it."""

# These three have no fallback: what needs them could not be right without.


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as autograd counts."""
    return tensor._version


_bindings: Any = torch._C
_set_versions: Any = getattr(_bindings._autograd, "_unsafe_set_version_counter", None)


def add_to_versions(tensors: Sequence[Tensor], number: int) -> None:
    """Change how often tensors were written to, as autograd counts, for their views too. Without torch's function nothing happens.

    What a graph has saved of them raises an error in its backward pass while they have another count.
    """
    if _set_versions is not None and tensors:
        _set_versions(tuple(tensors), tuple(tensor._version + number for tensor in tensors))


def plain_tensors() -> AbstractContextManager[None]:
    """Within it functions treat tensors of our own classes as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def wrapper(cls: type[T], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> T:
    """A tensor of class ``cls`` that has a shape and no memory."""
    made: T = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
    return made


def storage_identity(storage: torch.UntypedStorage) -> int:
    """The same number for two objects exactly if they are one storage, as long as both live. Without torch's: where the memory begins."""
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


_exchange: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)


@cache
def can_exchange_memory() -> bool:
    """Whether :func:`exchange_memory` works in this torch, which is tried out once: from 2.12 on. Else storages are resized."""
    if _exchange is None:
        return False
    full, empty = torch.arange(3.0), torch.empty(0)
    try:
        exchange_memory(full.untyped_storage(), empty.untyped_storage())
    except RuntimeError:
        return False
    sizes = full.untyped_storage().nbytes(), empty.untyped_storage().nbytes()
    return sizes == (0, 12) and empty.resize_(3).tolist() == [0.0, 1.0, 2.0]


def exchange_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Give two storages each other's memory, with all views of them. One of them has to be empty, or both have one size."""
    _exchange(one, other)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Dense tensors of one dtype as one, 1-d; without torch's function for it by ``torch.cat``."""
    bindings: Any = torch._C
    joined = getattr(bindings._nn, "flatten_dense_tensors", None)
    if joined is None:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat: Tensor = joined(list(tensors))
    return flat
