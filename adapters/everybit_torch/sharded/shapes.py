"""Well-known language models as names and shapes: to plan for, without their code or their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from everybit.base import DTYPES, FloatDType


def _add_attention(block: nn.Module, width: int, shared: int) -> None:
    """The projections of attention with grouped queries; ``shared`` is the width of all keys."""
    block.q_proj = nn.Linear(width, width, bias=False)
    block.k_proj = nn.Linear(width, shared, bias=False)
    block.v_proj = nn.Linear(width, shared, bias=False)
    block.o_proj = nn.Linear(width, width, bias=False)


def _decoder(
    vocabulary: int, width: int, blocks: Iterable[nn.Module], dtype: FloatDType, *, tied: bool = False
) -> nn.Module:
    """Return a model on the meta device, with all blocks on it too."""
    with torch.device("meta"):
        model = nn.Module()
        model.embed_tokens = nn.Embedding(vocabulary, width)
        model.layers = nn.ModuleList(blocks)
        model.norm = nn.RMSNorm(width)
        model.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            model.lm_head.weight = model.embed_tokens.weight
    return model.to(DTYPES[dtype])


class LlamaBlock(nn.Module):
    """The parameters of a decoder layer with grouped-query attention and a gated feed-forward network, without a forward pass."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width = shape.width
        _add_attention(self, width, width // shape.heads * shape.key_value_heads)
        self.gate_proj = nn.Linear(width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, width, bias=False)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A model of the Llama family (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, Table 3).

    Attributes:
        width: Width of the residual stream.
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
        blocks = (LlamaBlock(self) for _ in range(self.layers))
        return _decoder(self.vocabulary, self.width, blocks, dtype, tied=self.tied)


class MixtralBlock(nn.Module):
    """The parameters of a decoder layer with a mixture of experts, each with matrices of its own, without a forward pass."""

    def __init__(self, shape: MixtralShape) -> None:
        super().__init__()
        width = shape.width
        _add_attention(self, width, width // shape.heads * shape.key_value_heads)
        self.gate = nn.Linear(width, shape.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "w1": nn.Linear(width, shape.feed_forward, bias=False),
                    "w2": nn.Linear(shape.feed_forward, width, bias=False),
                    "w3": nn.Linear(width, shape.feed_forward, bias=False),
                }
            )
            for _ in range(shape.experts)
        )
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


@dataclass(frozen=True, slots=True)
class MixtralShape:
    """A model of the Mixtral family (Jiang et al. 2024, https://arxiv.org/abs/2401.04088).

    Attributes:
        width: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        key_value_heads: Heads of keys and values.
        feed_forward: Inner width of an expert.
        experts: Experts in each block.
        vocabulary: Tokens.
    """

    width: int
    layers: int
    heads: int
    key_value_heads: int
    feed_forward: int
    experts: int
    vocabulary: int

    def build(self, dtype: FloatDType = "bfloat16") -> nn.Module:
        """The model's parameters on the meta device; its blocks are :class:`MixtralBlock`."""
        return _decoder(self.vocabulary, self.width, (MixtralBlock(self) for _ in range(self.layers)), dtype)


class Experts(nn.Module):
    """The matrices of all experts of a block, in batches."""

    def __init__(self, count: int, width: int, feed_forward: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(count, feed_forward, width))
        self.up_proj = nn.Parameter(torch.empty(count, feed_forward, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, feed_forward))


class DeepSeekBlock(nn.Module):
    """The parameters of a decoder layer with latent attention, and a mixture of experts or a dense network, without a forward pass."""

    def __init__(self, shape: DeepSeekShape, *, dense: bool) -> None:
        super().__init__()
        width, heads = shape.width, shape.heads
        self.q_a_proj = nn.Linear(width, shape.query_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(shape.query_rank)
        self.q_b_proj = nn.Linear(shape.query_rank, heads * (shape.head + shape.rotated), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, shape.key_value_rank + shape.rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(shape.key_value_rank)
        self.kv_b_proj = nn.Linear(shape.key_value_rank, heads * 2 * shape.head, bias=False)
        self.o_proj = nn.Linear(heads * shape.head, width, bias=False)
        inner = shape.dense if dense else shape.feed_forward * shape.shared_experts
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        if not dense:
            self.gate = nn.Linear(width, shape.experts, bias=False)
            self.experts = Experts(shape.experts, width, shape.feed_forward)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


@dataclass(frozen=True, slots=True)
class DeepSeekShape:
    """A model like DeepSeek-V2 (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434), with the experts of a block in three tensors.

    Attributes:
        width: Width of the residual stream.
        layers: Number of blocks, the first of which is dense.
        heads: Attention heads.
        head: Width of a head, without the part that is rotated.
        rotated: Width of the part that is.
        query_rank: Width of the compressed queries.
        key_value_rank: Width of the compressed keys and values.
        dense: Inner width of the dense network.
        feed_forward: Inner width of an expert.
        experts: Experts in each block, some of which receive a token.
        shared_experts: Experts that receive every token.
        vocabulary: Tokens.
    """

    width: int
    layers: int
    heads: int
    head: int
    rotated: int
    query_rank: int
    key_value_rank: int
    dense: int
    feed_forward: int
    experts: int
    shared_experts: int
    vocabulary: int

    def build(self, dtype: FloatDType = "bfloat16") -> nn.Module:
        """The model's parameters on the meta device; its blocks are :class:`DeepSeekBlock`."""
        blocks = (DeepSeekBlock(self, dense=not number) for number in range(self.layers))
        return _decoder(self.vocabulary, self.width, blocks, dtype)


BLOCKS: tuple[type[nn.Module], ...] = (LlamaBlock, MixtralBlock, DeepSeekBlock)
"""The classes of the blocks of these models."""

SHAPES: Mapping[str, LlamaShape | MixtralShape | DeepSeekShape] = {
    "llama-3.2-1b": LlamaShape(2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-3-8b": LlamaShape(4096, 32, 32, 8, 14336, 128256),
    "llama-3-70b": LlamaShape(8192, 80, 64, 8, 28672, 128256),
    "llama-3-405b": LlamaShape(16384, 126, 128, 8, 53248, 128256),
    "mixtral-8x22b": MixtralShape(6144, 56, 48, 8, 16384, 8, 32768),
    "deepseek-v2": DeepSeekShape(5120, 60, 128, 128, 64, 1536, 512, 12288, 1536, 160, 2, 102400),
}
