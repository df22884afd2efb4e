"""A hyperparameter that changes what a transform is made of, where ranks hold rows of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import TorchOptimizer
from tests.support.exact_models import mesh_of, weights_of
from tests.support.ranks import run
from tests.support.rows import cut, train
from tests.support.transforms import AddNoise
from tests.support.weights import Weights, equal


def lamb(learning_rate: eb.Hyperparameter, maximize: bool = False) -> eb.Transform[Any]:
    return eb.chain(*([eb.scale(-1.0)] if maximize else []), eb.lamb(learning_rate))


def noisy(learning_rate: eb.Hyperparameter, noise: bool = False) -> eb.Transform[Any]:
    return eb.chain(*([AddNoise()] if noise else []), eb.sgd(learning_rate))


def two(sharded: bool) -> nn.ParameterList:
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(5))])
    if sharded:
        cut(model, [], mesh_of((2,)))
    return model


def turned(sharded: bool, how: str) -> Weights:
    """Weights after two steps, a change of the transform or a load under another, and two steps more."""
    model = two(sharded)
    optimizer = TorchOptimizer(model.parameters(), lamb, lr=0.1, maximize=False, compile=False)
    train(model, optimizer, range(2))
    if how == "changed":
        optimizer.param_groups[0]["maximize"] = True
    else:
        state = optimizer.state_dict()
        optimizer = TorchOptimizer(model.parameters(), lamb, lr=0.1, maximize=True, compile=False)
        train(model, optimizer, range(1))
        optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    return weights_of(model)


@pytest.mark.parametrize("how", ["changed", "loaded"])
def test_numbers_of_each_parameter_stay_those_of_all_its_rows(how: str) -> None:
    expected = turned(False, how)
    assert all(equal(found, expected) for found in run(2, turned, True, how))


def begun() -> str:
    model = two(True)
    optimizer = TorchOptimizer(model.parameters(), noisy, lr=0.1, noise=False, compile=False)
    train(model, optimizer, range(1))
    optimizer.param_groups[0]["noise"] = True
    before = weights_of(model)
    with pytest.raises(ValueError, match="would draw random bits") as caught:
        train(model, optimizer, range(1))
    assert equal(weights_of(model), before)
    return str(caught.value)


def test_random_bits_of_rows_cannot_begin_later() -> None:
    """An element of a row draws its bits by its place in the whole, which is settled when the row is placed."""
    (said,) = set(run(2, begun))
    assert said.startswith(
        "TorchOptimizer, param group 0: its transform would draw random bits, and its parameters were placed at"
    )
