"""The attributes of a process group that torch has no public function for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> Any:
    """The store that the process group was initialized with. There is no public way to it, and no other that all ranks share."""
    return distributed_c10d._get_default_store()


def new_group(ranks: Sequence[int], backend: str, timeout: timedelta | None, name: str) -> dist.ProcessGroup:
    """Make a process group of these ranks, each of which has to call it, and no other.

    Torch names such a group by its ranks and by how many groups the process has made. Ranks that have made different numbers of groups, as
    those of different stages of a model may, would wait for each other under different names. Without torch's function they still do.

    Args:
        ranks: The ranks, as numbered in the world.
        backend: Its backend, or several by device.
        timeout: The timeout of its collectives; None: the backend's.
        name: The same on these ranks, and no other group's.
    """
    former = getattr(distributed_c10d, "_process_group_name", None)
    if former is not None:
        distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)
    finally:
        if former is not None:
            distributed_c10d._process_group_name = former
    assert isinstance(group, dist.ProcessGroup)
    return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of collectives of tensors on a device; None if the backend, or torch, does not say."""
    find: Any = getattr(group, "_get_backend", None)
    options = None if find is None else getattr(find(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
