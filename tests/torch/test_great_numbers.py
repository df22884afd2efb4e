"""Hyperparameters that no 64 bits hold are refused before a step; and a clip that does not clip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
import everybit_torch


@pytest.mark.parametrize("name", ["lr", "weight_decay", "eps"])
def test_a_great_whole_number_is_refused_when_it_is_given_and_not_in_a_step(name: str) -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    options: dict[str, Any] = {name: 10**30}
    message = rf"{name}: got a whole number of 100 bits; accepted are those of 64 bits\. Write it as a float"
    with pytest.raises(ValueError, match=message):
        everybit_torch.AdamW([p], **options)
    optimizer = everybit_torch.AdamW([p])
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert torch.equal(p, before)
    optimizer.param_groups[0][name] = float(10**30)
    optimizer.step()


@pytest.mark.parametrize("value", [10**30, 2**63, -(2**63) - 1, 10**400])
def test_the_core_says_to_write_a_float(value: int) -> None:
    with pytest.raises(ValueError, match=r"^learning_rate: got a whole number of \d+ bits; .* Write it as a float"):
        eb.sgd(value)


def test_a_limit_of_infinity_clips_nothing() -> None:
    grads = torch.tensor([3.0, -4.0])
    transform = eb.clip_by_global_norm(math.inf)
    updates, _ = transform.update(grads, transform.init(grads), grads)
    assert torch.equal(updates, grads)
    for limit in (-math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="limit: got"):
            eb.clip_by_global_norm(limit)
