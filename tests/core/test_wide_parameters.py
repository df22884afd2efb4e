"""The rule by which some parameters keep wider state: by shape and name of the whole parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import TorchOptimizer

SHAPES = {
    "model.embed_tokens.weight": (100, 64),
    "tok_embeddings.weight": (100, 64),
    "transformer.wte.weight": (100, 64),
    "lm_head.weight": (100, 64),
    "layers.0.q_proj.weight": (64, 64),
    "layers.0.q_proj.bias": (8192,),
    "layers.0.gate.weight": (63, 65),
    "reembedded.weight": (64, 64),
    "scalar": (),
}
WIDE = {name for name in SHAPES if name not in ("layers.0.q_proj.weight", "reembedded.weight")}


def test_vectors_small_parameters_and_embeddings_are_stored_wide() -> None:
    policy = eb.keep_wide("LEAN_8BIT")
    labels = {name: policy.labels(f"['{name}']", torch.empty(shape)) for name, shape in SHAPES.items()}
    assert {name for name, label in labels.items() if label == "wide"} == WIDE
    assert policy.policy_for("narrow") == eb.policies.LEAN_8BIT
    assert policy.policy_for("wide") == eb.policies.LEAN_BF16
    everything = eb.keep_wide("LEAN_8BIT", eb.policies.EXACT_BF16, smallest=0, names=())
    assert everything.labels("['wte.weight']", torch.empty(2, 2)) == "narrow"


def test_an_optimizer_stores_parameters_as_the_rule_says() -> None:
    named = [(name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))) for name, shape in SHAPES.items()]
    optimizer = TorchOptimizer(named, eb.adamw, lr=1e-3, policy=eb.keep_wide("LEAN_8BIT"))
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for (name, _), entries in zip(named, optimizer.state_dict()["state"].values(), strict=True):
        assert (entries["momentum"].dtype is torch.bfloat16) == (name in WIDE), name
        assert ("momentum.scale" in entries) == (name not in WIDE), name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("LEAN_8BITS",), ValueError, "policy: got 'LEAN_8BITS'"),
        (("LEAN_8BIT", "LEAN"), ValueError, "wide: got 'LEAN'"),
        (("LEAN_8BIT", 3), TypeError, "by_label: policies: got"),
    ],
)
def test_policies_that_are_none_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        eb.keep_wide(*arguments)


def test_other_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="smallest: got -1; accepted is a number of elements, at least 0"):
        eb.keep_wide("LEAN_8BIT", smallest=-1)
    with pytest.raises(TypeError, match="names: got 'embed'; accepted is a sequence"):
        eb.keep_wide("LEAN_8BIT", names="embed")
    with pytest.raises(ValueError, match=r"names: got '\('; accepted are regular expressions"):
        eb.keep_wide("LEAN_8BIT", names=["("])
