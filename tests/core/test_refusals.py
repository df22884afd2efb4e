"""What an optimizer refuses, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everybit as eb

BF16 = torch.bfloat16


def frozen(*trees: Any) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Version, value and tensor of every leaf."""
    return [(leaf._version, leaf.clone(), leaf) for leaf in eb.tree.leaves(trees) if isinstance(leaf, torch.Tensor)]


def assert_untouched(before: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Nobody has written to these leaves since."""
    for version, value, leaf in before:
        assert leaf._version == version
        assert torch.equal(leaf, value)


@pytest.mark.parametrize(
    ("made_by", "given_to", "where"),
    [
        ("EXACT_BF16", "KAHAN_BF16", r"params\['w'\]"),
        ("KAHAN_BF16", "EXACT_BF16", r"params\['w'\]"),
        ("FLOOR_BF16", "LEAN_BF16", r"params\['w'\]"),
        ("LEAN_BF16", "FLOOR_BF16", r"params\['w'\]"),
        ("MIXED_BF16", "TIGHT_BF16", r"params\['w'\]"),
        ("EXACT_BF16", "LEAN_BF16", r"state\.momentum\['w'\]"),
    ],
)
def test_a_state_made_under_another_policy_is_refused_and_the_way_across_named(
    made_by: str, given_to: str, where: str
) -> None:
    params, grads = {"w": torch.ones(4, dtype=BF16)}, {"w": torch.ones(4)}
    state = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[made_by]).init(params)
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[given_to])
    before = frozen(params, grads, state)
    with pytest.raises(ValueError, match=rf"{where}: stored as .*under another policy.*export_fp32 and import_fp32"):
        opt.step(params, grads, state)
    if where.startswith("params"):
        with pytest.raises(ValueError, match=rf"{where}: stored as .*under another policy"):
            opt.export_fp32(params, state)
    assert_untouched(before)


def test_a_state_made_for_other_parameters_is_refused() -> None:
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.EXACT_BF16)
    params, grads = {"w": torch.ones(4, dtype=BF16)}, {"w": torch.ones(4)}
    with pytest.raises(ValueError, match=r"params\['w'\]: stored as .*\(3,\).*for other parameters"):
        opt.step(params, grads, opt.init({"w": torch.ones(3, dtype=BF16)}))
    with pytest.raises(ValueError, match=r"state\.extra: structure differs from params"):
        opt.step(params, grads, opt.init({"v": torch.ones(4, dtype=BF16)}))


@pytest.mark.parametrize(
    ("dtype", "accepted"),
    [(torch.bool, "real floating-point"), (torch.uint8, "real floating-point"), (torch.float8_e5m2, "float32")],
)
@pytest.mark.parametrize("preset", ["FP32", "KAHAN_BF16"])
def test_gradients_of_other_dtypes_are_refused(dtype: torch.dtype, accepted: str, preset: str) -> None:
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[preset])
    params = [torch.ones(3, dtype=torch.float32 if preset == "FP32" else BF16)]
    grads, state = [torch.zeros(3).to(dtype)], opt.init(params)
    before = frozen(params, state)
    with pytest.raises(TypeError, match=rf"grads.*got {dtype}.*accepted are.*{accepted}"):
        opt.step(params, grads, state)
    assert_untouched(before)


@pytest.mark.parametrize("preset", ["EXACT_BF16", "KAHAN_BF16", "TIGHT_BF16", "FLOOR_BF16", "MIXED_BF16"])
def test_float64_among_16_bit_parameters_is_refused_by_path_and_float32_stays(preset: str) -> None:
    opt = eb.with_policy(eb.adamw(1e-3), eb.policies.PRESETS[preset])
    params = {"layer": [torch.ones(2, dtype=BF16), torch.ones(2)]}
    with pytest.raises(ValueError, match=r"params\['layer'\]\[1\]: Policy\.params: .*got a float64 tensor.*by_label"):
        opt.init({"layer": [params["layer"][0], params["layer"][1].double()]})
    stepped, _ = opt.step(params, {"layer": [torch.ones(2, dtype=BF16), torch.ones(2)]}, opt.init(params))
    assert [x.dtype for x in stepped["layer"]] == [BF16, torch.float32]
    # AdamW's first step is the learning rate, and the decay is 1e-2 of that: a few roundings of float32 away, and not one of bfloat16.
    torch.testing.assert_close(stepped["layer"][1], torch.full((2,), 1 - 1e-3 - 1e-5), rtol=4 * 2.0**-24, atol=0)


@pytest.mark.parametrize("label", ["c", None, 3])
def test_an_unknown_label_is_refused_by_path(label: Any) -> None:
    policies = {"a": eb.policies.FP32, "b": eb.policies.FP32}
    opt = eb.with_policy(eb.sgd(0.1), eb.by_label(lambda path, p: label, policies))
    with pytest.raises(ValueError, match=rf"params\['w'\]: labelled {label!r}.*it has one for 'a', 'b'"):
        opt.init({"w": torch.ones(2)})


def test_labels_are_a_prefix_of_the_parameters() -> None:
    policies = {"wide": eb.policies.FP32, "low": eb.policies.EXACT_BF16}
    params = {"a": [torch.ones(2), torch.ones(3)], "b": torch.ones(2, dtype=BF16)}
    opt = eb.with_policy(eb.sgd(0.1), eb.by_label({"a": "wide", "b": "low"}, policies))
    extra = opt.init(params).extra
    assert extra["a"] == [(), ()]
    assert [part.dtype for part in extra["b"]] == [torch.int16]
    with pytest.raises(ValueError, match="labels: not a prefix"):
        opt.init({"w": torch.ones(2)})


@pytest.mark.parametrize(
    "fields", [{"variance": eb.Stochastic()}, {"slots": {"ema": eb.Split()}}, {"params": eb.Master()}]
)
def test_float64_goes_with_formats_that_hold_it(fields: dict[str, Any]) -> None:
    everything_else = {"params": eb.Nearest("float64")} | fields
    with pytest.raises(
        ValueError, match=r"Policy\.\w+.*: got .* with compute='float64'.*Accepted with float64 are Nearest, and Master"
    ):
        eb.Policy(compute="float64", **everything_else)
