"""Attributes of tensors, and settings, without a public function in torch or without a fast one: memory, version, default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

count_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
"""The number of modes that are active, of which a default device is one; 1 in a torch without it."""

precision: Callable[[str, str], str] = getattr(
    torch._C,
    "_get_fp32_precision_getter",
    lambda library, operation: getattr(getattr(torch.backends, library), operation).fp32_precision,
)
"""The precision of a library's float32 operations. ``torch.backends`` says it, too, and takes six times as long."""

# These three have no fallback: what needs them could not be right without.


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as autograd counts."""
    return tensor._version


_bindings: Any = torch._C
_set_versions: Any = getattr(_bindings._autograd, "_unsafe_set_version_counter", None)


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
