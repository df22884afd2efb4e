"""A warm step prepares nothing, also beside frozen parameters; whatever changes between two steps is prepared for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everybit_torch import AdamW
from everybit_torch.optim.parameters import Parameters
from tests.support.small_models import Awkward, train


def moved(model: Awkward, optimizer: Any) -> None:
    model.vector.data = model.vector.data.clone()


def given_back(model: Awkward, optimizer: Any) -> None:
    entry = optimizer.state[model.vector]["momentum"]
    for value in optimizer.state[model.vector].values():
        value.data = value.data.clone()
    assert entry is optimizer.state[model.vector]["momentum"]


CHANGES: dict[str, Callable[[Awkward, Any], Any]] = {
    "a group": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "an unfrozen parameter": lambda model, optimizer: model.matrix.requires_grad_(True),
    "memory": moved,
    "memory of the state": given_back,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_prepares_only_for_what_has_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plan = Parameters.plan

    def counted(*given: Any) -> Any:
        calls.append(1)
        return plan(*given)

    monkeypatch.setattr(Parameters, "plan", counted)
    model = Awkward()
    model.matrix.requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=False)
    train(model, optimizer, 3, without=lambda step, name: name == "matrix")
    assert len(calls) == 1
    CHANGES[change](model, optimizer)
    calls.clear()
    train(model, optimizer, 1, start=3, without=lambda step, name: name == "matrix")
    assert len(calls) == 1


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"mine": [1]}])
def test_values_are_followed_without_another_preparation(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a value that other code keeps in a group, and that may change in place."""
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=False)
    train(model, optimizer, 1)
    monkeypatch.setattr(Parameters, "plan", None)
    optimizer.param_groups[0].update(change)
    train(model, optimizer, 2, start=1)
    assert optimizer.own.groups[0].arguments["learning_rate"] == change.get("lr", 1e-2)


def test_a_frozen_parameter_of_a_later_group_is_stepped_once_it_is_unfrozen() -> None:
    model = Awkward()
    optimizer = AdamW([model.vector], lr=1e-2, compile=False)
    train(model, optimizer, 2)
    model.scalar.requires_grad_(False)
    optimizer.add_param_group({"params": [model.scalar]})
    train(model, optimizer, 2, start=2, without=lambda step, name: name == "scalar")
    assert model.scalar not in optimizer.state
    model.scalar.requires_grad_(True)
    train(model, optimizer, 2, start=4)
    assert int(optimizer.state[model.scalar]["step"]) == 2
