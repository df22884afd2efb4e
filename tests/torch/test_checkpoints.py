"""What a checkpoint and a copy hold, and which are refused; that a run goes on from them is the law of ``test_random_lives.py``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import everybit as eb
from everybit_torch import SGD, AdamW
from tests.support.small_models import Awkward, same_bits, train, values


def test_state_is_per_parameter_and_in_its_shape() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=eb.policies.KAHAN_BF16)
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        assert set(state[index]) == {"step", "param.residual", "momentum", "variance", "inner.step"}
        assert all(state[index][name].shape == parameter.shape for name in ("param.residual", "momentum", "variance"))
        assert int(state[index]["step"]) == 2


def test_hyperparameters_come_back() -> None:
    model = Awkward()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.param_groups[0]["lr"] = 0.25
    train(model, optimizer, 1)
    other = SGD(Awkward().parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            eb.policies.EXACT_BF16,
            r"parameter 0 has state .*'param.residual'.*; accepted under this policy is .*'param.remainder'",
        ),
        (eb.policies.FLOOR_BF16, r"parameter 0 has state .*'param.residual'.*; accepted under this policy is"),
        (eb.Policy(params=eb.Kahan()), r"parameter 0, 'momentum': got .*bfloat16.* accepted is .*float32"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused_and_changes_nothing(policy: eb.Policy, message: str) -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=eb.policies.KAHAN_BF16)
    train(model, optimizer, 2)
    other = Awkward(torch.bfloat16)
    target = AdamW(other.parameters(), policy=policy, lr=0.7)
    train(other, target, 1)
    before = values(other) + [x.clone() for state in target.state.values() for x in state.values()]
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(optimizer.state_dict())
    assert same_bits(before, values(other) + [x for state in target.state.values() for x in state.values()])
    assert target.param_groups[0]["lr"] == 0.7


def test_a_checkpoint_of_another_model_is_refused() -> None:
    optimizer = AdamW(Awkward().parameters())
    with pytest.raises(ValueError, match=r"state_dict: has no 'param_groups'; accepted is what state_dict\(\) returns"):
        optimizer.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match=r"got param groups of \[2\] parameters; accepted are \[5\]"):
        optimizer.load_state_dict(AdamW(torch.nn.Linear(2, 2).parameters()).state_dict())


def test_full_precision_weights_go_out_and_come_in() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-4, policy=eb.policies.EXACT_BF16)
    train(model, optimizer, 5)
    (weights,) = optimizer.export_fp32()
    assert all(
        w.dtype is torch.float32 and w.shape == p.shape for w, p in zip(weights, model.parameters(), strict=True)
    )
    assert any((w != p.float()).any() for w, p in zip(weights, model.parameters(), strict=True))
    other = Awkward(torch.bfloat16)
    fresh = AdamW(other.parameters(), lr=1e-4, policy=eb.policies.EXACT_BF16)
    fresh.import_fp32([weights])
    assert same_bits(fresh.export_fp32()[0], weights)
    assert same_bits(values(other), values(model))
    with pytest.raises(ValueError, match=r"weights: got \[1\] tensors"):
        fresh.import_fp32([weights[:1]])


@pytest.mark.slow
def test_what_is_compiled_is_not_pickled_and_is_compiled_again() -> None:
    model = Awkward()
    pair = (model, SGD(model.parameters(), lr=1e-3, momentum=0.9, compile=True))
    train(*pair, 3)
    other, twin = pickle.loads(pickle.dumps(pair))
    before = values(other)
    expected = train(*pair, 3, start=3)
    assert same_bits(before, values(other))
    assert same_bits(expected, train(other, twin, 3, start=3))


def test_a_copys_gradients_are_as_wide_as_the_originals() -> None:
    policy = eb.Policy(params=eb.Split(16), grads=eb.Grads(main="float32"))
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    other, twin = copy.deepcopy((model, AdamW(model.parameters(), policy=policy)))
    other(torch.ones(2, 3, dtype=torch.bfloat16)).float().sum().backward()
    twin.step()
    assert other.weight.grad is not None
    assert other.weight.grad.dtype is torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_an_optimizer_with_a_scheduler_is_copied(how: str) -> None:
    """A scheduler puts a ``step`` of its own into its optimizer, which pickle does not take."""
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 1)
    scheduler.step()
    together = (model, optimizer, scheduler)
    other, twin, again = copy.deepcopy(together) if how == "deepcopy" else pickle.loads(pickle.dumps(together))
    assert again.optimizer is twin
    for network, one, schedule in (together, (other, twin, again)):
        train(network, one, 1, start=1)
        schedule.step()
        train(network, one, 1, start=2)
    assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 2.5e-3
    assert same_bits(values(model), values(other))
