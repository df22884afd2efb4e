"""Frozen parameters cost nothing; unfrozen, they begin like new ones. Parameters never vanish silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import AdamW
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values


def freeze(model: Awkward, *names: str) -> None:
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def without_frozen(model: Awkward) -> Any:
    return lambda step, name: not model.get_parameter(name).requires_grad


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_frozen_parameter_has_no_state_and_stays(alone: bool) -> None:
    model = Awkward(torch.bfloat16)
    freeze(model, "matrix", "scalar")
    before = model.matrix.detach().clone()
    address = model.matrix.data_ptr()
    optimizer = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16)
    train(model, optimizer, 3, without=without_frozen(model))
    assert model.matrix not in optimizer.state
    assert torch.equal(model.matrix, before)
    assert model.matrix.data_ptr() == address
    assert set(optimizer.state_dict()["state"]) == {1, 3, 4}
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    table = optimizer.bytes_table()
    assert table["momentum"] == 2 * elements
    assert table["parameter"] == sum(p.nbytes for p in model.parameters())
    assert "2 frozen" in repr(optimizer)


@pytest.mark.parametrize("name", ["LEAN_BF16", "FLOOR_BF16"])
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_unfreezing_begins_like_a_parameter_whose_gradients_begin(name: str, alone: bool) -> None:
    """Bit for bit: random bits belong to the parameter, whether or not it was frozen before."""
    results = []
    for frozen in (True, False):
        model = Awkward(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-2, policy=eb.policies.PRESETS[name])
        if frozen:
            freeze(model, "vector", "matrix")
        train(model, optimizer, 3, without=lambda step, name: name in ("vector", "matrix"))
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        results.append(train(model, optimizer, 3, start=3))
    assert same_bits(*results)


def test_state_saved_for_a_parameter_that_is_frozen_now_is_kept() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 2)
    other = Awkward()
    freeze(other, "matrix")
    resumed = AdamW(other.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(resumed.state[other.matrix]["momentum"], optimizer.state[model.matrix]["momentum"])


def test_parameters_taken_out_or_replaced_after_the_first_step_are_an_error() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    params = optimizer.param_groups[0]["params"]
    replaced = nn.Parameter(params[1].detach().clone())
    params[1] = replaced
    give_gradients(model, 1)
    before = values(model)
    with pytest.raises(
        RuntimeError, match=r"param group 0: parameters \[1\] were taken out or replaced since the first step"
    ):
        optimizer.step()
    assert same_bits(before, values(model))


def test_parameters_swapped_before_the_first_step_are_the_ones_that_are_stepped() -> None:
    """As accelerate does on some devices."""
    model, reference = Awkward(), Awkward()
    optimizer = AdamW(model.parameters())
    for index, name in enumerate(["matrix", "vector", "scalar", "empty", "other"]):
        fresh = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model, name, fresh)
        optimizer.param_groups[0]["params"][index] = fresh
    assert same_bits(train(model, optimizer, 3), train(reference, AdamW(reference.parameters()), 3))


def moments(optimizer: AdamW, parameter: nn.Parameter) -> list[Any]:
    return [value.clone() for value in optimizer.state[parameter].values()]


@pytest.mark.parametrize("alone", [False, True], indirect=True)
@pytest.mark.parametrize("policy", ["LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16"])
def test_frozen_in_mid_run_keeps_weights_and_state_and_changes_no_bit_elsewhere(policy: Any, alone: bool) -> None:
    frozen, never = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
    arguments: dict[str, Any] = {"lr": 1e-2, "policy": policy}
    mine, other = AdamW(frozen.parameters(), **arguments), AdamW(never.parameters(), **arguments)
    train(frozen, mine, 3)
    train(never, other, 3)
    freeze(frozen, "matrix", "other")
    frozen.matrix.grad = frozen.other.grad = None
    matrix, other_one = frozen.matrix.detach().clone(), frozen.other.detach().clone()
    state = moments(mine, frozen.matrix)
    train(frozen, mine, 3, start=3, without=without_frozen(frozen))
    train(never, other, 3, start=3)
    assert torch.equal(frozen.matrix, matrix)
    assert torch.equal(frozen.other, other_one)
    assert same_bits(moments(mine, frozen.matrix), state)
    assert torch.equal(frozen.vector, never.vector)
    assert torch.equal(frozen.scalar, never.scalar)
    for parameter in frozen.parameters():
        parameter.requires_grad_(True)
    train(frozen, mine, 1, start=6)
    assert int(mine.state[frozen.matrix]["step"]) == 4
    assert int(mine.state[frozen.vector]["step"]) == 7


def test_a_gradient_of_zeros_that_is_left_over_does_not_move_what_is_frozen() -> None:
    """``requires_grad_(False)`` alone leaves it, and then all optimizers go on by momentum and decay; without it they do not."""
    moved = {}
    for who in ("ours", "torch's"):
        model = nn.Linear(3, 3)
        make: Any = AdamW if who == "ours" else torch.optim.AdamW
        optimizer = make(model.parameters())
        for how in ("trained", "requires_grad_", "no gradient"):
            before = model.bias.detach().clone()
            if how == "requires_grad_":
                model.bias.requires_grad_(False)
            elif how == "no gradient":
                model.bias.grad = None
            for _ in range(2):
                model(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            moved[who, how] = not torch.equal(model.bias, before)
    for who in ("ours", "torch's"):
        assert [moved[who, how] for how in ("trained", "requires_grad_", "no gradient")] == [True, True, False]
