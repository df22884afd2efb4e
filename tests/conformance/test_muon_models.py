"""Models of this year as Muon sees them: each weight is the matrices that its forward pass says, and no rule misses one.

The shapes of matrices are counted here from the configurations, as the models split and interleave their weights.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit.combinators import matrices_of, missed
from everybit_torch import FlatStepper, create, routing

transformers = pytest.importorskip("transformers")

Shapes = dict[str, list[tuple[int, ...]]]


def deepseek() -> tuple[nn.Module, eb.Matrices, Shapes]:
    """DeepSeek-V3: heads of parts without and with positions, latent projections beside positions, fused gates and experts in one."""
    c = transformers.DeepseekV3Config(
        hidden_size=48, intermediate_size=96, moe_intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=24, kv_lora_rank=16,
        qk_rope_head_dim=8, v_head_dim=12, qk_nope_head_dim=16, vocab_size=64, first_k_dense_replace=1,
    )  # fmt: skip
    heads, nope, rope, v = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    latent, query, hidden, moe, experts = (
        c.kv_lora_rank,
        c.q_lora_rank,
        c.hidden_size,
        c.moe_intermediate_size,
        c.n_routed_experts,
    )
    views = {
        r"q_b_proj": eb.heads(heads, rows=(nope, rope)),
        r"kv_b_proj": eb.heads(heads, rows=(nope, v)),
        r"kv_a_proj": eb.row_blocks(latent, rope),
        r"mlp\.experts\.gate_up_proj": eb.batched(eb.row_blocks(moe, moe)),
        r"mlp\.experts\.down_proj": eb.batched(),
    }
    return transformers.DeepseekV3ForCausalLM(c), eb.Matrices(views=views, others=r"mlp\.gate\."), {
        "q_a_proj.weight": [(query, hidden)],
        "q_b_proj.weight": [(heads, nope, query), (heads, rope, query)],
        "kv_a_proj_with_mqa.weight": [(latent, hidden), (rope, hidden)],
        "kv_b_proj.weight": [(heads, nope, latent), (heads, v, latent)],
        "o_proj.weight": [(hidden, heads * v)],
        "mlp.experts.gate_up_proj": [(experts, moe, hidden), (experts, moe, hidden)],
        "mlp.experts.down_proj": [(experts, hidden, moe)],
        "mlp.gate_proj.weight": [(c.intermediate_size, hidden)],
        "mlp.up_proj.weight": [(c.intermediate_size, hidden)],
        "mlp.down_proj.weight": [(hidden, c.intermediate_size)],
        "shared_experts.gate_proj.weight": [(moe, hidden)],
        "shared_experts.up_proj.weight": [(moe, hidden)],
        "shared_experts.down_proj.weight": [(hidden, moe)],
    }  # fmt: skip


def gpt_oss() -> tuple[nn.Module, eb.Matrices, Shapes]:
    """gpt-oss: weights of experts are (in, out), and gate and up projections take turns in their columns."""
    c = transformers.GptOssConfig(
        hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    heads, few, dim, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
    experts, inner = c.num_local_experts, c.intermediate_size
    views = {
        r"q_proj": eb.heads(heads),
        r"[kv]_proj": eb.heads(few),
        r"experts\.gate_up_proj$": eb.batched(eb.transposed(eb.interleaved(2))),
        r"experts\.down_proj$": eb.batched(eb.transposed()),
    }
    return transformers.GptOssForCausalLM(c), eb.Matrices(views=views, others=r"_bias$|router"), {
        "q_proj.weight": [(heads, dim, hidden)],
        "k_proj.weight": [(few, dim, hidden)],
        "v_proj.weight": [(few, dim, hidden)],
        "o_proj.weight": [(hidden, heads * dim)],
        "experts.gate_up_proj": [(experts, 2, inner, hidden)],
        "experts.down_proj": [(experts, hidden, inner)],
    }  # fmt: skip


@pytest.mark.parametrize("make", [deepseek, gpt_oss])
def test_every_matrix_is_as_its_forward_pass_says(make: Any) -> None:
    with torch.device("meta"):
        model, matrices, expected = make()
    tx: Any = eb.muon(0.02, matrices=matrices)
    params = dict(model.named_parameters())
    assert missed(tx, params) == []
    seen: set[str] = set()
    for name, parameter in params.items():
        label = tx.labels(name, parameter)
        end = next((end for end in sorted(expected, key=len, reverse=True) if name.endswith(end)), None)
        if end is None:
            assert label == "others", name
            assert parameter.ndim < 2 or any(word in name for word in ("embed", "lm_head", "gate.", "router", "bias"))
            continue
        seen.add(end)
        assert matrices_of(tx.transforms[label], name, parameter.shape) == expected[end], name
    assert seen == {*expected}
    assert "named by no rule" not in eb.routing(tx, params)


@pytest.mark.parametrize("make", [deepseek, gpt_oss])
def test_it_trains_so_and_without_views_large_weights_are_told(make: Any) -> None:
    torch.manual_seed(0)
    model, matrices, _ = make()
    optimizer = create("muon", model, lr=1e-2, matrices=matrices, compile=False)
    assert "named by no rule" not in routing(optimizer)
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    stepper = FlatStepper(make()[0], eb.muon(1e-2, matrices=matrices), strategy="no_shard")
    assert all(name in routing(stepper) for name in dict(model.named_parameters()))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = make()[0]
    experts = next(p for name, p in wide.named_parameters() if name.endswith("experts.down_proj"))
    assert experts.ndim == 3
    assert missed(eb.muon(0.02), {"layers.0.experts.down_proj": torch.empty(64, 64, 64, device="meta")})
