"""Finds parameters that share memory, with one another or with tensors that the optimizer does not know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sharing(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Pairs of tensors (by number, each tensor in one pair at least if it shares) that may share bytes.

    The range from a tensor's first byte to its last is what counts: two tensors that are interleaved without sharing an element count as
    sharing.
    """
    ranges: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel() and tensor.layout is torch.strided and tensor.device.type != "meta":
            start = tensor.data_ptr()
            ranges.setdefault(tensor.device, []).append((start, start + _extent(tensor), number))
    found = []
    for spans in ranges.values():
        spans.sort()
        end, last = -1, -1
        for start, stop, number in spans:
            if start < end:
                found.append((last, number))
            if stop > end:
                end, last = stop, number
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def has_repeated_elements(tensor: Tensor) -> bool:
    """Whether several of a tensor's elements are one place in memory, as ``expand`` makes them: it cannot be written to in place."""
    return tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor's storage has its elements; reading a storage that was freed (``resize_(0)``) ends the process."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.layout is not torch.strided:
        return True
    if tensor.device.type == "meta" or not tensor.numel():
        return True
    end = int(tensor.storage_offset()) * tensor.element_size() + _extent(tensor)
    return end <= tensor.untyped_storage().nbytes()
