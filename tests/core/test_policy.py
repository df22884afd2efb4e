"""Policies: what they cost, what they refuse, and how they are told apart."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb

# Untyped, to make the mistakes that the type checker refuses.
loose: Any = eb

BYTES = {
    "FP64": 32, "FP32": 16, "MIXED_BF16": 16, "EXACT_BF16": 14, "LEAN_BF16": 10, "KAHAN_BF16": 10, "TIGHT_BF16": 9, "FLOOR_BF16": 8,
    "PURE_BF16": 8, "ANYPRECISION": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter_are_as_documented_and_as_allocated(name: str) -> None:
    policy = eb.policies.PRESETS[name]
    assert policy.bytes_per_param() == BYTES[name]
    assert sum(policy.bytes_table().values()) == BYTES[name]
    dtype: torch.dtype = getattr(torch, policy.model_dtype)
    opt = eb.with_policy(eb.adamw(1e-3, b2=0.95), policy)
    params = {"w": torch.ones(12, 5, dtype=dtype), "b": torch.ones(4, dtype=dtype)}
    grads = eb.tree.map(torch.ones_like, params)
    new, state = opt.step(params, grads, opt.init(params))
    inner: Any = state.inner
    counters = [state.step, inner.step]
    tensors = [x for x in eb.tree.leaves((new, grads, state)) if all(x is not counter for counter in counters)]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == BYTES[name] * 64
    table = opt.bytes_table(params)
    assert table.pop("counters") == 16
    assert {use: size / 64 for use, size in table.items()} == policy.bytes_table()


def test_wider_gradients_and_other_slots_are_counted() -> None:
    mixed = eb.Policy(params=eb.Master(), grads=eb.Grads(main="float32"))
    assert mixed.bytes_per_param() == 18
    assert eb.policies.KAHAN_BF16.bytes_table(slots=("momentum",)) == {
        "parameter": 2, "compensation": 2, "gradient": 2, "momentum": 2,
    }  # fmt: skip
    assert eb.Policy().bytes_per_param(model="float32", slots=()) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: loose.Policy(params="kahan"),
            r"Policy.params: got 'kahan'; accepted are Nearest, Stochastic, Kahan, Split, Master",
        ),
        (lambda: loose.Policy(params="bfloat16"), r"Did you mean Nearest\('bfloat16'\)\?"),
        (
            lambda: loose.Policy(variance=eb.Master()),
            r"Policy.variance: got Master.*accepted are Nearest, Stochastic, Kahan, Split, Blockwise, and .* for parameters only",
        ),
        (lambda: loose.Policy(state=None), r"Policy.state: got None"),
        (lambda: loose.Policy(slots=[1]), r"Policy.slots: got \[1\]; accepted is a mapping"),
        (lambda: loose.Policy(slots={"mean": "float32"}), r"Policy.slots\['mean'\]: got 'float32'"),
        (lambda: loose.Policy(grads="float32"), r"Policy.grads: got 'float32'; accepted is a Grads"),
        (lambda: loose.Policy(momentumm=eb.Nearest()), r"momentumm"),
        (lambda: loose.by_label(lambda path, p: "x", {"x": "FP32"}), r"by_label: policies: got"),
        (lambda: loose.with_policy(eb.adamw(1e-3), 32), r"policy: got 32; accepted are a Policy"),
        (
            lambda: loose.chain(eb.scale_by_adam),
            r"chain, argument 0: got the class ScaleByAdam; accepted are transforms: call",
        ),
        (
            lambda: loose.with_policy("adam", eb.policies.FP32),
            r"with_policy: call the function of that name, everybit.adam\(...\). Got 'adam'",
        ),
        (lambda: loose.with_policy(eb.with_policy(eb.adamw(1e-3), eb.policies.FP32), eb.policies.FP32), r"last word"),
        (lambda: loose.with_policy(eb.adamw(1e-3), eb.policies.FP32, seed=1.5), r"seed: got 1.5"),
    ],
)
def test_fields_of_the_wrong_kind_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: loose.Policy(compute="bfloat16"),
            r"Policy.compute: got 'bfloat16'; accepted are 'float64', 'float32'",
        ),
        (
            lambda: loose.Policy(compute="float64", params=eb.Kahan()),
            r"Policy.params: got Kahan.* with compute='float64'",
        ),
        (lambda: loose.Grads(main="int8"), r"Grads.main: got 'int8'; accepted are 'float64'"),
        (lambda: loose.Grads(reduce="sum"), r"Grads.reduce: got 'sum'; accepted are 'native', 'float32'"),
        (lambda: loose.Nearest("int8"), r"Nearest.dtype: got 'int8'"),
        (lambda: loose.Stochastic("float32"), r"Stochastic.dtype: got 'float32'; accepted are 'bfloat16', 'float16'"),
        (lambda: loose.with_policy(eb.adamw(1e-3), eb.policies.FP32, unsafe="maybe"), r"unsafe: got 'maybe'"),
    ],
)
def test_values_out_of_their_sets_are_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("format", [eb.Split(16), eb.Split(8), eb.Kahan(), eb.Stochastic(), eb.Master()])
def test_formats_that_split_a_number_are_refused_over_float32(format: Any) -> None:
    opt = eb.with_policy(eb.sgd(0.1), eb.Policy(params=format))
    with pytest.raises(
        ValueError, match=r"params\['w'\]: Policy.params: .* got a float32 tensor.* Accepted are bfloat16 and float16"
    ):
        opt.init({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("policy", "dtype", "message"),
    [
        (
            eb.policies.FP32,
            torch.bfloat16,
            r"stores parameters as torch.float32, but the parameter is torch.bfloat16.*KAHAN_BF16",
        ),
        (eb.policies.FP32, torch.float64, r"policies.FP64"),
        (eb.Policy(), torch.float64, r"Policy.compute: got 'float32' for float64 parameters"),
        (eb.policies.FP64, torch.float32, r"policies.FP32"),
    ],
)
def test_a_policy_for_another_model_is_refused(policy: eb.Policy, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eb.with_policy(eb.sgd(0.1), policy).init({"w": torch.ones(2, dtype=dtype)})


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse(), 3.0, "w"],
)
def test_parameters_that_are_no_floating_point_tensors_are_refused(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"params\['w'\]: "):
        eb.with_policy(eb.sgd(0.1), eb.Policy()).init({"w": leaf})


def test_labels_choose_policies_and_a_label_without_one_is_refused() -> None:
    labels = lambda path, p: "matrix" if p.ndim > 1 else "vector"  # noqa: E731
    policy = eb.by_label(labels, {"matrix": eb.policies.LEAN_BF16, "vector": eb.policies.EXACT_BF16})
    opt = eb.with_policy(eb.adamw(1e-3), policy)
    params = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.bfloat16)}
    state: Any = opt.init(params)
    variance = state.inner.states[0].variance
    assert (variance["w"].dtype, variance["b"].dtype) == (torch.bfloat16, torch.float32)
    assert opt.cut == "tensor"
    partial = eb.with_policy(eb.adamw(1e-3), eb.by_label(labels, {"matrix": eb.policies.LEAN_BF16}))
    with pytest.raises(
        ValueError, match=r"params\['b'\]: labelled 'vector', for which by_label has no policy; it has one for 'matrix'"
    ):
        partial.init(params)


@pytest.mark.parametrize("made_by", ["KAHAN_BF16", "EXACT_BF16", "FLOOR_BF16"])
def test_the_state_of_another_policy_is_refused_by_path_and_nothing_changes(made_by: str) -> None:
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    other = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[made_by]).init(params)
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.LEAN_BF16)
    leaves = eb.tree.leaves((params, other))
    before = [leaf.clone() for leaf in leaves]
    with pytest.raises(
        ValueError, match=r"(params|state\.\w+)\['w'\]: stored as .*this state was made under another policy"
    ):
        opt.step(params, params, other)
    assert all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))


BAD_GRADIENTS: list[tuple[Any, type[Exception], str]] = [
    ({"w": 1.0, "b": [torch.ones(2)]}, ValueError, r"grads\['w'\]: got 1.0; accepted are tensors"),
    ({"w": torch.ones(3)}, ValueError, r"grads: structure differs from params: no tensor at grads\['b'\]\[0\]"),
    ({"w": torch.ones(3), "b": [None]}, ValueError, r"no tensor at grads\['b'\]\[0\]"),
    ({"w": torch.ones(3), "b": [torch.ones(2)], "c": torch.ones(1)}, ValueError, r"unexpected grads\['c'\]"),
    (
        {"w": torch.ones(4), "b": [torch.ones(2)]},
        ValueError,
        r"grads\['w'\]: shape \(4,\), but params\['w'\] has \(3,\)",
    ),
    (
        {"w": torch.ones(3, dtype=torch.complex64), "b": [torch.ones(2)]},
        TypeError,
        r"grads\['w'\]: got torch.complex64",
    ),
    ({"w": torch.ones(3), "b": [torch.ones(2, dtype=torch.int64)]}, TypeError, r"grads\['b'\]\[0\]: got torch.int64"),
    ({"w": torch.ones(3).to_sparse(), "b": [torch.ones(2)]}, TypeError, r"grads\['w'\]: got a torch.sparse_coo tensor"),
    (
        {"w": torch.ones(3, dtype=torch.float64), "b": [torch.ones(2)]},
        TypeError,
        r"grads\['w'\]: got torch.float64 with Policy.compute",
    ),
]


@pytest.mark.parametrize(("grads", "error", "message"), BAD_GRADIENTS)
def test_gradients_that_do_not_fit_are_refused_by_path(grads: Any, error: type[Exception], message: str) -> None:
    params: dict[str, Any] = {"w": torch.ones(3), "b": [torch.ones(2)]}
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32)
    state = opt.init(params)
    leaves = eb.tree.leaves((params, state))
    versions = [leaf._version for leaf in leaves]
    with pytest.raises(error, match=message):
        opt.step(params, grads, state)
    assert [leaf._version for leaf in leaves] == versions


def test_policies_and_formats_are_values() -> None:
    for policy in eb.policies.PRESETS.values():
        assert pickle.loads(pickle.dumps(policy)) == policy
        assert copy.deepcopy(policy) == policy
        assert hash(copy.deepcopy(policy)) == hash(policy)
    assert eb.policies.LEAN_BF16 != eb.policies.KAHAN_BF16
    assert eb.Policy(slots={"mean": eb.Kahan()}) == eb.Policy(slots={"mean": eb.Kahan()})
    assert eb.Policy(slots={"mean": eb.Kahan()}) != eb.Policy()


def test_a_policys_slots_cannot_be_changed_through_what_they_were_made_from() -> None:
    slots: dict[str, eb.StateFormat] = {"mean": eb.Kahan()}
    policy = eb.Policy(slots=slots)
    slots["mean"] = eb.Nearest()
    assert policy.slot("mean") == eb.Kahan()


@pytest.mark.parametrize("name", ["MIXED_BF16", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16"])
def test_full_precision_weights_go_out_and_come_in(name: str) -> None:
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[name])
    weights = {"w": torch.linspace(-3, 3, 101)}
    params = {"w": torch.zeros(101, dtype=torch.bfloat16)}
    new, state = opt.import_fp32(weights, params)
    # Of the format: exact, 2**-17 (doubled where stochastic), or one bfloat16 rounding.
    bound = {
        "MIXED_BF16": 0.0,
        "EXACT_BF16": 0.0,
        "LEAN_BF16": 0.0,
        "KAHAN_BF16": 2.0**-17,
        "TIGHT_BF16": 2.0**-15,
        "FLOOR_BF16": 2.0**-7,
    }
    error = (opt.export_fp32(new, state)["w"] - weights["w"]).abs()
    assert (error <= bound[name] * weights["w"].abs()).all()
    assert new["w"].dtype is torch.bfloat16
    stepped, later = opt.step(new, {"w": torch.ones(101)}, state)
    _, kept = opt.import_fp32(weights, stepped, later)
    assert int(kept.step) == 1
    inner: Any = kept.inner
    previous: Any = later.inner
    assert torch.equal(_first(inner.states[0].momentum["w"]), _first(previous.states[0].momentum["w"]))
    with pytest.raises(ValueError, match=r"weights\['w'\]: shape \(3,\)"):
        opt.import_fp32({"w": torch.ones(3)}, params)


def _first(stored: Any) -> Tensor:
    found: Tensor = stored[0] if isinstance(stored, tuple) else stored
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_gradient_rounded_in_the_same_compiled_function_is_rounded(dtype: torch.dtype) -> None:
    opt = eb.with_policy(eb.sgd(0.1), eb.policies.EXACT_BF16)
    params = torch.zeros(1000, dtype=dtype)
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    state = opt.init(params)

    def step(grad: Tensor) -> tuple[Tensor, Any]:
        return opt.step(params, grad.to(dtype), state)

    eager, compiled = step(grad), torch.compile(step, fullgraph=True)(grad)
    assert all(torch.equal(a, b) for a, b in zip(eb.tree.leaves(eager), eb.tree.leaves(compiled), strict=True))
