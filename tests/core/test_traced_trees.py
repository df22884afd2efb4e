"""What a compiled step does with trees, with every optree and every torch."""

from __future__ import annotations

from typing import Any

import optree
import optree.registry
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch.fx.experimental.proxy_tensor import make_fx

import everybit as eb
from everybit.base import older_torch
from everybit.testing import assert_same_bits

Keys = getattr(optree.registry, "DictMetaData", None)


@pytest.mark.exhaustive
def test_a_users_compiled_step_takes_trees_of_dicts_apart_in_eager_codes_order() -> None:
    optimizer = eb.with_policy(eb.adamw(1e-3), eb.policies.EXACT_BF16)
    params: dict[str, Any] = {
        "w": torch.linspace(-1, 1, 5).bfloat16(),
        "b": {"z": torch.ones(3).bfloat16(), "a": (torch.zeros(2).bfloat16(), None)},
    }
    state = optimizer.init(params)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, fullgraph=True, backend="eager")(params, params, state)
    assert_same_bits(compiled, optimizer.step(params, params, state), "trees of dicts")
    assert list(compiled[0]) == ["w", "b"]
    assert list(compiled[0]["b"]) == ["z", "a"]
    torch._dynamo.reset()


@pytest.mark.skipif(Keys is None, reason="optree before 0.20 has no class for a dict's keys")
def test_keys_of_dicts_are_equal_as_lists_are(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = Keys
    monkeypatch.setattr(one, "__eq__", older_torch._equal)
    for left, right, equal in ((["a", "b"], ["a", "b"], True), (["a", "b"], ["b", "a"], False), ([], [], True)):
        assert (one(left) == one(right)) is equal
        assert (one(left) == right) is equal
        assert (right == one(left)) is equal
        assert (one(left) != one(right)) is not equal
    assert one(["a"]) != ("a",)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_step_is_traced_by_make_fx_also_with_lengths_that_are_symbols(mode: Any) -> None:
    optimizer = eb.with_policy(eb.adamw(1e-2), "LEAN_BF16", seed=3)
    params, grads = {"w": torch.randn(33).bfloat16()}, {"w": torch.randn(33).bfloat16()}
    state = optimizer.init(params)
    traced = make_fx(lambda p, g, s: eb.tree.leaves(optimizer.step(p, g, s)), tracing_mode=mode)(params, grads, state)
    expected = eb.tree.leaves(optimizer.step(params, grads, state))
    assert all(map(torch.equal, traced(params, grads, state), expected))


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "LEAN_8BIT"])
def test_an_exported_step_has_eager_codes_bits_and_names_its_state(policy: eb.PolicyName) -> None:
    """Also where a mask left holes in the state. Lion has no root, which an exported graph leaves to the library of the machine."""
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    params = {"w": torch.linspace(-1, 1, 33).to(dtype), "b": torch.ones(2, dtype=dtype)}
    optimizer = eb.with_policy(eb.masked(eb.lion(1e-2), {"w": True, "b": False}), policy)
    state = optimizer.init(params)

    class Step(torch.nn.Module):
        def forward(self, params: Any, grads: Any, state: Any) -> Any:
            return optimizer.step(params, grads, state)

    exported = torch.export.export(Step(), (params, params, state))
    assert_same_bits(exported.module()(params, params, state), optimizer.step(params, params, state), "exported")
    assert [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(state)[0]] == eb.tree.paths(
        state
    )
