"""A byte-level transformer: pre-norm, rotary positions, causal attention; the ordinary thing, small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary
WITHOUT_BFLOAT16 = ("DEFAULT", "AVX2")  # of torch.backends.cpu.get_cpu_capability()

ModelName = Literal["tiny", "mini", "small", "medium", "large"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Width of the residual stream, number of blocks, number of attention heads."""

    width: int
    layers: int
    heads: int


SIZES: dict[ModelName, ModelSize] = {
    "tiny": ModelSize(width=32, layers=1, heads=2),
    "mini": ModelSize(width=128, layers=2, heads=4),
    "small": ModelSize(width=256, layers=4, heads=4),
    "medium": ModelSize(width=512, layers=8, heads=8),
    "large": ModelSize(width=768, layers=12, heads=12),  # the blocks of OPT-125m and GPT-2
}


class Linear(nn.Linear):
    """A linear layer without bias: 16-bit numbers are multiplied in float32, and the result is rounded once.

    That is what instructions for bfloat16 do. On a CPU without them torch's own product of 16-bit matrices is twenty times slower.
    """

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """(..., width) to (..., out), in the dtype of ``input``."""
        if input.is_cpu and input.dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() in WITHOUT_BFLOAT16:
            return functional.linear(input.float(), self.weight.float()).to(input.dtype)
        return functional.linear(input, self.weight)


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out. Weights are drawn in float32 from torch's global generator."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_width = size.width // size.heads
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.logits = Linear(size.width, BYTES)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # GPT-2's: what adds to the residual stream is smaller, so that the stream does not grow with depth.
                deep = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if deep else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, (batch, context, 256) in the model's dtype, of what follows each of ``tokens``, int64 (batch, context)."""
        x = self.embedding(tokens)
        rotation = rotary(tokens.shape[1], self.head_width, tokens.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.logits(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a perceptron of four times the width; each reads a normed copy and adds to the stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.attention = Attention(size)
        self.perceptron_norm = nn.LayerNorm(size.width, bias=False)
        self.up = Linear(size.width, 4 * size.width)
        self.down = Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        x = x + self.attention(self.attention_norm(x), rotation)
        added: Tensor = self.down(functional.gelu(self.up(self.perceptron_norm(x))))
        return x + added


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = Linear(size.width, 3 * size.width)
        self.out = Linear(size.width, size.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(batch, context, width) to the same."""
        batch, context, width = x.shape
        projected: Tensor = self.query_key_value(x)
        split = projected.view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotation), rotate(key, rotation), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return out


def rotary(context: int, head_width: int, device: torch.device) -> Tensor:
    """Cosines and sines of the angles by which positions turn pairs of channels: float32, (2, context, head_width / 2).

    Su et al. 2021, https://arxiv.org/abs/2104.09864. Always float32, and so not a buffer, which would be cast with the model: bfloat16
    cannot tell position 256 from 257.
    """
    rates = 10000.0 ** (-torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(context, device=device, dtype=torch.float32)[:, None] * rates
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (channel i, channel i + half) of ``x``, (..., context, head_width), by its position's angle."""
    cos, sin = rotation
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


def loss_of(model: Transformer, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each window's bytes given those before, in nats per byte: 0-d, float32 whatever the model is in."""
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
