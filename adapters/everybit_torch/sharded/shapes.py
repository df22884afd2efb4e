"""Well-known language models as names and shapes: to plan for, without their code or their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from everybit.dtypes import FloatDType, torch_dtype


class LlamaBlock(nn.Module):
    """The parameters of a decoder layer with grouped-query attention and a gated feed-forward network; it computes nothing."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width, shared = shape.width, shape.width // shape.heads * shape.key_value_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A model of the Llama family (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, Table 3).

    Attributes:
        width: Of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        key_value_heads: Heads of keys and values.
        feed_forward: Inner width of the feed-forward network.
        vocabulary: Tokens.
        tied: Whether the logits share the embedding's weights.
    """

    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool = False

    def build(self, dtype: FloatDType = "bfloat16") -> nn.Module:
        """The model's parameters on the meta device; its blocks are :class:`LlamaBlock`."""
        with torch.device("meta"):
            model = nn.Module()
            model.embed_tokens = nn.Embedding(self.vocabulary, self.width)
            model.layers = nn.ModuleList(LlamaBlock(self) for _ in range(self.layers))
            model.norm = nn.RMSNorm(self.width)
            model.lm_head = nn.Linear(self.width, self.vocabulary, bias=False)
            if self.tied:
                model.lm_head.weight = model.embed_tokens.weight
        return model.to(torch_dtype(dtype))


SHAPES: Mapping[str, LlamaShape] = {
    "llama-3.2-1b": LlamaShape(2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-3-8b": LlamaShape(4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": LlamaShape(8192, 80, 64, 8, 28672, 128256),
    "llama-3-405b": LlamaShape(16384, 126, 128, 8, 53248, 128256),
}
