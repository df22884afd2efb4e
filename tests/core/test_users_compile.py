"""What users compile themselves: with dynamic shapes, and with the optimizer built inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everybit as eb
from everybit.testing import assert_same_bits


@pytest.mark.slow
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
@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if policy == own else pytest.mark.exhaustive)
        for name, own in (("adamw", "LEAN_BF16"), ("ademamix", ""), ("muon", "FP32"))
        for policy in ("FP32", "LEAN_BF16", "LEAN_8BIT")
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["adamw", pytest.param("ademamix", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_numbers_that_change_at_every_call_are_those_of_the_call(name: eb.OptimizerName) -> None:
    """From the second change on they are symbols to Dynamo; Inductor then keeps the second value in some operations and not in others."""

    def step(b1: float, b2: float, rate: float, params: Any, grads: Any, state: Any) -> Any:
        transform = getattr(eb, name)(rate, b1=b1, b2=b2, weight_decay=rate)
        return eb.with_policy(transform, eb.policies.FP32).step(params, grads, state)

    torch._dynamo.reset()
    params: Any = {"w": torch.linspace(-1, 1, 5)}
    compiled = torch.compile(step)
    eager = ours = (params, eb.with_policy(getattr(eb, name)(0.1), eb.policies.FP32).init(params))
    for call, numbers in enumerate([(0.9, 0.999, 0.1), (0.7, 0.99, 0.05), (0.5, 0.9, 0.02), (0.3, 0.8, 0.01)]):
        grads = {"w": torch.linspace(1, -1, 5) * (-1) ** call}
        with torch.no_grad():
            eager, ours = step(*numbers, eager[0], grads, eager[1]), compiled(*numbers, ours[0], grads, ours[1])
        assert_same_bits(ours, eager, f"call {call}")
    torch._dynamo.reset()


@pytest.mark.exhaustive
def test_equal_values_of_a_state_that_begins_in_compiled_code_have_their_own_memory() -> None:
    """The compiler computes equal expressions once: two sums that begin at zero were one tensor, given out twice."""
    optimizer = eb.with_policy(eb.schedule_free_adamw(1e-3), eb.policies.FP32)
    torch._dynamo.reset()
    state = torch.compile(optimizer.init, fullgraph=True)({"w": torch.zeros(3), "v": torch.zeros(3)})
    memory = [x.untyped_storage().data_ptr() for x in eb.tree.leaves(state)]
    assert len(set(memory)) == len(memory)
    torch._dynamo.reset()
