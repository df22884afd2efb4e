"""The class that FSDP2 wants a reduce-scatter of one's own to be of. Importing this module imports FSDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
else:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    except ImportError:
        # It only says which methods there are; FSDP2 calls them, whatever their class.
        ReduceScatter = object

__all__ = ["ReduceScatter"]
