"""A pure optimizer's state goes to a file and back by name, bit for bit, or is refused with what differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import everybit as eb
from everybit import testing
from tests.support.files import through_a_file


def run(optimizer: Any, params: Any, state: Any, first: int, last: int) -> Any:
    for step in range(first, last):
        params, state = optimizer.step(params, testing.example_grads(params, step), state)
    return params, state


@pytest.mark.parametrize("name", ["adamw", "partition", "masked", "accumulate", "apply if finite", "named chain"])
@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "TIGHT_BF16"])
def test_a_saved_state_continues_bit_for_bit(name: str, policy: str) -> None:
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    optimizer = eb.with_policy(testing.REGISTRY[name](0.05), eb.policies.PRESETS[policy], seed=3)
    params = testing.example_params(dtype)
    params, state = run(optimizer, params, optimizer.init(params), 1, 4)
    saved = eb.state_dict(state)
    assert len(set(saved)) == len(eb.tree.leaves(state))
    fresh = testing.example_params(dtype, seed=1)
    loaded = eb.load_state_dict(optimizer.init(fresh), through_a_file(saved))
    testing.assert_same_bits(loaded, state, "loaded")
    weights = eb.load_state_dict(fresh, through_a_file(eb.state_dict(params)))
    testing.assert_same_bits(run(optimizer, weights, loaded, 4, 7), run(optimizer, params, state, 4, 7), "continued")


def test_what_is_loaded_shares_no_memory_with_what_was_saved() -> None:
    optimizer = eb.with_policy(eb.adamw(), eb.policies.FP32)
    params = torch.ones(3)
    state = optimizer.init(params)
    loaded = eb.load_state_dict(state, eb.state_dict(state))
    owners = [x.untyped_storage().data_ptr() for x in eb.tree.leaves((state, loaded))]
    assert len(set(owners)) == len(owners)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    optimizer = eb.with_policy(eb.adamw(), eb.policies.LEAN_BF16)
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    state = optimizer.init(params)
    before = copy.deepcopy(eb.state_dict(state))
    saved = eb.state_dict(state)
    momentum = "inner.states[0].momentum['w']"
    assert momentum in saved
    other = eb.state_dict(eb.with_policy(eb.adamw(), eb.policies.KAHAN_BF16).init(params))
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({k: v for k, v in saved.items() if k != momentum}, ValueError, r"\"inner.*momentum.*\" is missing"),
        (saved | {"more": torch.ones(())}, ValueError, "'more' is not in the state"),
        (saved | {momentum: saved[momentum].float()}, ValueError, r"got torch.float32 of shape \(3,\); accepted is torch.bfloat16"),
        (saved | {momentum: saved[momentum][:2]}, ValueError, r"of shape \(2,\); accepted is torch.bfloat16 of shape \(3,\)"),
        (saved | {momentum: 3}, TypeError, r"got a int; accepted are dense tensors"),
        (saved | {momentum: torch.empty(3, dtype=torch.bfloat16, device="meta")}, TypeError, r"on meta; accepted are dense tensors"),
        (saved | {momentum: saved[momentum].to_sparse()}, TypeError, r"torch.sparse_coo tensor on cpu; accepted are dense"),
        (list(saved), TypeError, r"saved: got a list; accepted is a dict"),
        (other, ValueError, r"extra.*bfloat16.*accepted is torch.int16"),
    ]  # fmt: skip
    for given, kind, message in wrong:
        with pytest.raises(kind, match=message):
            eb.load_state_dict(state, given)
    testing.assert_same_bits(eb.state_dict(state), before, "after refusals")
