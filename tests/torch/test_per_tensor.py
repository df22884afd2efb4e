"""Transforms that ask for numbers of each whole parameter stay flat: trust ratios, clipping by a root mean square, centred gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.segments import segment, totals
from tests.support.small_models import Awkward, Whole, give_gradients, same_bits, train, values
from tests.support.transforms import EXAMPLES, averaged, lamb, noisy

LEAN, KAHAN, FP32 = eb.policies.LEAN_BF16, eb.policies.KAHAN_BF16, eb.policies.FP32


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a compiler go through vectors 16 elements at a time, as they go through long ones."""
    monkeypatch.setattr(segment, "PIECE", 16)
    monkeypatch.setattr(totals, "PIECE", 16)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("policy", [LEAN, FP32], ids=["LEAN", "FP32"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bits_are_those_of_the_whole_tree(name: str, policy: eb.Policy) -> None:
    dtype = torch.float32 if policy is FP32 else torch.bfloat16
    model, stepped = Awkward(dtype), Awkward(dtype)
    whole = Whole(EXAMPLES[name], model, policy)
    optimizer = TorchOptimizer(stepped.parameters(), EXAMPLES[name], lr=1e-2, policy=policy, seed=3)
    for step in range(4):
        give_gradients(model, 1000 + step)
        expected = whole.step(model)
        assert same_bits(train(stepped, optimizer, 1, start=step), expected)


@pytest.mark.exhaustive  # tests/torch/test_direct_calls.py and tests/core/test_context.py have one case each
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_compiled_steps_give_the_bits_of_uncompiled_ones(name: str, alone: bool) -> None:
    """With parameters without a gradient."""
    found = []
    for compile in (False, True):
        model = Awkward(torch.bfloat16)
        optimizer = TorchOptimizer(model.parameters(), EXAMPLES[name], lr=1e-2, policy=LEAN, compile=compile)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            train(model, optimizer, 1, start=step, without=lambda step, name: step == 2 and name == "vector")
        found.append(values(model))
    assert same_bits(*found)


@pytest.mark.parametrize("alone", [False, True], indirect=True)
def test_a_run_that_is_resumed_goes_on_as_it_would_have(alone: bool) -> None:
    for factory in EXAMPLES.values():
        model, other = Awkward(torch.bfloat16), Awkward(torch.bfloat16)
        optimizer = TorchOptimizer(model.parameters(), factory, lr=1e-2, policy=LEAN)
        train(model, optimizer, 3)
        again = TorchOptimizer(other.parameters(), factory, lr=1e-2, policy=LEAN)
        other.load_state_dict(model.state_dict())
        again.load_state_dict(optimizer.state_dict())
        expected = train(model, optimizer, 2, start=3)
        assert same_bits(train(other, again, 2, start=3), expected)


def test_groups_that_are_added_and_copies_have_numbers_of_their_own_parameters() -> None:
    """A parameter's number is its place in the optimizer, which changes when there are more."""

    def build() -> tuple[Awkward, TorchOptimizer]:
        model = Awkward()
        first, *rest = model.parameters()
        optimizer = TorchOptimizer([first], lamb, lr=1e-2)
        train(model, optimizer, 1)
        optimizer.add_param_group({"params": rest})
        return model, optimizer

    model, optimizer = build()
    whole = Awkward()
    reference = TorchOptimizer(whole.parameters(), lamb, lr=1e-2)
    train(whole, reference, 1, without=lambda step, name: name != "matrix")
    assert same_bits(train(model, optimizer, 2, start=1), train(whole, reference, 2, start=1))
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert same_bits(train(copied_model, copied, 2, start=3), train(model, optimizer, 2, start=3))


def test_weights_for_evaluation_are_those_of_the_core() -> None:
    model = Awkward(torch.bfloat16)
    whole = Whole(averaged, model, LEAN)
    optimizer = TorchOptimizer(model.parameters(), averaged, lr=1e-2, policy=LEAN, seed=3)
    for step in range(3):
        give_gradients(model, step)
        whole.step(model)
        optimizer.step()
    (got,) = optimizer.eval_params()
    assert same_bits(got, list(whole.optimizer.eval_params(whole.weights, whole.state).values()))
    assert not same_bits(got, optimizer.export_fp32()[0])


def test_noise_goes_by_an_elements_place_in_the_model() -> None:
    """A frozen parameter in between, which has no unit and keeps its numbers."""
    model, other = Awkward(), Awkward()
    model.vector.requires_grad_(False)
    optimizer = TorchOptimizer(model.parameters(), noisy, lr=1e-2)
    reference = TorchOptimizer(other.parameters(), noisy, lr=1e-2)
    for step in range(3):
        for one, stepping_it in ((model, optimizer), (other, reference)):
            give_gradients(one, step, without=lambda name: name == "vector")
            stepping_it.step()
    assert same_bits(values(model), values(other))


def test_numbers_of_each_parameter_cannot_be_requested_of_parameters_that_are_stepped_together() -> None:
    def trusting(learning_rate: eb.Hyperparameter, trust: bool = False) -> eb.Transform[Any]:
        ratio = [eb.scale_by_trust_ratio()] if trust else []
        return eb.chain(eb.scale_by_adam(), *ratio, eb.scale_by_learning_rate(learning_rate))

    model = Awkward(torch.float32)
    optimizer = TorchOptimizer(model.parameters(), trusting, lr=1e-2, trust=False)
    before = train(model, optimizer, 2)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["trust"] = True
    said = "its transform would request numbers of each parameter, and its parameters were placed at the first step"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["trust"] = True
    with pytest.raises(ValueError, match=said):
        train(model, optimizer, 1)
    assert same_bits(values(model), before)
