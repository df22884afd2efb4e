"""Optimizers by name: what is made is what the name says, and mistakes are answered by what is accepted."""

from __future__ import annotations

import inspect
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import nn

import everybit as eb
import everybit_torch
from everybit_torch import TorchOptimizer, create
from everybit_torch.arguments import torch_defaults
from everybit_torch.drop_ins.creating import CLASSES, Choice


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).to(dtype)


def stepped(made: TorchOptimizer, network: nn.Module) -> list[torch.Tensor]:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        made.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


@pytest.mark.parametrize("name", eb.optimizers())
def test_a_name_makes_its_optimizer_with_the_defaults_of_its_function(name: eb.OptimizerName) -> None:
    network, other = model(), model()
    made = create(name, network, lr=0.03, compile=False)
    assert type(made) is CLASSES.get(name, TorchOptimizer)
    found = stepped(made, network)
    function = eb.optimizers()[name].function
    expected = stepped(TorchOptimizer(other.named_parameters(), function, lr=0.03, compile=False), other)
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", eb.optimizers())
def test_all_hyperparameters_are_in_the_param_groups(name: eb.OptimizerName) -> None:
    group = create(name, model(), policy="FP32").param_groups[0]
    one = eb.optimizers()[name]
    assert group["lr"] == one.learning_rate
    defaults = torch_defaults(one.function)
    # torch writes "no momentum" as 0.
    alike = {key: value for key, value in group.items() if key in defaults and (value or defaults[key])}
    assert alike.items() <= defaults.items()
    known = set(inspect.signature(CLASSES[name]).parameters) if name in CLASSES else set(defaults)
    assert set(defaults) & known <= set(group)


def test_a_group_has_values_of_its_own() -> None:
    network = model()
    weights, biases = ([p for p in network.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    made = create("ademamix", groups, weight_decay=0.1)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    before = [p.detach().clone() for p in network.parameters()]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for parameter, old in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter, old) == (parameter.ndim == 1 or not old.any())


def test_policies_and_options_are_passed_on() -> None:
    made = create("lamb", model(torch.bfloat16), policy="LEAN_BF16", lr=1e-2, betas=(0.8, 0.9), seed=3)
    assert made.param_groups[0]["betas"] == (0.8, 0.9)
    assert "LEAN_BF16" in repr(made)
    assert type(create("adamw", model().parameters())) is everybit_torch.AdamW


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("adammw", {}, ValueError, r"^create: name: got 'adammw' \(did you mean 'adamw'\?\); accepted are sgd, adam, adamw,"),
        ("adamw", {"bets": (0.9, 0.95)}, TypeError, r"^AdamW: bets: adamw has no such argument, did you mean 'betas'\? accepted are lr,"),
        ("lamb", {"bets": (0.9, 0.95)}, TypeError, r"^TorchOptimizer: bets: lamb has no such argument, did you mean 'betas'\? accepted"),
        ("lamb", {"momentum": 0.9}, TypeError, r"momentum: lamb has no such argument; accepted are lr, betas, eps, weight_decay, max"),
        ("lamb", {"lr": -1.0}, ValueError, r"lr: got -1.0; accepted is a finite number in \[0, inf\)"),
        ("ademamix", {"policy": "PURE_BF16"}, ValueError, r"Policy.state: got Nearest\(dtype='bfloat16'\); 'slow' has a decay rate of"),
    ],
)  # fmt: skip
def test_mistakes_are_named(name: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        create(name, model(torch.bfloat16 if "policy" in options else torch.float32), **options)


def test_the_words_that_create_takes_are_those_of_all_optimizers() -> None:
    """So that `create("muon", model, scale="match_rms_adamw")` type-checks, and a misspelt word does not."""

    def words(annotation: Any) -> set[str]:
        if get_origin(annotation) is Literal:
            return {word for word in get_args(annotation) if isinstance(word, str)}
        parts = [part for part in get_args(annotation) if not isinstance(part, (str, int, list))]
        return {word for part in parts for word in words(part)}

    annotations = [one.annotation for named in eb.optimizers().values() for one in named.arguments.values()]
    assert {word for annotation in annotations for word in words(annotation)} == set(get_args(Choice))
