"""Presets, and policies beside them: what they cost, as documented and as allocated, and that they are plain values."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

import everybit as eb
from everybit.base import DTYPES, LOW_DTYPES, FloatDType
from everybit.policies import resolve

PRESETS = eb.policies.PRESETS


def storages(tree: object) -> dict[int, int]:
    """Bytes really allocated for a tree of tensors, by address; counters, which are 0-d, left out."""
    leaves = [leaf for leaf in eb.tree.leaves(tree) if leaf.ndim > 0]
    return {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}


def bytes_allocated(policy: eb.Policy, model: FloatDType) -> float:
    """Bytes per parameter of parameters, gradients and state after a real step."""
    opt = eb.with_policy(eb.adamw(1e-3), policy, unsafe="allow")
    params = {name: torch.ones(shape, dtype=DTYPES[model]) for name, shape in {"a": (32, 16), "b": (256,)}.items()}
    main = DTYPES[resolve(policy, model).grads_main]
    grads = eb.tree.map(lambda p: torch.ones_like(p, dtype=main), params)
    params, state = opt.step(params, grads, opt.init(params))
    return sum(storages((params, grads, state)).values()) / eb.tree.size(params)


@pytest.mark.parametrize("name", PRESETS)
def test_the_documented_bytes_are_those_computed_and_those_allocated(name: str) -> None:
    documented = re.search(rf"``{name}`` +\| +([\d.]+) ", str(eb.policies.__doc__))
    assert documented is not None
    policy = PRESETS[name]
    # Scales of blocks take a fraction of a byte.
    assert policy.bytes_per_param() == bytes_allocated(policy, policy.model_dtype)
    assert f"{policy.bytes_per_param():.3g}" == documented[1]


@pytest.mark.parametrize(
    ("policy", "model", "total"),
    [
        (replace(eb.policies.MIXED_BF16, grads=eb.Grads(main="float32")), "bfloat16", 18),
        (replace(eb.policies.LEAN_BF16, grads=eb.Grads(main="float32")), "bfloat16", 12),
        (eb.policies.LEAN_BF16, "float16", 10),
        (eb.Policy(params=eb.Kahan("float32"), variance=eb.Kahan("float16")), "float16", 2 + 4 + 2 + 4 + (2 + 2)),
        (eb.Policy(params=eb.Split(8), momentum=eb.Split(8), variance=eb.Split(16)), "bfloat16", 2 + 1 + 2 + 3 + 4),
        (eb.Policy(slots={"momentum": eb.Nearest("float16")}), "bfloat16", 2 + 2 + 2 + 4),
    ],
)
def test_bytes_follow_every_field(policy: eb.Policy, model: FloatDType, total: int) -> None:
    assert policy.bytes_per_param(model=model) == total == bytes_allocated(policy, model)


def test_presets_are_found_by_name() -> None:
    for name, policy in PRESETS.items():
        assert getattr(eb.policies, name) is policy


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_step_returns_shares_no_memory_with_what_it_was_given(name: str) -> None:
    opt = eb.with_policy(eb.adamw(1e-3), PRESETS[name], unsafe="allow")
    params = torch.ones(8, dtype=DTYPES[PRESETS[name].model_dtype])
    grads, state = torch.ones_like(params), opt.init(params)
    assert not storages(params).keys() & storages(state).keys()
    assert not storages((params, grads, state)).keys() & storages(opt.step(params, grads, state)).keys()
    exported = opt.export_fp32(params, state)
    assert not storages((params, state)).keys() & storages(exported).keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_is_a_value(name: str) -> None:
    policy = PRESETS[name]
    for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), eval(repr(policy), vars(eb))):
        assert twin == policy
        assert hash(twin) == hash(policy)
    assert [other for other, one in PRESETS.items() if one == policy] == [name]
    with pytest.raises(FrozenInstanceError):
        policy.compute = "float64"  # type: ignore[misc]


def test_slots_by_name_come_before_kinds_and_kinds_before_the_rest() -> None:
    policy = eb.Policy(
        momentum=eb.Kahan(), state=eb.Split(), slots={"momentum": eb.Nearest("float16"), "x": eb.Kahan()}
    )
    assert policy.slot("momentum") == eb.Nearest("float16")
    assert policy.slot("x") == eb.Kahan()
    assert policy.slot("variance") == eb.Nearest("float32")
    assert policy.slot("anything else") == eb.Split()
    assert hash(policy) == hash(copy.deepcopy(policy))
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_what_is_left_open_is_the_models_dtype_for_parameters_and_for_state_float32_or_bfloat16() -> None:
    resolved = resolve(eb.Policy(params=eb.Kahan(), momentum=eb.Nearest(), variance=eb.Kahan()), "float16")
    assert resolved.params == eb.Kahan(value="float16")
    assert resolved.grads_main == "float16"
    assert resolved.slot("momentum") == eb.Nearest("float32")
    assert resolved.slot("variance") == eb.Kahan(value="bfloat16")


def test_the_native_policy_stores_all_as_the_model_is_and_16_bits_have_none() -> None:
    assert eb.policies.native("float32") is eb.policies.FP32
    assert eb.policies.native("float64") is eb.policies.FP64
    for low in LOW_DTYPES:
        with pytest.raises(ValueError, match=rf"policy: parameters are {low}.*KAHAN_BF16.*PURE_BF16"):
            eb.policies.native(low)
