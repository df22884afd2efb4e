"""The private classes that torch's own files name; a torch without one does not write it either. Importing this imports DCP."""

from __future__ import annotations

from typing import Any

import torch.serialization
from torch.distributed.checkpoint import filesystem


class _Missing:
    """Stands for a class that this torch does not have; it has no instances."""


StorageInfo: Any = getattr(filesystem, "_StorageInfo", _Missing)
"""DCP's class for the place of a piece in a file."""


def dcp_classes() -> dict[tuple[str, str], Any]:
    """Return the private classes in DCP's metadata, by module and name."""
    found = {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
        ("torch.serialization", "_get_layout"): getattr(torch.serialization, "_get_layout", _Missing),
    }
    return {key: value for key, value in found.items() if value is not _Missing}
