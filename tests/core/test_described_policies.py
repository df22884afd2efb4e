"""Policies in messages, and what to write where a tree of parameters was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import everybit as eb
from everybit.policies import describe
from everybit.policies.presets import PRESETS


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_preset_goes_by_its_name(name: str) -> None:
    assert describe(PRESETS[name]) == name
    assert (
        describe(eb.Policy(**{field: getattr(PRESETS[name], field) for field in PRESETS[name].__dataclass_fields__}))
        == name
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            eb.Policy(params=eb.Split(16), momentum=eb.Nearest("float32"), variance=eb.Stochastic("bfloat16")),
            "LEAN_BF16 with momentum=Nearest('float32')",
        ),
        (eb.Policy(params=eb.Kahan(residual="float16")), "EXACT_BF16 with params=Kahan('float16')"),
        (eb.Policy(params=eb.Kahan(), slots={"mean": eb.Split(8)}), None),
        (eb.Policy(params=eb.Split(16), grads=eb.Grads(main="float32")), "EXACT_BF16 with grads=Grads(main='float32')"),
        (eb.Policy(params=eb.Split(8, rounding="nearest", value="float16")), None),
    ],
)
def test_another_policy_goes_by_a_preset_and_what_differs(policy: eb.Policy, expected: str | None) -> None:
    text = describe(policy)
    if expected is not None:
        assert text == expected
    # What it says is true: the preset with these fields replaced is the policy.
    preset, _, differences = text.partition(" with ")
    names: dict[str, Any] = {
        name: getattr(eb, name) for name in ("Split", "Kahan", "Nearest", "Stochastic", "Master", "Grads")
    }
    changed = eval(f"dict({differences})", names)
    fields = {field: getattr(PRESETS[preset], field) for field in PRESETS[preset].__dataclass_fields__}
    assert eb.Policy(**(fields | changed)) == policy


def test_policies_by_label_are_listed_and_anything_else_is_shown_as_it_is() -> None:
    policy = eb.by_label(lambda path, p: "a", {"a": PRESETS["LEAN_BF16"], "b": PRESETS["FP32"]})
    assert describe(policy) == "by_label(a: LEAN_BF16, b: FP32)"
    assert describe("LEAN_BF16") == "'LEAN_BF16'"


def test_what_is_no_tree_of_parameters_is_told_how_to_be_one() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = eb.with_policy(eb.adamw(1e-3), eb.policies.FP32)
    wrong: list[Any] = [model.named_parameters(), model.parameters(), list(model.named_parameters()), model]
    for given in wrong:
        for use in (optimizer.init, optimizer.bytes_table):
            with pytest.raises(
                TypeError, match=r"The parameters of a model, as a tree: dict\(model.named_parameters\(\)\)"
            ):
                use(given)
    assert len(eb.tree.leaves(optimizer.init(dict(model.named_parameters())))) > 0


@pytest.mark.parametrize("spelling", [torch.bfloat16, "bf16", "torch.bfloat16", "BFloat16"])
def test_a_dtype_has_one_name_and_others_are_accepted_for_it(spelling: Any) -> None:
    short = {"bf16": "fp32", torch.bfloat16: torch.float32}.get(spelling, "torch.float32")
    given: Any = short
    policy = eb.Policy(
        compute=given,
        params=eb.Kahan(residual=spelling),
        momentum=eb.Nearest(spelling),
        variance=eb.Stochastic(spelling),
        slots={"average": eb.Blockwise(scale=spelling)},
        grads=eb.Grads(main=given, comm=spelling, reduce=given),
    )
    assert policy == eb.Policy(
        compute="float32",
        params=eb.Kahan(residual="bfloat16"),
        momentum=eb.Nearest("bfloat16"),
        variance=eb.Stochastic("bfloat16"),
        slots={"average": eb.Blockwise(scale="bfloat16")},
        grads=eb.Grads(main="float32", comm="bfloat16", reduce="float32"),
    )
    assert eb.Master(given, value=spelling) == eb.Master("float32", value="bfloat16")
    assert eb.Split(8, value=spelling) == eb.Split(8, value="bfloat16")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: eb.Kahan(residual=None), r"Kahan\.residual"),  # type: ignore[arg-type]
        (lambda: eb.Master(None), r"Master\.dtype"),  # type: ignore[arg-type]
        (lambda: eb.Blockwise(scale=None), r"Blockwise\.scale"),  # type: ignore[arg-type]
        (lambda: eb.Policy(compute=None), r"Policy\.compute"),  # type: ignore[arg-type]
        (lambda: eb.Grads(reduce=None), r"Grads\.reduce"),  # type: ignore[arg-type]
    ],
)
def test_a_dtype_that_has_to_be_named_is_not_none(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: got None"):
        make()
