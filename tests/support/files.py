"""Saving and loading."""

from __future__ import annotations

import io
from typing import Any

import torch


def through_a_file(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` as it comes back from a file, by ``torch.load`` with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
