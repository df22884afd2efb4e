"""Every optimizer that has a name can be named in files and flags, with its own hyperparameters."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import FlatStepper, create, routing
from everybit_torch.config import (
    OptimizerConfig,
    StepperConfig,
    algorithm,
    config_from_dict,
    config_from_flags,
    config_to_dict,
    json_schema,
    load_config,
    save_config,
)

SCHEMA = json_schema(OptimizerConfig)
OTHER: list[tuple[eb.OptimizerName, dict[str, Any]]] = [
    ("adopt", {"clip_power": None, "nesterov": True}),
    ("mars", {"max_norm": None, "betas": (0.9, 0.95)}),
    ("lamb", {"max_grad_norm": 1.0, "max_ratio": None}),
    ("ademamix", {"alpha_warmup": 100, "b3": 0.999}),
    ("torch_adafactor", {"eps": (1e-30, 1e-3)}),
    ("rprop", {"etas": (0.4, 1.3)}),
    ("radam", {"threshold": 4.0}),
    ("muon", {"iteration": eb.NewtonSchulz(((1.5, -0.5, 0.0), (2.0, -1.5, 0.5)), steps=7, batching="together")}),
    ("soap", {"where": eb.Kronecker(max_dimension=5, vectors=True)}),
    ("shampoo", {"graft": eb.Grafting("sgd", decay=0.5, start=2)}),
]


@pytest.mark.parametrize(
    ("name", "values"),
    [*((name, {}) for name in eb.optimizers()), *OTHER],
    ids=lambda one: one if isinstance(one, str) else "",
)
@pytest.mark.sampled(8)
def test_it_survives_dicts_files_and_pickles_and_builds_what_its_name_says(
    name: eb.OptimizerName, values: dict[str, Any], tmp_path: Path
) -> None:
    config = OptimizerConfig(algorithm=algorithm(name, lr=0.125, **values), policy="FP32")
    data = config_to_dict(config)
    assert data["algorithm"]["name"] == name
    assert config_from_dict(OptimizerConfig, data) == config
    for suffix in ("toml", "json", "yaml"):
        save_config(config, tmp_path / f"config.{suffix}")
        assert load_config(OptimizerConfig, tmp_path / f"config.{suffix}") == config
    import_module("jsonschema").validate(json.loads(json.dumps(data)), SCHEMA)
    assert pickle.loads(pickle.dumps(config)) == config
    built, named = config.build(nn.Linear(3, 2)), create(name, nn.Linear(3, 2), policy="FP32", lr=0.125, **values)
    assert type(built) is type(named)
    ours, theirs = built.param_groups[0], named.param_groups[0]
    assert {key: ours[key] for key in theirs if key in ours and key != "params"} == {
        key: theirs[key] for key in theirs if key in ours and key != "params"
    }
    assert config_from_dict(OptimizerConfig, {"algorithm": name}).algorithm == algorithm(name)


def test_a_view_in_a_file_is_that_of_all_matrices() -> None:
    """A file has the table ``where`` alone; in Python ``matrices`` says it, too."""
    view = eb.heads(2)
    names: tuple[eb.OptimizerName, ...] = ("soap", "shampoo", "kron")
    for name in names:
        table = {"name": name, "where": {"view": {"kind": "heads", "sizes": [2]}}}
        read = config_from_dict(OptimizerConfig, {"algorithm": table})
        assert read.algorithm == algorithm(name, where=eb.Kronecker(view=view))
        factory: Any = getattr(eb, name)
        where = replace(signature(factory).parameters["where"].default, view=view)
        assert factory(where=where) == factory(matrices=eb.Matrices(view=view))
        with pytest.raises(ValueError, match=r"where.view: got .* accepted is one of them"):
            factory(where=where, matrices=eb.Matrices(view=view))


VIEWS = {
    "qkv": eb.row_blocks(8, 4, 4, inside=(eb.heads(4), eb.heads(2), eb.heads(2))),
    r"kv_b\.": eb.heads(2, rows=(3, 5)),
    r"experts\.gate_up": eb.batched(eb.transposed(eb.interleaved(2))),
}


@pytest.mark.parametrize("name", ["muon", "normuon", "dion", "soap"])
def test_views_by_name_survive_files(name: eb.OptimizerName, tmp_path: Path) -> None:
    shapes = {"qkv": (16, 3), "kv_b.w": (16, 3), "experts.gate_up": (2, 3, 8)}
    config = OptimizerConfig(algorithm=algorithm(name, matrices=eb.Matrices(views=VIEWS)), policy="FP32")
    for suffix in ("toml", "json", "yaml"):
        save_config(config, tmp_path / f"config.{suffix}")
        assert load_config(OptimizerConfig, tmp_path / f"config.{suffix}") == config
    import_module("jsonschema").validate(json.loads((tmp_path / "config.json").read_text()), SCHEMA)
    parameters = {key: nn.Parameter(torch.ones(shape)) for key, shape in shapes.items()}
    built = config.algorithm.build(parameters.items(), nn.Module(), policy="FP32", compile=False)
    named = create(name, parameters.items(), matrices=eb.Matrices(views=VIEWS))
    assert routing(built).splitlines()[1:] == routing(named).splitlines()[1:]  # the first says that the model is known
    read = config_from_flags(OptimizerConfig, ["--config", str(tmp_path / "config.toml"), "--algorithm.lr", "0.5"])
    assert read == replace(config, algorithm=replace(config.algorithm, lr=0.5))
    data = config_to_dict(config)
    data["algorithm"]["matrices"]["views"]["qkv"]["sizes"] = [0]
    with pytest.raises(ValueError, match=r"algorithm\.matrices\.views\.qkv: row_blocks: sizes: got \(0,\)"):
        config_from_dict(OptimizerConfig, data)


def test_none_is_written_where_it_is_not_the_default() -> None:
    assert (
        config_to_dict(OptimizerConfig(algorithm=algorithm("adopt", clip_power=None)))["algorithm"]["clip_power"]
        == "none"
    )
    assert "max_ratio" not in config_to_dict(OptimizerConfig(algorithm=algorithm("lamb")))["algorithm"]
    adafactor = config_to_dict(OptimizerConfig(algorithm=algorithm("torch_adafactor")))["algorithm"]
    assert adafactor["eps"] == ["none", 1e-3]
    with pytest.raises(ValueError, match=r"algorithm\.b3: got 'none'; accepted is a number"):
        config_from_dict(OptimizerConfig, {"algorithm": {"name": "ademamix", "b3": "none"}})


def test_meanings_are_those_of_the_function() -> None:
    members = {
        one["properties"]["name"]["const"]: one
        for one in SCHEMA["properties"]["algorithm"]["anyOf"]
        if "properties" in one
    }
    assert set(members) >= set(eb.optimizers())
    ademamix = members["ademamix"]["properties"]
    assert ademamix["b3"]["description"] == "Decay rate of the slow mean, in [0, 1)."
    assert (
        ademamix["betas"]["description"]
        == "Decay rate of the fast mean, in [0, 1). Decay rate of the square, in [0, 1)."
    )
    assert ademamix["alpha_warmup"]["type"] == "integer"
    for name, member in members.items():
        if name in eb.optimizers():
            assert all("description" in one for key, one in member["properties"].items() if key != "name"), name


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "ademamx"}, r"algorithm: got .*'ademamx'.*\(did you mean 'ademamix'\?\)"),
        ({"name": "rprop", "weight_decay": 0.1}, r"algorithm\.weight_decay: there is no such field"),
        ({"name": "lamb", "maximize": True}, r"algorithm\.maximize: there is no such field"),
        (
            {"name": "lamb", "max_grad_nrom": 1.0},
            r"algorithm\.max_grad_nrom: there is no such field \(did you mean 'max_grad_norm'\?\)",
        ),
        (
            {"name": "lamb", "betas": [0.9, 1.0]},
            r"algorithm\.betas\[1\]: got 1.0; accepted is a finite number in \[0, 1\)",
        ),
        ({"name": "ademamix", "alpha_warmup": 1.5}, r"algorithm\.alpha_warmup: got 1.5; accepted is a whole number"),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_dict(OptimizerConfig, {"algorithm": data})


def test_flags_name_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--algorithm",
        "ademamix",
        "--algorithm.b3",
        "0.99",
        "--algorithm.betas",
        "0.8",
        "0.9",
        "--algorithm.alpha-warmup",
        "5",
    ]
    found = config_from_flags(OptimizerConfig, given).algorithm
    assert found == algorithm("ademamix", b3=0.99, betas=(0.8, 0.9), alpha_warmup=5)
    with pytest.raises(SystemExit) as caught:
        config_from_flags(OptimizerConfig, ["--algorithm", "rprop", "--algorithm.weight-decay", "0.1"])
    assert caught.value.code == 2
    assert "algorithm.weight_decay: there is no such field; fields are lr, maximize, etas" in capsys.readouterr().err


def test_options_are_tables_and_dotted_flags() -> None:
    read = config_from_dict(OptimizerConfig, {"algorithm": {"name": "muon", "iteration": {"coefficients": "cubic"}}})
    given = ["--algorithm", "muon", "--algorithm.iteration.coefficients", "cubic"]
    assert read == config_from_flags(OptimizerConfig, given)
    assert read.algorithm == algorithm("muon", iteration=eb.NewtonSchulz("cubic"))
    for wrong, message in (
        ({"steps": 0}, "steps: got 0; accepted is"),
        ({"stops": 1}, "stops: there is no such field"),
    ):
        with pytest.raises(ValueError, match=rf"^algorithm\.iteration\.{message}"):
            config_from_dict(OptimizerConfig, {"algorithm": {"name": "muon", "iteration": wrong}})


def test_patterns_without_decay_need_an_optimizer_that_decays() -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    for kind in (OptimizerConfig, StepperConfig):
        with pytest.raises(ValueError, match="no_decay: got patterns for RpropConfig, which has no weight_decay"):
            kind(algorithm=algorithm("rprop"), no_decay=["*.bias"]).build(network)
    groups = OptimizerConfig(algorithm=algorithm("lamb"), no_decay=["*.bias"]).build(network).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-2, 0.0]
    stepper = StepperConfig(algorithm=algorithm("lamb"), no_decay=["*.bias"]).build(network)
    assert isinstance(stepper, FlatStepper)
    stepper.close()


def test_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^algorithm: name: got 'ademamx' \(did you mean 'ademamix'\?\)"):
        algorithm("ademamx")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="betos"):
        algorithm("lamb", betos=3)
