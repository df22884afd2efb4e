"""Hyperparameters that no 64 bits hold, and a clip that does not clip: as ``torch.optim`` takes them, or refused before a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
import everybit_torch


def stepped(module: Any, load: bool, **options: Any) -> torch.Tensor:
    p = nn.Parameter(torch.ones(4, dtype=torch.float64))
    p.grad = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    optimizer = module.AdamW([p], **({} if load else options))
    if load:
        state = optimizer.state_dict()
        state["param_groups"][0].update(options)
        optimizer.load_state_dict(state)
    optimizer.step()
    return p.detach()


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_a_great_whole_number_is_what_it_is_for_torch(name: str, load: bool) -> None:
    ours, theirs = (stepped(module, load, **{name: 10**30}) for module in (everybit_torch, torch.optim))
    # A step of AdamW rounds some ten times.
    assert torch.allclose(ours, theirs, rtol=16 * 2.0**-53, atol=0)


@pytest.mark.parametrize("value", [10**30, 2**63, -(2**63) - 1, 10**400])
def test_the_core_says_to_write_a_float(value: int) -> None:
    with pytest.raises(ValueError, match=r"^learning_rate: write it as a float\. Got a whole number of \d+ bits"):
        eb.sgd(value)


def test_a_limit_of_infinity_clips_nothing() -> None:
    grads = torch.tensor([3.0, -4.0])
    transform = eb.clip_by_global_norm(math.inf)
    updates, _ = transform.update(grads, transform.init(grads), grads)
    assert torch.equal(updates, grads)
    for limit in (-math.inf, math.nan, -1.0):
        with pytest.raises(ValueError, match="limit: got"):
            eb.clip_by_global_norm(limit)
