"""Optimizers and steppers as data: out and in again, every mistake by its dotted path, and what is built of them."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everybit as eb
import everybit_torch
from everybit_torch import FlatStepper
from everybit_torch.config import (
    AdamConfig,
    AdamWConfig,
    Algorithm,
    LionConfig,
    OptimizerConfig,
    PolicyByName,
    PolicyRule,
    RMSpropConfig,
    SGDConfig,
    StepperConfig,
    algorithm,
    config_from_dict,
    config_from_flags,
    config_to_dict,
    json_schema,
    load_config,
    register_algorithm,
    save_config,
)
from everybit_torch.config.algorithms import ALGORITHMS as NAMES_OF_ALGORITHMS
from tests.support.block_formats import Int8Residual

NUMBERS = st.floats(0.0, 1.0)
DECAYS = st.floats(0.0, 1.0, exclude_max=True)
COMMON: dict[str, Any] = {"lr": NUMBERS, "weight_decay": NUMBERS, "maximize": st.booleans()}
ADAM = {"betas": st.tuples(DECAYS, DECAYS), "eps": NUMBERS, **COMMON}
ALGORITHMS = st.one_of(
    st.builds(AdamWConfig, **ADAM),
    st.builds(AdamWConfig, fully_decoupled=st.just(True), max_learning_rate=st.floats(1.0, 2.0), **COMMON),
    st.builds(AdamConfig, **ADAM),
    st.builds(LionConfig, betas=st.tuples(DECAYS, DECAYS), **COMMON),
    st.builds(SGDConfig, momentum=st.just(0.9), nesterov=st.booleans(), **COMMON),
    st.builds(RMSpropConfig, alpha=DECAYS, centered=st.booleans(), **COMMON),
)
OWN = eb.Policy(
    params=eb.Kahan("float16", "stochastic"),
    slots={"a b.c": eb.Split(8)},
    grads=eb.Grads(main="float32", comm="bfloat16"),
)
POLICIES = st.sampled_from([*eb.policies.PRESETS.values(), OWN])
TEXT = st.text(min_size=1, max_size=8)
RULES = st.lists(st.builds(PolicyRule, pattern=TEXT, policy=POLICIES), max_size=3).map(tuple)
ANY_POLICY = st.one_of(st.none(), POLICIES, st.builds(PolicyByName, rules=RULES, otherwise=POLICIES))
NAMES = st.lists(TEXT, max_size=3).map(tuple)


def literals(kind: type[Any], field: str) -> st.SearchStrategy[Any]:
    """The values of a field that is a literal, perhaps with bool."""
    hint = get_type_hints(kind)[field]
    values = [one for part in get_args(hint) for one in (get_args(part) or [part])]
    return (
        st.sampled_from([value for value in values if value is not bool]) | st.booleans()
        if bool in values
        else (st.sampled_from(values))
    )


OPTIMIZERS = st.builds(
    OptimizerConfig, algorithm=ALGORITHMS, policy=ANY_POLICY, no_decay=NAMES,
    compile=literals(OptimizerConfig, "compile"), seed=st.integers(0, 2**40), metrics=st.booleans(),
)  # fmt: skip
STEPPERS = st.builds(
    StepperConfig, algorithm=ALGORITHMS, policy=ANY_POLICY, units=NAMES, ignored=NAMES, divisor=st.none() | st.floats(1, 9),
    strategy=literals(StepperConfig, "strategy"), outer=literals(StepperConfig, "outer"), nan=literals(StepperConfig, "nan"),
    compile=st.booleans(), seed=st.integers(0, 2**40),
)  # fmt: skip
SCHEMAS = {
    kind: import_module("jsonschema").Draft202012Validator(json_schema(kind))
    for kind in (OptimizerConfig, StepperConfig)
}


@settings(max_examples=40, deadline=None)
@given(config=OPTIMIZERS | STEPPERS, suffix=st.sampled_from(["toml", "json", "yaml"]))
def test_a_configuration_survives_dicts_and_files_and_follows_its_schema(
    tmp_path_factory: pytest.TempPathFactory, config: Any, suffix: str
) -> None:
    data = config_to_dict(config)
    assert config_from_dict(type(config), data) == config
    path = tmp_path_factory.getbasetemp() / f"config.{suffix}"
    save_config(config, path)
    assert load_config(type(config), path) == config
    SCHEMAS[type(config)].validate(json.loads(json.dumps(data)))


MISTAKES: list[tuple[Any, str]] = [
    ({"algoritm": {}}, "algoritm: there is no such field (did you mean 'algorithm'?); fields are algorithm, policy"),
    (
        {"algorithm": "adamv"},
        "algorithm: got 'adamv' (did you mean 'adam'?); accepted is a table with name = one of adamw",
    ),
    ({"algorithm": {"name": "adamw", "lrr": 1}}, "algorithm.lrr: there is no such field (did you mean 'lr'?)"),
    (
        {"algorithm": {"name": "adamw", "learning_rate": 1}},
        "algorithm.learning_rate: there is no such field (did you mean 'lr'?)",
    ),
    ({"algorithm": {"name": "adam", "b1": 0.9}}, "algorithm.b1: there is no such field (did you mean 'betas'?)"),
    ({"algorithm": {"lr": 1e-3}}, "algorithm: got {'lr': 0.001}; accepted is a table with name = one of adamw"),
    ({"algorithm": {"name": "adamw", "lr": -1}}, "algorithm.lr: got -1.0; accepted is a finite number in [0, inf)."),
    ({"algorithm": {"name": "adamw", "lr": True}}, "algorithm.lr: got True; accepted is a number."),
    ({"algorithm": {"name": "adamw", "lr": "3e-4"}}, "algorithm.lr: got '3e-4'; accepted is a number."),
    ({"algorithm": {"name": "adamw", "betas": [0.9]}}, "algorithm.betas: got [0.9]; accepted is a list of 2."),
    ({"algorithm": {"name": "adamw", "betas": [0.9, 1.0]}}, "algorithm.betas[1]: got 1.0; accepted is"),
    ({"algorithm": {"name": "sgd", "nesterov": True}}, "algorithm.nesterov: got True without momentum"),
    (
        {"policy": "LEEN_BF16"},
        "policy: got 'LEEN_BF16' (did you mean 'LEAN_BF16'?); accepted is a table, or one of FP64",
    ),
    ({"policy": {"params": {"format": "Split", "bits": 12}}}, "policy.params.bits: got 12; accepted is 8, 16."),
    ({"policy": {"params": {"format": "Splt"}}}, "policy.params: got {'format': 'Splt'} (did you mean 'Split'?)"),
    (
        {"policy": {"rules": [{"pattern": "x"}], "otherwise": "FP32"}},
        "policy.rules[0].policy: got nothing; accepted is",
    ),
    (
        {"policy": {"rules": [], "otherwise": "FP32", "x": 1}},
        "policy.x: there is no such field; fields are rules, otherwise.",
    ),
    ({"compile": 1}, "compile: got 1; accepted is true or false or 'auto'."),
    ({"no_decay": "*.bias"}, "no_decay: got '*.bias'; accepted is a list."),
    ({"seed": 0.5}, "seed: got 0.5; accepted is a whole number."),
    ([], "configuration: got []; accepted is a table with algorithm"),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_mistakes_are_named_by_their_path(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        config_from_dict(OptimizerConfig, data)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "seed: 1\nseed: 2"), ("b.yaml", "? [1]\n: 2"), ("c.yaml", "a: [1"), ("d.yaml", "? {a: 1}\n: 2")],
)
def test_damaged_yaml_is_refused_by_the_name_of_its_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        load_config(OptimizerConfig, tmp_path / name)


def test_yaml_reads_numbers_without_a_point_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: {name: adamw, lr: 3e-4}")
    assert load_config(OptimizerConfig, tmp_path / "a.yaml").algorithm.lr == 3e-4


def test_what_no_file_can_name_is_not_written(tmp_path: Path) -> None:
    config = OptimizerConfig(policy=eb.Policy(params=Int8Residual()))
    with pytest.raises(ValueError, match=r"^policy.params: got Int8Residual\(.*a format of your own"):
        save_config(config, tmp_path / "a.toml")
    assert not (tmp_path / "a.toml").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AdamW", AdamWConfig),
        ("Adam", AdamConfig),
        ("Lion", LionConfig),
        ("SGD", SGDConfig),
        ("RMSprop", RMSpropConfig),
    ],
)
def test_defaults_are_those_of_the_optimizer(name: str, kind: type[Any]) -> None:
    parameters = inspect.signature(getattr(everybit_torch, name)).parameters
    own = {"params", "options", "policy", "average", "compile", "metrics", "seed"}
    assert kind().hyperparameters() == {key: one.default for key, one in parameters.items() if key not in own}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x))
        return out


BY_NAME = PolicyByName(
    rules=(PolicyRule(pattern="norm.*", policy=eb.policies.EXACT_BF16),), otherwise=eb.policies.LEAN_BF16
)


def test_an_optimizer_is_built_with_its_groups_and_policies() -> None:
    model = Model().bfloat16()
    config = OptimizerConfig(
        algorithm=AdamWConfig(lr=0.5, weight_decay=0.25), policy=BY_NAME, no_decay=("*.bias", "norm.*")
    )
    optimizer = config.build(model)
    assert isinstance(optimizer, everybit_torch.AdamW)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["linear.weight"],
        ["linear.bias", "norm.weight", "norm.bias"],
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    model(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    moments = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    assert moments == {
        "linear.weight": torch.bfloat16,
        "linear.bias": torch.bfloat16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
    }


def test_a_stepper_does_what_the_optimizer_of_the_same_file_does() -> None:
    config = {
        "algorithm": {"name": "adamw", "lr": 0.1, "weight_decay": 0.5},
        "policy": config_to_dict(BY_NAME),
        "no_decay": ["*.bias"],
    }
    torch.manual_seed(0)
    one, other = Model().bfloat16(), Model().bfloat16()
    other.load_state_dict(one.state_dict())
    optimizer = config_from_dict(OptimizerConfig, config).build(one)
    stepper = config_from_dict(StepperConfig, {**config, "units": ["Linear"], "strategy": "optim_grads"}).build(other)
    assert isinstance(stepper, FlatStepper)
    x = torch.randn(8, 4).bfloat16()
    for _ in range(3):
        optimizer.zero_grad()
        one(x).square().sum().backward()
        optimizer.step()
        with stepper.microbatch(last=True):
            other(x).square().sum().backward()
        stepper.step()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=0.02, atol=0.02)


@dataclass(frozen=True, kw_only=True)
class OwnConfig(Algorithm):
    factory = staticmethod(eb.adam)
    betas: tuple[float, float] = (0.5, 0.75)


def test_an_optimizer_of_ones_own_gets_a_name() -> None:
    config = OptimizerConfig(algorithm=OwnConfig(lr=0.25))
    with pytest.raises(ValueError, match=r"^algorithm: got OwnConfig.*hyperparameters of your own"):
        config_to_dict(config)
    with pytest.raises(
        ValueError, match="name: got 'adamw', which is AdamWConfig; accepted is a name that is not taken"
    ):
        register_algorithm("adamw", OwnConfig)
    try:
        register_algorithm("own", OwnConfig)
        register_algorithm("own", OwnConfig)
        assert config_from_dict(OptimizerConfig, config_to_dict(config)) == config
        optimizer = config.build(Model())
    finally:
        NAMES_OF_ALGORITHMS.pop("own")
    assert type(optimizer) is everybit_torch.TorchOptimizer
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    with pytest.raises(ValueError, match=r"^betas\[1\]: got 1.5"):
        OwnConfig(betas=(0.5, 1.5))


@dataclass(frozen=True, kw_only=True)
class WithoutFactory(Algorithm):
    pass


def test_a_factory_that_does_not_take_what_a_configuration_has_is_told_what_to_write() -> None:
    def descend(learning_rate: float, weight_decay: float) -> eb.Transform[Any]:
        return eb.adamw(learning_rate, weight_decay=weight_decay)

    @dataclass(frozen=True, kw_only=True)
    class DescentConfig(Algorithm):
        factory = staticmethod(descend)

    said = r"write it with an argument 'maximize', which the configuration has\. It takes learning_rate, weight_decay\."
    with pytest.raises(TypeError, match=rf"^DescentConfig\.factory: {said}"):
        DescentConfig()
    try:
        register_algorithm("descent", DescentConfig)
        with pytest.raises(ValueError, match=rf"^algorithm: factory: {said}"):
            config_from_dict(OptimizerConfig, {"algorithm": "descent"})
    finally:
        NAMES_OF_ALGORITHMS.pop("descent")
    with pytest.raises(TypeError, match=r"^WithoutFactory: has no factory; write factory = staticmethod\("):
        WithoutFactory()


def test_a_name_of_the_cores_is_told_torchs_in_python_too() -> None:
    with pytest.raises(TypeError, match=r"^learning_rate: there is no such field \(did you mean 'lr'\?\)"):
        algorithm("ademamix", learning_rate=1e-3)


def test_what_matches_nothing_in_a_model_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"^no_decay\[1\]: got '\*.bais', which matches .*nearest name is 'norm.bias'"):
        OptimizerConfig(no_decay=("*.bias", "*.bais")).build(model)
    rules = (PolicyRule(pattern="norms.*", policy=eb.policies.FP32),)
    by_name = OptimizerConfig(policy=PolicyByName(rules=rules, otherwise=eb.policies.FP32))
    with pytest.raises(ValueError, match=r"^policy.rules\[0\].pattern: got 'norms.\*'"):
        by_name.build(model)
    with pytest.raises(ValueError, match=r"^units\[0\]: got 'Liner' \(did you mean 'Linear'\?\)"):
        StepperConfig(units=("Liner",)).build(model)


def test_flags_change_what_a_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    save_config(OptimizerConfig(algorithm=LionConfig(lr=0.5, weight_decay=0.25), policy=BY_NAME, seed=3), file)
    flags = ["--config", str(file), "--algorithm.lr", "0.125", "--no-decay", "*.bias"]
    assert config_from_flags(OptimizerConfig, flags) == OptimizerConfig(
        algorithm=LionConfig(lr=0.125, weight_decay=0.25),
        policy=BY_NAME,
        seed=3,
        no_decay=("*.bias",),
    )
    changed = config_from_flags(OptimizerConfig, ["--config", str(file), "--algorithm", "sgd", "--policy", "FP32"])
    assert changed == OptimizerConfig(algorithm=SGDConfig(), policy=eb.policies.FP32, seed=3)
    (tmp_path / "bad.toml").write_text("sed = 3")
    with pytest.raises(SystemExit, match="2"):
        config_from_flags(OptimizerConfig, ["--config", str(tmp_path / "bad.toml")])
    assert "bad.toml: sed: there is no such field (did you mean 'seed'?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        config_from_flags(StepperConfig, ["--policy", "LEEN_BF16"])
    assert "LEEN_BF16" in capsys.readouterr().err
