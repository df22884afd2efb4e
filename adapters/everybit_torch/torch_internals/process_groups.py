"""The attributes of a process group that torch has no public function for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> Any:
    """The store that the process group was initialized with. There is no public way to it, and no other that all ranks share."""
    return distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of collectives of tensors on a device; None if the backend, or torch, does not say."""
    find: Any = getattr(group, "_get_backend", None)
    options = None if find is None else getattr(find(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout
