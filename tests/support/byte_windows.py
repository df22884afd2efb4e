"""Windows of a file's bytes, as a data set for transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


class ByteWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """64 windows of 16 bytes of a file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.data = torch.tensor(list(Path(path).read_bytes()))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.data[16 * index : 16 * index + 16]
        return {"input_ids": window, "labels": window}
