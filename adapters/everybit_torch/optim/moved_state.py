"""State that lies in the host's memory between steps, for programs in which something else takes the device meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor

from everybit_torch import streams
from everybit_torch.optim.parameters import Parameters
from everybit_torch.segments import Segment, empty_on_host, require_streams


def move_to_host(own: Parameters) -> None:
    """Move the state of all parameters to the host, and free its memory on the device.

    Raises:
        ValueError: Parameters on a device without streams; all state is where it was.
    """
    state = [x for segment in _segments(own) for x in _of(segment)]
    for x in state:
        require_streams(x.device)
    moved = [(x, _on_host(x)) for x in state]
    for device in {x.device for x, _ in moved}:
        if streams.has_streams(device):
            torch.cuda.synchronize(device)
    for x, there in moved:
        x.data = there
    own.show(own.stepped)  # views of the memory that is freed


def move_back(own: Parameters) -> None:
    """Move the state of all parameters to their devices. Steps that are queued next come after the copies."""
    for segment in _segments(own):
        for x in _of(segment):
            x.data = x.data.to(segment.state.step.device, non_blocking=True, copy=True)
    own.show(own.stepped)


def _segments(own: Parameters) -> list[Segment]:
    """The segments whose state lies on the device: of parameters that are stepped here, and of those that this rank owns."""
    stepped = [one.of.segment for one in own.stepped]
    owned = [member.visitor.segment for member in own.visited()]
    return [one for one in [*stepped, *owned] if one is not None and one.host is None]


def _of(segment: Segment) -> list[Tensor]:
    return [x for _, x in segment.entries() if x.ndim]


def _on_host(x: Tensor) -> Tensor:
    return empty_on_host(x.shape, x.dtype, x.device).copy_(x, non_blocking=streams.has_streams(x.device))
