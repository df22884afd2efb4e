"""The options of a stepper: written once, for the stepper, the plan and configurations."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import FlatStepper, Plan, StepperOptions, plan
from everybit_torch.config import StepperConfig
from everybit_torch.sharded.options import StepperKeywords
from everybit_torch.sharded.strategies import PlainOptions, Strategy
from tests.support.exact_models import mesh_of
from tests.support.ranks import run


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def trained(stepper: FlatStepper) -> list[torch.Tensor]:
    for number in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number)).bfloat16()
        with stepper.microbatch(last=True):
            stepper.model(x).float().square().sum().backward()
        stepper.step()
    stepper.close()
    return [p.detach() for p in stepper.model.parameters()]


def test_keywords_are_the_options_with_their_types() -> None:
    options, keywords = get_type_hints(StepperOptions), get_type_hints(StepperKeywords)
    # A number stands for a strategy until the options are made.
    assert keywords.pop("strategy") == options.pop("strategy") | int == Strategy | int
    assert keywords == options


def test_a_stepper_of_options_is_that_of_their_keywords() -> None:
    options = StepperOptions(policy="LEAN_BF16", strategy="optim_grads", units=[nn.Linear], nan="step", seed=3)
    keywords: Any = {field.name: getattr(options, field.name) for field in fields(options)}
    given = FlatStepper(model(), eb.adamw(0.1), options)
    named = FlatStepper(model(), eb.adamw(0.1), **keywords)
    mixed = FlatStepper(model(), eb.adamw(0.1), replace(options, seed=0, strategy="no_shard"), seed=3, strategy=2)
    assert str(given.plan()) == str(named.plan()) == str(mixed.plan())
    expected = trained(given)
    for other in (named, mixed):
        assert all(map(torch.equal, trained(other), expected))


def test_a_plan_takes_the_same_options() -> None:
    options = StepperOptions(policy="LEAN_BF16", strategy="optim_grads", units=[nn.Linear])
    stepper = FlatStepper(model(), eb.adamw(0.1), options)
    assert plan(model(), eb.adamw(0.1), options).bytes_per_param == stepper.plan().bytes_per_param
    assert plan(model(), eb.adamw(0.1), options, policy="FLOOR_BF16") == plan(
        model(), eb.adamw(0.1), policy="FLOOR_BF16", strategy=2, units=[nn.Linear]
    )
    stepper.close()


def test_an_iterator_of_ignored_parameters_serves_every_use_of_the_options() -> None:
    net = model()
    options = StepperOptions(policy="LEAN_BF16", ignored=net[2].parameters())
    first, second = (plan(net, eb.adamw(), options) for _ in range(2))
    assert first == second == plan(net, eb.adamw(), policy="LEAN_BF16", ignored=["2"])
    assert first.parameters == sum(p.numel() for p in net[0].parameters())
    stepper = FlatStepper(net, eb.adamw(), options)
    assert [*stepper.routed] == ["0.weight", "0.bias"]
    stepper.close()


def planned_on_a_mesh() -> list[Plan]:
    mesh = mesh_of((2, 1))
    given: list[dict[str, Any]] = [{"mesh": mesh}, {"ranks": (2, 1)}, {"mesh": mesh.get_group(0)}, {"ranks": 2}]
    return [plan(model(), eb.adamw(), policy="LEAN_BF16", strategy="optim_grads", **one) for one in given]


def test_a_plan_has_the_ranks_of_its_mesh() -> None:
    for of_mesh, of_ranks, of_group, of_number in run(2, planned_on_a_mesh):
        assert of_mesh == of_ranks
        assert of_group == of_number
        assert of_ranks != of_number
    for call in (FlatStepper, plan):
        with pytest.raises(TypeError, match="mesh: got 2; accepted are a DeviceMesh, a process group, or None"):
            call(model(), eb.adamw(), policy="LEAN_BF16", mesh=2)  # type: ignore[arg-type]


def test_a_configuration_has_those_that_are_plain_data() -> None:
    config, own = ({field.name: field for field in fields(kind)} for kind in (StepperConfig, PlainOptions))
    assert {name: config[name].default for name in own} == {name: one.default for name, one in own.items()}
    made = StepperConfig(policy="LEAN_BF16", strategy="optim_grads", nan="step", seed=7).build(model())
    direct = FlatStepper(model(), eb.adamw(), policy="LEAN_BF16", strategy="optim_grads", nan="step", seed=7)
    assert all(map(torch.equal, trained(made), trained(direct)))


def test_options_do_not_change_and_refuse_by_name() -> None:
    with pytest.raises(FrozenInstanceError):
        StepperOptions().seed = 1  # type: ignore[misc]
    assert [StepperOptions.of(None, {"strategy": stage}).strategy for stage in range(4)] == [
        "no_shard", "optim", "optim_grads", "optim_grads_params"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="strategy: got 'zero'; accepted are 'no_shard'"):
        StepperOptions(strategy="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outer: got 'optim' with strategy='optim_grads'"):
        StepperOptions(strategy="optim_grads", outer="optim")
    unknown: Any = {"zero": True}
    for call in (FlatStepper, plan):
        with pytest.raises(TypeError, match="zero: is no option of a stepper; accepted are strategy, outer, divisor"):
            call(model(), eb.adamw(), **unknown)
        with pytest.raises(TypeError, match=r"options: got 'LEAN_BF16'; accepted are StepperOptions\(...\), or None"):
            call(model(), eb.adamw(), "LEAN_BF16")  # type: ignore[arg-type]
