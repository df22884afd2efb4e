"""``torch.distributed.checkpoint``'s state dicts of every named optimizer, nested and flattened: a run goes on bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import everybit as eb
import everybit_torch as et
from everybit.policies import PolicyName
from tests.support.small_models import give_gradients, same_bits, train, values

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore::FutureWarning")


def made(name: eb.OptimizerName, policy: PolicyName) -> tuple[nn.Sequential, et.TorchOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6, bias=False), nn.LayerNorm(6))
    model.to(torch.float32 if policy == "FP32" else torch.bfloat16)
    return model, et.create(name, model, policy=policy, compile=False)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", eb.optimizers())
@pytest.mark.sampled(3)
def test_every_named_optimizer_goes_on_from_the_state_that_dcp_gets_and_sets(
    name: eb.OptimizerName, flatten: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    policy: PolicyName = "FP32" if flatten else "LEAN_BF16"
    model, optimizer = made(name, policy)
    train(model, optimizer, 2)
    saved: Any = get_optimizer_state_dict(model, optimizer, options=options)
    other, resumed = made(name, policy)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for ours, theirs in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        assert {key: repr(x) for key, x in ours.items() if key != "params"} == {
            key: repr(x) for key, x in theirs.items() if key != "params"
        }
    assert same_bits(train(model, optimizer, 2, start=2), train(other, resumed, 2, start=2))


def test_one_tensor_as_the_rate_of_several_groups_is_one_after_a_load() -> None:
    """As of torch.optim, which copies all groups at once: a schedule that writes to it reaches all of them."""
    rate, model = torch.tensor(0.1), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    optimizer = et.AdamW(groups, lr=rate, policy="FP32", compile=False)
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert first is second
    assert first is not rate
    before = values(model)
    first.zero_()
    give_gradients(model, 1)
    optimizer.step()
    assert same_bits(before, values(model))


def trained_then_frozen(policy: PolicyName) -> tuple[nn.Sequential, et.TorchOptimizer]:
    model, optimizer = made("adamw", policy)
    train(model, optimizer, 3)
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("policy", ["EXACT_BF16", "LEAN_BF16", "FP32"])
def test_remainders_that_dcp_left_out_with_the_state_of_frozen_layers_are_named(
    policy: PolicyName, fresh: bool
) -> None:
    """torch leaves parameters out that need no gradient (pytorch #192202), and with them what a policy keeps of their weights."""
    model, optimizer = trained_then_frozen(policy)
    saved: Any = get_optimizer_state_dict(model, optimizer)
    other, resumed = made("adamw", policy) if fresh else trained_then_frozen(policy)
    other[0].requires_grad_(False)
    other.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        set_optimizer_state_dict(other, resumed, saved)
    messages = [str(one.message) for one in told if "remainder" in str(one.message)]
    assert len(messages) == (policy != "FP32")
    if messages:
        assert "0.weight" in messages[0]
        assert "0.bias" in messages[0]
        assert "1.weight" not in messages[0]
