"""The bytes of tensors, to be written, summed up or compared: without numpy, which is no dependency."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host: a view, which is valid as long as the tensor is."""
    if not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(
            f"bytes_of: got a tensor on {x.device} with strides {x.stride()}; accepted are contiguous ones on the host."
        )
    size = x.numel() * x.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(x.data_ptr())).cast("B")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, whatever they stand for: NaN is like itself, and -0 is not 0."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    left, right = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(left, right)
