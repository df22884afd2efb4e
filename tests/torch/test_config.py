"""Policies as plain data: out, in, and every mistake by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch.config import load_policy, policy_from_dict, policy_to_dict, save_policy
from tests.support.block_formats import Int8Blocks, Int8Residual

POLICIES = [
    *eb.policies.PRESETS.values(),
    eb.Policy(
        slots={"mean": eb.Kahan("float16", "stochastic")},
        grads=eb.Grads(main="float32", comm="bfloat16", reduce="float32"),
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_dict_and_json(policy: eb.Policy, tmp_path: Path) -> None:
    assert policy_from_dict(policy_to_dict(policy)) == policy
    save_policy(policy, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


def test_a_format_of_ones_own_is_not_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    for policy, field in (
        (eb.Policy(params=Int8Residual()), "Policy.params"),
        (eb.Policy(slots={"mean": Int8Blocks()}), "Policy.slots.mean"),
    ):
        with pytest.raises(
            ValueError, match=rf"{field}: got Int8.*a format of your own.*accepted are Nearest, Stochastic"
        ):
            save_policy(policy, file)
    assert not file.exists()


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
        (
            {"momentumm": "Nearest"},
            r"^Policy.momentumm: there is no such field \(did you mean 'momentum'\?\); fields are compute, params",
        ),
        (
            {"params": "Karhan"},
            r"^Policy.params: got 'Karhan' \(did you mean 'Kahan'\?\); accepted is a table with format = one of Nearest",
        ),
        (
            {"params": {"format": "Kahan", "residul": "bfloat16"}},
            r"^Policy.params.residul: there is no such field \(did you mean 'residual'\?\)",
        ),
        (
            {"params": {"format": "Kahan", "residual": "int8"}},
            r"^Policy.params.residual: got 'int8'; accepted is 'bfloat16'",
        ),
        (
            {"variance": "Master"},
            r"^Policy.variance: got 'Master'; accepted is a table with format = one of Nearest, Stochastic, Kahan, Split,",
        ),
        ({"params": {"format": "Split", "bits": 12}}, r"^Policy.params.bits: got 12; accepted is 8, 16"),
        (
            {"grads": {"main": "float31"}},
            r"^Policy.grads.main: got 'float31' \(did you mean 'float32'\?\); accepted is 'float64'",
        ),
        ({"grads": "float32"}, r"Policy.grads: got 'float32'; accepted is a table with main, comm, reduce"),
        ({"compute": "bfloat16"}, r"Policy.compute: got 'bfloat16'; accepted is"),
        ({"slots": ["mean"]}, r"Policy.slots: got \['mean'\]"),
        ({"slots": {3: "Nearest"}}, r"^Policy.slots: got 3 as a name"),
        (
            {"params": {"format": []}},
            r"Policy.params: got \{'format': \[\]\}; accepted is a table with format = one of",
        ),
        (
            {"params": {"format": {}}},
            r"Policy.params: got \{'format': \{\}\}; accepted is a table with format = one of",
        ),
        ({"params": {"format": "Split", "bits": 8.0}}, r"^Policy.params.bits: got 8.0; accepted is 8, 16"),
        ({"params": {"format": "Split", "bits": True}}, r"^Policy.params.bits: got True; accepted is 8, 16"),
        (
            {"params": {"format": "Kahan", "residual": None}},
            r"^Policy.params.residual: got None; accepted is 'bfloat16'",
        ),
        (
            {"params": {"format": "Kahan", "value": ["bfloat16"]}},
            r"^Policy.params.value: got \['bfloat16'\]; accepted",
        ),
        ({"compute": None}, r"Policy.compute: got None; accepted is"),
        ({"compute": ["float32"]}, r"Policy.compute: got \['float32'\]; accepted is"),
        ({"grads": {"reduce": {}}}, r"^Policy.grads.reduce: got \{\}; accepted is 'native', 'float32'"),
        ({"grads": None}, r"Policy.grads: got None; accepted is a table with main, comm, reduce"),
        ({1: 2}, r"^Policy.1: there is no such field; fields are compute"),
        (None, r"Policy: got None; accepted is a table with compute"),
        ([], r"Policy: got \[\]; accepted is a table with compute"),
        ("LEAN_BF16", r"Policy: got 'LEAN_BF16'; accepted is a table with compute"),
    ],
)
def test_mistakes_are_named(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_from_dict(data)


def test_files_that_are_no_policies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ini").write_text("params: Kahan")
    (tmp_path / "b.toml").write_text("params = ")
    (tmp_path / "c.json").write_text("[1]")
    for name, message in (
        ("a.ini", r"got a .ini file; accepted are .toml, .json, .yaml, .yml"),
        ("b.toml", r"b.toml: "),
        ("c.json", r"c.json: Policy: got \[1\]; accepted is a table with compute"),
    ):
        with pytest.raises(ValueError, match=message):
            load_policy(tmp_path / name)
    with pytest.raises(ValueError, match=r"d.ini: got a .ini file; accepted are .toml, .json"):
        save_policy(eb.policies.FP32, tmp_path / "d.ini")


def test_files_nested_without_end_are_refused(tmp_path: Path) -> None:
    depth = 100_000
    (tmp_path / "a.json").write_text('{"params": ' + "[" * depth + "]" * depth + "}")
    (tmp_path / "b.json").write_text('{"params": ' * depth + "1" + "}" * depth)
    (tmp_path / "c.toml").write_text("params = " + "[" * depth + "]" * depth)
    for name in ("a.json", "b.json", "c.toml"):
        with pytest.raises(ValueError, match=rf"{name}: is nested too deeply; accepted is a table of fields"):
            load_policy(tmp_path / name)


def test_a_field_that_comes_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"params": "Kahan", "params": "Nearest"}')
    with pytest.raises(ValueError, match=r"a.json: 'params' comes twice in one table"):
        load_policy(tmp_path / "a.json")


# -- fuzzing -------------------------------------------------------------------------------------------------------------------------


def deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


JUNK: list[Any] = [
    None, True, 0, 1, 8.0, 16.0, -1, 10**400, float("nan"), float("inf"), "", "float32", "bfloat16", "int8", "Kahan", "Split", "Master",
    "nearest", "\x00", "x" * 10_000, b"Kahan", [],
    ["bfloat16"], {}, {"format": "Nearest"}, {"format": None}, {"format": ["Kahan"]},
    {"format": {"format": "Kahan"}}, deep(100_000), {"": deep(5_000)}, (), {1, 2}, object(), eb.Kahan(), eb.Kahan, eb.Grads(),
    eb.policies.FP32,
]  # fmt: skip


def mutated(value: Any, random: Random) -> Any:
    """A copy in which one thing is another, somewhere."""
    if not isinstance(value, dict) or not value or random.random() < 0.25:
        return random.choice(JUNK)
    copy, key = dict(value), random.choice(list(value))
    what = random.random()
    if what < 0.1:
        copy[random.choice([*JUNK[:15], "params", "format", "dtype", "bits"])] = copy.pop(key)
    elif what < 0.2:
        del copy[key]
    elif what < 0.3:
        copy[random.choice(["params", "slots", "format", "residual", "bits", "rounding", 3, None])] = random.choice(
            JUNK
        )
    else:
        copy[key] = mutated(copy[key], random)
    return copy


def is_refused_or_works(read: Callable[[], eb.Policy], name: str) -> bool:
    """Whether a policy was accepted; one that is can be written, read and stepped with, and an error is a ValueError that names a field."""
    try:
        policy, said = read(), None
    except ValueError as error:
        policy, said = None, str(error)
    if policy is None:
        assert said is not None
        assert said.startswith(name)
        assert len(said) < 2000
        return False
    assert repr(policy_from_dict(policy_to_dict(policy))) == repr(policy)
    parameter = torch.zeros(3, dtype=getattr(torch, policy.model_dtype))
    try:
        optimizer = eb.with_policy(eb.adamw(1e-3), policy, unsafe="allow")
        state = optimizer.init([parameter])
    except ValueError:  # of formats that do not go with the parameter
        return True
    optimizer.step([parameter], [torch.ones_like(parameter)], state)
    return True


def test_thousands_of_damaged_tables_are_refused_by_field_or_work() -> None:
    random, accepted = Random(20), 0
    for number in range(2000):
        data = mutated(policy_to_dict(POLICIES[number % len(POLICIES)]), random)
        accepted += is_refused_or_works(lambda data=data: policy_from_dict(data), "Policy")  # type: ignore[misc]
    assert accepted > 100  # what is left out has its default


TOML = """
compute = "float32"
params = { format = "Kahan", residual = "bfloat16", rounding = "stochastic" }
momentum = { format = "Nearest", dtype = "bfloat16" }
variance = "Stochastic"
[slots]
mean = { format = "Split", bits = 16 }
[grads]
main = "float32"
"""


def test_a_thousand_damaged_files_are_refused_by_name_or_work(tmp_path: Path) -> None:
    random, accepted = Random(21), 0
    texts = {"a.toml": TOML.encode(), "b.json": json.dumps(policy_to_dict(POLICIES[-1])).encode()}
    for name, text in texts.items():
        path = tmp_path / name
        for _ in range(500):
            damaged = bytearray(text)
            for _ in range(random.choice([1, 1, 2, 8])):
                at = random.randrange(len(damaged) + 1)
                what = random.random()
                if what < 0.4 and at < len(damaged):
                    damaged[at] ^= 1 << random.randrange(8)
                elif what < 0.7:
                    damaged[at : at + random.randrange(6)] = b""
                else:
                    damaged[at:at] = random.choice(
                        [b"[", b"]", b"{", b"}", b'"', b"=", b"1e999", b"\xff", b"null", b"\n", b"NaN", b"[" * 3000]
                    )
            path.write_bytes(damaged)
            accepted += is_refused_or_works(lambda path=path: load_policy(path), str(path))  # type: ignore[misc]
    assert accepted
