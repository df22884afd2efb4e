"""Process groups that steppers make for themselves: each has an order of collectives of its own, and is used again when it is free.

A group has threads and connections (with NCCL a communicator), so steppers that come and go must not leave one each. And none is destroyed
alone: torch names a group by its ranks and by how many groups there are, and finds the other ranks' addresses under that name, so that
a group that was made after another had been destroyed could be connected to what is not there any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(slots=True)
class _Made:
    world: dist.ProcessGroup
    kind: tuple[object, ...]
    group: dist.ProcessGroup
    idle: bool = False


_MADE: list[_Made] = []


def take(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """A group of these ranks that nobody else uses. Each of them has to call it.

    Args:
        ranks: As in the world.
        backend: Its backend, or several by device.
        timeout: Of its collectives; None: the backend's.
    """
    world, kind = dist.group.WORLD, (tuple(ranks), backend, timeout)
    assert world is not None
    _MADE[:] = [one for one in _MADE if one.world is world]  # groups end with the world that they are of
    for one in _MADE:
        if one.idle and one.kind == kind:
            one.idle = False
            return one.group
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    _MADE.append(_Made(world, kind, group))
    return group


def give_back(group: dist.ProcessGroup, *, usable: bool = True) -> None:
    """Nobody uses a group any more, on any of its ranks; ``usable`` unless one of its collectives failed."""
    for one in list(_MADE):
        if one.group is group:
            one.idle = usable
            if not usable:
                _MADE.remove(one)
