"""State that lies in the host's memory between steps, for programs in which something else takes the device meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from everybit_torch import streams
from everybit_torch.optim.parameters import Parameters
from everybit_torch.segments import HostState
from everybit_torch.torch_internals.dtensors import is_dtensor


def move_to_host(own: Parameters) -> None:
    """Move the state of all parameters to the host, and free its memory on the device.

    Raises:
        ValueError: Parameters on a device without streams, or DTensors; all state is where it was.
    """
    for one in own.stepped:
        HostState(one.of.segment.tensor.device)  # which refuses devices without streams
        if one.of.is_sharded:
            raise ValueError("offload: got state of DTensors; accepted is that of whole parameters.")
    if own.visiting or any(map(is_dtensor, own.waiting())):
        raise ValueError("offload: got state of DTensors; accepted is that of whole parameters.")
    moved = [(x, _on_host(x)) for x in _state(own)]
    for device in {x.device for x, _ in moved}:
        if streams.has_streams(device):
            torch.cuda.synchronize(device)
    for x, there in moved:
        x.data = there
    own.show(own.stepped)  # views of the memory that is freed


def move_back(own: Parameters) -> None:
    """Move the state of all parameters to their devices. Steps that are queued next come after the copies."""
    for one in own.stepped:
        for x in _of(one.of.segment.entries()):
            x.data = x.data.to(one.of.segment.tensor.device, non_blocking=True, copy=True)
    own.show(own.stepped)


def _state(own: Parameters) -> Iterator[Tensor]:
    for one in own.stepped:
        if one.of.segment.host is None:
            yield from _of(one.of.segment.entries())


def _of(entries: Sequence[tuple[object, Tensor]]) -> list[Tensor]:
    return [x for _, x in entries if x.ndim]


def _on_host(x: Tensor) -> Tensor:
    pinned = streams.has_streams(x.device)
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned).copy_(x, non_blocking=pinned)
