"""Attributes of tensors, and settings, without a public function in torch or without a fast one: memory, version, default device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
_count_modes: Any = getattr(_bindings, "_len_torch_function_stack", None)
_precision: Any = getattr(_bindings, "_get_fp32_precision_getter", None)


def has_default_device() -> bool:
    """Whether tensors are made on another device than the CPU by default.

    A default device is a mode. Without a mode there is none, which torch's own function says after four microseconds.
    """
    if _count_modes is not None and not _count_modes():
        return False
    return torch.get_default_device().type != "cpu"


def product_precision(library: str) -> str:
    """Return the precision of float32 products in ``mkldnn`` or ``cuda``; ``torch.backends`` says it after a microsecond."""
    if _precision is None:
        return str(getattr(torch.backends, library).matmul.fp32_precision)
    found: str = _precision(library, "matmul")
    return found


def plain_tensors() -> AbstractContextManager[None]:
    """Treat tensors of our own classes as plain tensors inside the context."""
    return torch._C.DisableTorchFunctionSubclass()


def wrapper(cls: type[T], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> T:
    """A tensor of class ``cls`` that has a shape and no memory."""
    made: T = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
    return made


def storage_identity(storage: torch.UntypedStorage) -> int:
    """The same number for two objects exactly if they are one storage, as long as both live. Without torch's: where the memory begins."""
    return int(getattr(storage, "_cdata", None) or storage.data_ptr())


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Dense tensors of one dtype as one, 1-d; without torch's function for it by ``torch.cat``."""
    bindings: Any = torch._C
    joined = getattr(bindings._nn, "flatten_dense_tensors", None)
    if joined is None:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat: Tensor = joined(list(tensors))
    return flat
