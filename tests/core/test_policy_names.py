"""Policies by name: the same policy as the preset, in every front end."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import SGD, AdamW, FlatStepper, TorchOptimizer, plan

NAMES = get_args(eb.PolicyName)


def bfloat16_model() -> nn.Module:
    return nn.Linear(4, 4, dtype=torch.bfloat16)


def test_the_names_are_those_of_the_presets() -> None:
    assert list(NAMES) == list(eb.policies.PRESETS)
    assert all(getattr(eb.policies, name) is eb.policies.PRESETS[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_its_preset(name: eb.PolicyName) -> None:
    assert eb.with_policy(eb.sgd(0.1), name).policy is eb.policies.PRESETS[name]


def test_front_ends_take_names() -> None:
    by_name, by_value = (
        AdamW(bfloat16_model().parameters(), policy=one) for one in ("LEAN_BF16", eb.policies.LEAN_BF16)
    )
    assert by_name.bytes_table() == by_value.bytes_table()
    of_group = SGD([{"params": list(bfloat16_model().parameters()), "policy": "EXACT_BF16"}])
    assert "EXACT_BF16" in repr(of_group)
    sizes = [
        plan(bfloat16_model(), eb.adamw(), policy=one).bytes_per_param for one in ("LEAN_BF16", eb.policies.LEAN_BF16)
    ]
    assert sizes[0] == sizes[1]
    stepper = FlatStepper(bfloat16_model(), eb.adamw(), policy="LEAN_BF16")
    assert all(one.policy is eb.policies.LEAN_BF16 for one in stepper.labelled.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda name: eb.with_policy(eb.sgd(0.1), name),
        lambda name: AdamW(bfloat16_model().parameters(), policy=name),
        lambda name: TorchOptimizer(bfloat16_model().parameters(), eb.lion, policy=name),
        lambda name: FlatStepper(bfloat16_model(), eb.sgd(0.1), policy=name),
        lambda name: plan(bfloat16_model(), eb.sgd(0.1), policy=name),
        lambda name: AdamW([{"params": list(bfloat16_model().parameters()), "policy": name}]),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(make: Any) -> None:
    with pytest.raises(
        ValueError, match=r"policy: got 'lean_bf61' \(did you mean 'LEAN_BF16'\?\); accepted are 'FP64', "
    ):
        make("lean_bf61")
    with pytest.raises(ValueError, match=r"policy: got 'bf16'; accepted are 'FP64', .*everybit.Policy\("):
        make("bf16")
