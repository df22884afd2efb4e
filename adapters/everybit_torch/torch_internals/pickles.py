"""What torch's own files name, by where it lies; a torch that has it no more does not write it either. Importing this imports DCP."""

from __future__ import annotations

from typing import Any

import torch.serialization
from torch.distributed.checkpoint import filesystem


class _Missing:
    """In place of a class that torch has no more; nothing is of it."""


StorageInfo: Any = getattr(filesystem, "_StorageInfo", _Missing)
"""Where DCP says that a piece lies."""


def dcp_classes() -> dict[tuple[str, str], Any]:
    """What DCP's metadata is made of beside what torch exports, by module and name."""
    found = {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
        ("torch.serialization", "_get_layout"): getattr(torch.serialization, "_get_layout", _Missing),
    }
    return {key: value for key, value in found.items() if value is not _Missing}
