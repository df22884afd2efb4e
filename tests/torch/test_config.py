"""Policies as plain data: out, in, and every mistake by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everybit as eb
from everybit_torch.config import load_policy, policy_from_dict, policy_to_dict, save_policy

POLICIES = [
    *eb.policies.PRESETS.values(),
    eb.Policy(
        slots={"mean": eb.Kahan("float16", "stochastic")},
        grads=eb.Grads(main="float32", comm="bfloat16", reduce="fp32"),
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_dict_and_json(policy: eb.Policy, tmp_path: Path) -> None:
    assert policy_from_dict(policy_to_dict(policy)) == policy
    save_policy(policy, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


def test_toml_is_read_and_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(
        'params = { format = "Kahan", rounding = "stochastic" }\nvariance = "Stochastic"\n[grads]\nmain = "float32"\n'
    )
    assert load_policy(file) == eb.Policy(
        params=eb.Kahan(rounding="stochastic"), variance=eb.Stochastic(), grads=eb.Grads(main="float32")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"momentumm": "Nearest"}, r"Policy: no field is called 'momentumm'; fields are compute, params"),
        (
            {"params": "Karhan"},
            r"Policy.params: got \{'format': 'Karhan'\}; accepted is a table with format = one of Nearest",
        ),
        ({"params": {"format": "Kahan", "residul": "bfloat16"}}, r"Policy.params: no field is called 'residul'"),
        ({"params": {"format": "Kahan", "residual": "int8"}}, r"Policy.params: .*got 'int8'; accepted are 'bfloat16'"),
        ({"variance": "Master"}, r"Policy.variance: got Master.*Master keeps a copy of parameters only"),
        ({"params": {"format": "Split", "bits": 12}}, r"Policy.params: .*12"),
        ({"grads": {"main": "float31"}}, r"Policy.grads: .*got 'float31'; accepted are 'float64'"),
        ({"grads": "float32"}, r"Policy.grads: got 'float32'; accepted is a table with main, comm, reduce"),
        ({"compute": "bfloat16"}, r"Policy.compute: got 'bfloat16'; accepted are"),
        ({"slots": ["mean"]}, r"Policy.slots: got \['mean'\]"),
    ],
)
def test_mistakes_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_from_dict(data)


def test_files_that_are_no_policies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("params: Kahan")
    (tmp_path / "b.toml").write_text("params = ")
    (tmp_path / "c.json").write_text("[1]")
    for name, message in (
        ("a.yaml", r"accepted are .toml and .json"),
        ("b.toml", r"b.toml: "),
        ("c.json", r"got list; accepted"),
    ):
        with pytest.raises(ValueError, match=message):
            load_policy(tmp_path / name)
    with pytest.raises(ValueError, match=r"accepted is .json"):
        save_policy(eb.policies.FP32, tmp_path / "d.toml")
