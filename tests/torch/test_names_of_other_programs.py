"""Optimizers with plain arguments, by which Trainer and timm make them: every one that has a name."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch.drop_ins.creating import CLASSES
from everybit_torch.names.optimizers import OPTIMIZERS, value_of
from everybit_torch.optim.torch_optimizer import TorchOptimizer

PAGE = (Path(__file__).parents[2] / "docs/programs.md").read_text(encoding="utf-8")

TRAINER_NAMES: dict[str, eb.OptimizerName] = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "ademamix": "ademamix", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop",
    "lion_32bit": "lion", "schedule_free_adamw": "schedule_free_adamw", "schedule_free_sgd": "schedule_free_sgd",
    "stable_adamw": "stable_adamw",
}  # fmt: skip
"""Trainer's own names, and ours for the same optimizer."""

TIMM_NAMES: dict[str, tuple[eb.OptimizerName, dict[str, Any]]] = {
    "sgd": ("sgd", {"nesterov": True}),
    "momentum": ("sgd", {}),
    "adam": ("adam", {}),
    "adamw": ("adamw", {}),
    "nadam": ("nadam", {}),
    "radam": ("radam", {}),
    "adamax": ("adamax", {}),
    "adadelta": ("adadelta", {}),
    "adagrad": ("adagrad", {}),
    "rmsprop": ("rmsprop", {}),
    "adoptw": ("adopt", {"clip_power": 1 / 3}),
    "lamb": ("lamb", {"max_grad_norm": 1.0, "always_adapt": False}),
    "lambc": ("lamb", {"max_grad_norm": 1.0, "always_adapt": False, "max_ratio": 1.0}),
    "lars": ("lars", {}),
    "adan": ("adan", {}),
    "adanw": ("adan", {"proximal": False}),
    "laprop": ("laprop", {}),
    "lion": ("lion", {}),
    "mars": ("mars", {}),
}
"""timm's own names, ours for the same optimizer, and what of ours makes it timm's; where the two still differ is in docs/optimizers.md."""


@pytest.mark.parametrize("name", eb.optimizers())
def test_every_optimizer_has_a_class_of_plain_arguments(name: eb.OptimizerName) -> None:
    kind = OPTIMIZERS[name]
    assert issubclass(kind, CLASSES.get(name, TorchOptimizer))
    parameters = inspect.signature(kind).parameters
    assert {"params", "lr", "policy", "compile", "metrics", "seed"} <= set(parameters)
    assert parameters["lr"].default == eb.optimizers()[name].learning_rate
    plain = (bool, int, float, str, tuple, type(None))
    assert all(isinstance(one.default, plain) for one in parameters.values() if one.name != "params")
    assert pickle.loads(pickle.dumps(kind)) is kind
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    # As other programs give them: learning rate and decay always, decay by group.
    groups = [{"params": [one], "weight_decay": 0.0} for one in model.named_parameters()]
    optimizer = kind(groups, lr=0.5, weight_decay=0.0, policy="LEAN_BF16", compile=False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    model(torch.ones(1, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()


def test_arguments_that_there_are_not_are_named() -> None:
    with pytest.raises(
        TypeError, match=r"EverybitAdemamix: polcy: there is no such argument; accepted are lr, betas, b3,.*, policy"
    ):
        OPTIMIZERS["ademamix"](nn.Linear(2, 2).parameters(), polcy="LEAN_BF16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"EverybitRprop: weight_decay: there is no such argument"):
        OPTIMIZERS["rprop"](nn.Linear(2, 2).parameters(), weight_decay=0.1)  # type: ignore[call-arg]


def test_options_are_plain_by_field() -> None:
    groups = [{"params": [one]} for one in nn.Linear(3, 2).named_parameters()]
    soap = OPTIMIZERS["soap"](groups, where_max_dimension=2, where_vectors=True)  # type: ignore[call-arg]
    assert soap.param_groups[0]["where"] == eb.Kronecker(max_dimension=2, vectors=True)
    muon = OPTIMIZERS["muon"](groups, iteration_steps=3)  # type: ignore[call-arg]
    assert muon.param_groups[1]["iteration"] == eb.NewtonSchulz(steps=3)
    with pytest.raises(ValueError, match=r"^steps: got 0; accepted is a whole number"):
        OPTIMIZERS["muon"](groups, iteration_steps=0)  # type: ignore[call-arg]


def test_names_of_other_programs_stand_for_names_of_ours() -> None:
    assert set(TRAINER_NAMES.values()) <= set(eb.optimizers())
    for name, given in TIMM_NAMES.values():
        assert set(given) <= set(eb.optimizers()[name].arguments)
        if name != "sgd":  # whose Nesterov momentum needs the momentum that timm gives
            eb.optimizers()[name].function(**given)
    rows = dict(re.findall(r"^\| `([\w]+)` \| `([\w]+)`", PAGE, re.MULTILINE))
    theirs = {**TRAINER_NAMES, **{their: name for their, (name, _) in TIMM_NAMES.items()}}
    assert rows == theirs, "docs/programs.md has to list them all"


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("1", 0.5, 1.0), ("1e-3", None, 1e-3), ("none", None, None), ("true", False, True), ("3", 1, 3),
        ("0.9:0.95", (0.9, 0.999), (0.9, 0.95)), ("auto", "auto", "auto"), ("False", "auto", False),
        ("5", "cubic", "5"), ("none", "cubic", None),
        ("yes", False, "accepted is true or false"), ("1", False, "accepted is true or false"), ("x", 0.5, "accepted is a number"),
        ("0.9", (0.9, 0.999), "as many numbers as the default has"), ("0.9:0.9:0.9", (0.9, 0.999), "as many numbers"),
        ("0.5", 1, "a number"),
    ],
)  # fmt: skip
def test_a_text_is_read_as_the_default_is(text: str, default: Any, value: Any) -> None:
    if isinstance(value, str) and value != text:
        with pytest.raises(ValueError, match=rf"^where: got '{text}'; .*{value}"):
            value_of("where", text, default)
        return
    found = value_of("where", text, default)
    assert (type(found), found) == (type(value), value)
