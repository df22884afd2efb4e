"""What the four programs have in common: a small language model of bytes, and text to train it on (Python's own standard library)."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS, CONTEXT = 32, 4, 32


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend to what came before, and compute."""
        h = self.norm(x)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = x + self.attention(h, h, h, attn_mask=future, need_weights=False)[0]
        out: Tensor = x + self.mlp(x)
        return out


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        """The mean loss of predicting each byte of ``x``, of shape (sequences, CONTEXT + 1), from those before it."""
        h = self.bytes(x[:, :-1]) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.out(h).flatten(0, 1), x[:, 1:].flatten())


def text() -> Tensor:
    """The first files of the standard library, as numbers."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def sequences(data: Tensor, step: int, count: int) -> Tensor:
    """The ``count`` sequences of a step: the same wherever it is asked for."""
    starts = torch.randint(len(data) - CONTEXT, (count,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])
