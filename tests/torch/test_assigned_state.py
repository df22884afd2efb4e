"""``optimizer.state`` as other programs write it: assigned before the first step, and moved away and back between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
import everybit_torch as et
from everybit.policies import PolicyName
from tests.support.small_models import give_gradients, same_bits, train, values


def made(policy: PolicyName, name: eb.OptimizerName = "adamw") -> tuple[nn.Sequential, et.TorchOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    model.to(torch.float32 if policy == "FP32" else torch.bfloat16)
    return model, et.create(name, model, policy=policy, compile=False)


def pairs(a: nn.Module, b: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "adafactor", "schedule_free_adamw"])
@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "KAHAN_BF16", "LEAN_8BIT"])
@pytest.mark.sampled(2)
def test_state_that_is_assigned_before_the_first_step_is_taken_over(name: eb.OptimizerName, policy: PolicyName) -> None:
    """As torch's ``ZeroRedundancyOptimizer`` loads, for some of the parameters; the others begin."""
    model, optimizer = made(policy, name)
    train(model, optimizer, 3)
    other, resumed = made(policy, name)
    other.load_state_dict(model.state_dict())
    for p, q in pairs(model, other)[1:]:
        resumed.state[q] = {key: x.clone() for key, x in optimizer.state[p].items()} | {"of others": 7}
    expected, found = train(model, optimizer, 2, start=3), train(other, resumed, 2, start=3)
    assert same_bits(expected[1:], found[1:])
    assert all(resumed.state[q]["of others"] == 7 for _, q in pairs(model, other)[1:])
    assert [int(resumed.state[q]["step"]) for q in other.parameters()] == [2, 5, 5, 5]


def test_torchs_names_are_taken_over_and_forgotten() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    theirs: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, theirs, 3)
    other.load_state_dict(model.state_dict())
    ours = et.AdamW(other.parameters(), lr=0.1, policy="FP32", compile=False)
    for p, q in pairs(model, other):
        ours.state[q] = {key: x.clone() for key, x in theirs.state[p].items()}
    for x, y in zip(train(model, theirs, 3, start=3), train(other, ours, 3, start=3), strict=True):
        torch.testing.assert_close(y, x)
    assert all({*ours.state[q]} == {"step", "momentum", "variance", "inner.step"} for q in other.parameters())
    for p, q in pairs(model, other):
        torch.testing.assert_close(ours.state[q]["exp_avg"], theirs.state[p]["exp_avg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("variance"), r"has .*'momentum'.*; accepted are none of them, or all: "),
        (
            lambda state: state.update(momentum=state["momentum"][:1]),
            r"'momentum': got .*accepted is torch.float32 of shape \(4, 6\)",
        ),
        (lambda state: state.update(variance=state["variance"].double()), r"'variance': got .*torch.float64"),
        (lambda state: state.update(step=-1), r"'step': got -1; accepted is a count of steps"),
    ],
)
def test_assigned_state_that_does_not_fit_is_refused_before_anything_is_changed(change: Any, message: str) -> None:
    model, optimizer = made("FP32")
    train(model, optimizer, 2)
    other, resumed = made("FP32")
    state = {key: x.clone() for key, x in optimizer.state[next(model.parameters())].items()}
    change(state)
    resumed.state[next(other.parameters())] = state
    give_gradients(other, 0)
    before = values(other)
    with pytest.raises(ValueError, match=message):
        resumed.step()
    assert same_bits(before, values(other))
    assert not resumed.own.stepped


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "LEAN_8BIT"])
@pytest.mark.parametrize("change", [False, True])
def test_state_that_is_freed_and_given_back_through_data_goes_on(policy: PolicyName, change: bool) -> None:
    """As ms-swift offloads it. Other values that are given back count, as with torch.optim."""
    (model, optimizer), (other, moved) = made(policy), made(policy)
    for step in range(3):
        assert same_bits(train(model, optimizer, 1, start=step), train(other, moved, 1, start=step))
        saved: dict[Any, Tensor] = {}
        for p, entries in moved.state.items():
            for key, value in entries.items():
                saved[p, key] = value.data.clone()
                value.data = torch.empty(0, dtype=value.dtype)
        for p, entries in moved.state.items():
            for key, value in entries.items():
                value.data = saved[p, key]
        if change:
            for p, q in pairs(model, other):
                for key in [key for key in ("momentum", "variance") if key in optimizer.state[p]]:
                    optimizer.state[p][key].zero_()
                    moved.state[q][key].zero_()


def test_state_that_was_not_given_back_is_refused_by_name() -> None:
    model, optimizer = made("FP32")
    train(model, optimizer, 1)
    for entries in optimizer.state.values():
        for value in entries.values():
            value.data = torch.empty(0, dtype=value.dtype)
    before = values(model)
    give_gradients(model, 1)
    with pytest.raises(RuntimeError, match=r"its state 'step' was given other memory .*got \(0,\).*accepted is \(\)"):
        optimizer.step()
    assert same_bits(before, values(model))
