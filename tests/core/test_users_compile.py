"""What users compile themselves: with dynamic shapes, and with the optimizer built inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everybit as eb
from everybit.testing import assert_same_bits


def test_a_step_with_dynamic_shapes_gives_eager_codes_bits_for_every_size() -> None:
    """The compiler then traces seeds and places as symbols: of a large seed, and across 2**32 elements, every bit has to be right."""
    optimizer = eb.with_policy(eb.sgd(1e-3), eb.policies.LEAN_BF16, seed=2**40 + 3)
    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, fullgraph=True, dynamic=True)
    for size, first in ((5, 3), (300, 2**32 - 7)):
        params = {"w": torch.linspace(-1, 1, size).bfloat16()}
        state = optimizer.init(params)
        ctx = eb.Context(first_element=first)
        assert_same_bits(
            compiled(params, params, state, ctx), optimizer.step(params, params, state, ctx), f"{size} elements"
        )
    torch._dynamo.reset()


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo before torch 2.13 refuses a Context as a default of a method of what is built inside (docs/versions.md)",
)
def test_an_optimizer_may_be_built_inside_of_a_compiled_function() -> None:
    params = {"w": torch.linspace(-1, 1, 5)}
    state = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32).init(params)

    def step(params: Any, grads: Any, state: Any) -> Any:
        return eb.with_policy(eb.adamw(1e-3), eb.policies.FP32).step(params, grads, state)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)(params, params, state)
    assert_same_bits(compiled, step(params, params, state), "built inside")
    torch._dynamo.reset()


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="Dynamo before torch 2.13 refuses a Context as a default of a method of what is built inside (docs/versions.md)",
)
@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "LEAN_8BIT"])
@pytest.mark.parametrize("name", ["adamw", "ademamix", "muon"])
def test_a_state_may_begin_inside_of_a_compiled_function(name: eb.OptimizerName, policy: str) -> None:
    optimizer = eb.with_policy(getattr(eb, name)(1e-3), getattr(eb.policies, policy))
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    params = {"w": torch.linspace(-1, 1, 12).view(3, 4).to(dtype), "v": torch.linspace(0, 1, 4).to(dtype)}

    def begin(params: Any, grads: Any) -> Any:
        state = optimizer.init(params)
        return state, optimizer.step(params, grads, state)

    torch._dynamo.reset()
    compiled = torch.compile(begin, fullgraph=True)(params, params)
    assert_same_bits(compiled, begin(params, params), name)
    memory = [x.untyped_storage().data_ptr() for x in eb.tree.leaves([params, compiled[0]])]
    assert len(set(memory)) == len(memory)
    torch._dynamo.reset()
