"""``everybit_torch.Muon`` in the place of ``torch.optim.Muon``: its arguments, its state, and its refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import Muon, TorchOptimizer
from tests.support.small_models import same_bits

SHAPES = [(9, 4), (3, 8), (5, 5)]


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def test_it_has_torchs_arguments_in_torchs_order_with_torchs_defaults() -> None:
    theirs = inspect.signature(torch.optim.Muon).parameters
    ours = inspect.signature(Muon).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [one.default for one in theirs.values()]
    beyond = {one.kind for name, one in ours.items() if name not in theirs}
    assert beyond == {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


@pytest.mark.parametrize(
    ("given", "core"),
    [
        ({}, {}),
        ({"adjust_lr_fn": "match_rms_adamw", "nesterov": False}, {"scale": "match_rms_adamw", "nesterov": False}),
        ({"ns_coefficients": (1.5, -0.5, 0.0), "ns_steps": 9}, {"iteration": eb.NewtonSchulz("cubic", 9)}),
    ],
)
def test_it_is_muon_of_the_core_without_others(given: dict[str, Any], core: dict[str, Any]) -> None:
    """Which is compared with torch's, step by step, in tests/core/test_muon.py."""
    one, other = matrices(), matrices()
    stepped(Muon(one, lr=0.02, momentum=0.9, **given), one, range(4))
    stepped(TorchOptimizer(other, eb.muon, lr=0.02, momentum=0.9, others=None, **core), other, range(4))
    assert same_bits([p.detach() for p in one], [p.detach() for p in other])


def test_a_run_of_torchs_goes_on_here_and_goes_back() -> None:
    params = matrices()
    theirs = torch.optim.Muon(params, lr=0.02, momentum=0.9, adjust_lr_fn="match_rms_adamw", ns_steps=4)
    stepped(theirs, params, range(3))
    buffers = [theirs.state[p]["momentum_buffer"].clone() for p in params]
    ours = Muon.from_torch(theirs, policy="FP32")
    assert {name: ours.param_groups[0][name] for name in theirs.defaults} == theirs.defaults
    assert same_bits([ours.state[p]["momentum_buffer"] for p in params], buffers)
    stepped(ours, params, range(3, 6))
    again = torch.optim.Muon(params)
    again.load_state_dict(ours.torch_state_dict())
    assert same_bits([again.state[p]["momentum_buffer"] for p in params], [ours.state[p]["momentum"] for p in params])
    assert again.param_groups[0]["ns_steps"] == 4


def test_what_is_no_matrix_is_refused_when_it_is_given() -> None:
    with pytest.raises(
        ValueError, match=r"^Muon: param group 0, parameter 1: got shape \(4,\); accepted are matrices\."
    ):
        Muon([nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=r"ns_coefficients: got \(1\.0,\); accepted are three numbers"):
        Muon(matrices(), ns_coefficients=(1.0,))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"adjust_lr_fn: got 'arbitrary'; accepted are None, 'original', 'match_rms_adamw'"
    ):
        Muon(matrices(), adjust_lr_fn="arbitrary")  # type: ignore[arg-type]
