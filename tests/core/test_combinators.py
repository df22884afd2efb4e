"""How transforms are put together."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit import testing


def params() -> dict[str, Any]:
    return {"layer": {"w": torch.ones(2, 3), "b": torch.ones(3)}, "scale": torch.ones(())}


def grads(step: int) -> dict[str, Any]:
    return testing.example_grads(params(), step)


def step(transform: Any, updates: Any, state: Any = None, at: Any = None) -> tuple[Any, Any]:
    values = params() if at is None else at
    return transform.update(updates, transform.init(values) if state is None else state, values)  # type: ignore[no-any-return]


# chain, named_chain


def test_chain_applies_left_to_right_and_counts_once() -> None:
    transform = eb.chain(eb.clip(1.0), eb.scale(-2.0), eb.chain(eb.trace(0.5), eb.identity()))
    g = torch.tensor([3.0, 0.25])
    updates, state = step(transform, g, at=g)
    assert updates.tolist() == [-2.0, -0.5]
    updates, state = step(transform, g, state, at=g)
    assert updates.tolist() == [-3.0, -0.75]
    assert state.step.item() == 2
    assert state.step.dtype is torch.int64
    assert state.states[2].step.item() == 2


def test_an_empty_chain_passes_updates_on() -> None:
    g = grads(1)
    assert (eb.chain().cut, eb.chain().reduces) == ("element", False)
    testing.assert_same_bits(step(eb.chain(), g)[0], g, "updates")


def promises(transform: eb.Transform[Any]) -> tuple[str, bool]:
    return transform.cut, transform.reduces


def test_a_chain_is_cut_as_coarsely_as_its_parts_and_reduces_if_one_does() -> None:
    element, tensor, whole = eb.scale_by_adam(), eb.masked(eb.trace(), True), eb.clip_by_global_norm(1.0)
    assert promises(eb.chain(element, element)) == ("element", False)
    assert promises(eb.chain(element, tensor)) == ("tensor", False)
    assert promises(eb.chain(whole, element)) == ("element", True)
    assert promises(eb.named_chain({"a": tensor, "b": whole})) == ("tensor", True)
    assert promises(eb.partition({"a": element}, "a")) == ("tensor", False)
    assert promises(eb.masked(whole, {"a": True})) == ("tensor", True)
    assert promises(eb.accumulate(element, 2)) == ("element", False)
    assert promises(eb.accumulate(whole, 2)) == ("element", True)
    assert promises(eb.apply_if_finite(element)) == ("element", True)
    assert promises(eb.apply_if_finite(tensor)) == ("tensor", True)


def test_named_chain_is_the_chain_with_states_by_name() -> None:
    parts: dict[str, eb.Transform[Any]] = {"momentum": eb.trace(0.9), "descent": eb.scale_by_learning_rate(0.1)}
    named, plain = eb.named_chain(parts), eb.chain(*parts.values())
    ours, state = step(named, grads(1))
    theirs, expected = step(plain, grads(1))
    testing.assert_same_bits(ours, theirs, "updates")
    assert list(state.states) == ["momentum", "descent"]
    testing.assert_same_bits(state.states["momentum"], expected.states[0], "momentum")
    assert state.step.item() == 1


OPTIMIZER: Any = eb.with_policy(eb.sgd(0.1), eb.policies.FP32)


@pytest.mark.parametrize(
    ("combine", "who"),
    [
        (lambda: eb.chain(eb.clip(1.0), OPTIMIZER), "chain, argument 1"),
        (lambda: eb.named_chain({"end": OPTIMIZER}), "named_chain, 'end'"),
        (lambda: eb.masked(OPTIMIZER, True), "masked"),
        (lambda: eb.partition({"all": OPTIMIZER}, "all"), "partition, 'all'"),
        (lambda: eb.accumulate(OPTIMIZER, 2), "accumulate"),
        (lambda: eb.apply_if_finite(OPTIMIZER), "apply_if_finite"),
        (lambda: eb.with_policy(OPTIMIZER, eb.policies.FP32), "with_policy"),
    ],
)
def test_an_optimizer_is_the_last_word(combine: Any, who: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^{who}: got a Optimizer, which has no update; .*with_policy\(chain\(\.\.\.\), policy\)"
    ):
        combine()


def test_what_is_no_transform_at_all_is_refused_by_name() -> None:
    wrong: Any = 0.1
    with pytest.raises(
        TypeError,
        match=r"^chain, argument 0: got 0\.1, which has no cut, reduces, init, update; accepted are transforms\.$",
    ):
        eb.chain(wrong)


# masked


def test_masked_leaves_the_rest_alone_and_keeps_no_state_for_it() -> None:
    transform = eb.masked(eb.trace(0.5), {"layer": {"w": True, "b": False}, "scale": False})
    g = grads(1)
    updates, state = step(transform, g)
    updates, state = step(transform, g, state)
    testing.assert_same_bits(updates["layer"]["w"], 0.5 * g["layer"]["w"] + g["layer"]["w"], "selected")
    assert updates["layer"]["b"] is g["layer"]["b"]
    assert updates["scale"] is g["scale"]
    assert eb.tree.paths(state) == [".inner.momentum['layer']['w']"]


def test_a_mask_may_be_a_prefix_a_bool_or_a_function_of_path_and_parameter() -> None:
    g = grads(1)
    expected = {"layer": eb.tree.map(lambda x: 2 * x, g["layer"]), "scale": g["scale"]}
    by_prefix = eb.masked(eb.scale(2.0), {"layer": True, "scale": False})
    by_function = eb.masked(eb.scale(2.0), where=lambda path, p: path.startswith("['layer']") and p.ndim > 0)
    testing.assert_same_bits(step(by_prefix, g)[0], expected, "prefix")
    testing.assert_same_bits(step(by_function, g)[0], expected, "function")
    testing.assert_same_bits(step(eb.masked(eb.scale(2.0), False), g)[0], g, "nothing")
    testing.assert_same_bits(step(eb.masked(eb.scale(2.0), True), g)[0], eb.tree.map(lambda x: 2 * x, g), "all")


def test_masks_nest() -> None:
    matrices = eb.masked(eb.scale(2.0), where=lambda path, p: p.ndim == 2)
    g = grads(1)
    updates, _ = step(eb.masked(matrices, {"layer": True, "scale": False}), g)
    testing.assert_same_bits(updates["layer"]["w"], 2 * g["layer"]["w"], "in both")
    testing.assert_same_bits(updates["layer"]["b"], g["layer"]["b"], "in one")


def test_a_mask_goes_by_key_whatever_the_order_of_the_gradients() -> None:
    transform = eb.masked(eb.scale(2.0), {"a": True, "b": False})
    at = {"a": torch.ones(1), "b": torch.ones(1)}
    updates, _ = step(transform, {"b": torch.tensor([10.0]), "a": torch.tensor([1.0])}, at=at)
    assert {name: u.item() for name, u in updates.items()} == {"a": 2.0, "b": 10.0}


def test_trees_of_masks_and_labels_go_by_key_whatever_their_order() -> None:
    """They went by position: a mask {'a': True, 'b': False} over parameters {'b': ..., 'a': ...} was the other way round."""
    params: dict[str, Any] = {"b": torch.ones(2), "a": [torch.ones(2), None, torch.ones(2)]}
    assert eb.tree.label({"a": "of a", "b": "of b"}, params) == ["of b", "of a", "of a"]
    stopped = eb.with_policy(eb.chain(eb.masked(eb.set_to_zero(), {"a": True, "b": False})), eb.policies.FP32)
    stepped, _ = stopped.step(params, params, stopped.init(params))
    assert stepped["b"].tolist() == [2.0, 2.0]
    assert stepped["a"][0].tolist() == stepped["a"][2].tolist() == [1.0, 1.0]
    policies = {"wide": eb.policies.FP32, "low": eb.Policy(momentum=eb.Stochastic())}
    split = eb.with_policy(eb.trace(0.9), eb.by_label({"a": "low", "b": "wide"}, policies))
    momentum = split.init(params).inner.momentum
    assert momentum["b"].dtype is torch.float32
    assert momentum["a"][0].dtype is momentum["a"][2].dtype is torch.bfloat16


def test_masked_under_a_policy_stores_only_what_it_keeps() -> None:
    transform = eb.chain(eb.masked(eb.trace(0.9), where=lambda path, p: p.ndim == 2), eb.scale_by_learning_rate(0.5))
    optimizer = eb.with_policy(transform, eb.policies.KAHAN_BF16)
    values = eb.tree.map(lambda p: p.bfloat16(), params())
    state = optimizer.init(values)
    values, state = optimizer.step(values, grads(1), state)
    (momentum,) = eb.tree.leaves(state.inner.states[0])
    assert momentum.dtype is torch.bfloat16
    exported = optimizer.export_fp32(values, state)
    torch.testing.assert_close(exported["scale"], 1 - 0.5 * grads(1)["scale"], rtol=2.0**-15, atol=2.0**-15)


def test_masks_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="either mask=, a tree of bools, or where="):
        eb.masked(eb.trace())
    with pytest.raises(TypeError, match="either mask=, a tree of bools, or where="):
        eb.masked(eb.trace(), True, where=lambda path, p: True)
    with pytest.raises(TypeError, match=r"masked: mask\['layer'\]\['b'\]: got 1; accepted are True and False"):
        eb.masked(eb.trace(), {"layer": {"w": True, "b": 1}, "scale": True}).init(params())
    with pytest.raises(
        ValueError, match=r"mask: not a prefix of the parameters' tree: .*mask\['layer'\] .*missing key\(s\): \['c'\]"
    ):
        eb.masked(eb.trace(), {"layer": {"w": True, "b": True, "c": True}, "scale": True}).init(params())


# partition


def test_partition_gives_each_leaf_the_transform_of_its_label_and_frozen_ones_no_state() -> None:
    transform = eb.partition(
        {"slow": eb.scale(0.5), "fast": eb.chain(eb.trace(0.5), eb.scale(4.0)), "frozen": eb.set_to_zero()},
        {"layer": {"w": "slow", "b": "fast"}, "scale": "frozen"},
    )
    g = grads(1)
    updates, state = step(transform, g)
    testing.assert_same_bits(updates["layer"]["w"], 0.5 * g["layer"]["w"], "slow")
    testing.assert_same_bits(updates["layer"]["b"], 4.0 * g["layer"]["b"], "fast")
    assert updates["scale"].item() == 0.0
    slots = [path for path in eb.tree.paths(state) if "momentum" in path]
    assert slots == [".by_label['fast'].states[0].momentum['layer']['b']"]


def test_partition_by_a_function_is_the_same_as_by_a_tree() -> None:
    transforms = {"matrix": eb.adamw(0.1), "rest": eb.sgd(0.1, momentum=0.9)}
    by_function = eb.partition(transforms, lambda path, p: "matrix" if p.ndim == 2 else "rest")
    by_tree = eb.partition(transforms, {"layer": {"w": "matrix", "b": "rest"}, "scale": "rest"})
    testing.assert_same_bits(step(by_function, grads(1)), step(by_tree, grads(1)), "function, against tree")


def test_partition_equals_each_part_alone() -> None:
    transform = eb.partition({"w": eb.adam(0.1), "b": eb.lion(0.1)}, {"w": "w", "b": "b"})
    at, g = params()["layer"], grads(1)["layer"]
    updates, _ = step(transform, g, at=at)
    testing.assert_same_bits(updates["w"], step(eb.adam(0.1), g["w"], at=at["w"])[0], "adam")
    testing.assert_same_bits(updates["b"], step(eb.lion(0.1), g["b"], at=at["b"])[0], "lion")


def test_labels_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError,
        match=r"params\['layer'\]\['b'\] is labelled 'y', for which there is no transform; there is one for 'x'",
    ):
        eb.partition({"x": eb.trace()}, {"layer": {"w": "x", "b": "y"}, "scale": "x"}).init(params())
    with pytest.raises(ValueError, match=r"no parameter is labelled 'y'; the labels given are 'x'"):
        eb.partition({"x": eb.trace(), "y": eb.trace()}, "x").init(params())
    with pytest.raises(ValueError, match=r"labels: not a prefix .* labels\['layer'\]"):
        eb.partition({"x": eb.trace()}, {"layer": ["x", "x"], "scale": "x"}).init(params())


# accumulate


def test_accumulate_makes_one_step_on_the_mean() -> None:
    inner = eb.chain(eb.clip(1.5), eb.adamw(eb.linear_schedule(0.1, 0.0, 10)))
    transform = eb.accumulate(inner, every=4)
    at = eb.tree.map(torch.Tensor.double, params())
    state, expected_state = transform.init(at), inner.init(at)
    for number in range(1, 9):
        g = testing.example_grads(at, number)
        updates, state = step(transform, g, state, at)
        if number % 4:
            assert all(bool((u == 0).all()) for u in eb.tree.leaves(updates))
            assert state.count.item() == number % 4
        else:
            batch = [testing.example_grads(at, number - back) for back in (3, 2, 1, 0)]
            mean = eb.tree.map(lambda *leaves: torch.stack(leaves).mean(0), *batch)
            expected, expected_state = step(inner, mean, expected_state, at)
            eb.tree.map(lambda u, e: torch.testing.assert_close(u, e, rtol=1e-12, atol=1e-14), updates, expected)
            assert state.count.item() == 0
            assert all(bool((a == 0).all()) for a in eb.tree.leaves(state.gradient))
        assert state.step.item() == number // 4
        assert state.inner.step.item() == number // 4


def test_accumulating_one_gradient_changes_nothing() -> None:
    ours, _ = step(eb.accumulate(eb.adamw(0.1), every=1), grads(1))
    testing.assert_same_bits(ours, step(eb.adamw(0.1), grads(1))[0], "every=1")


def test_a_running_mean_does_not_overflow_where_a_sum_does() -> None:
    transform = eb.accumulate(eb.identity(), every=4)
    g = torch.full((3,), 3e38)
    state = transform.init(g)
    for _ in range(3):
        _, state = step(transform, g, state, g)
    updates, _ = step(transform, g, state, g)
    torch.testing.assert_close(updates, g, rtol=1e-6, atol=0)


def test_the_accumulator_is_a_slot_that_a_policy_can_store() -> None:
    policy = eb.Policy(params=eb.Split(16), slots={"gradient": eb.Kahan()})
    optimizer = eb.with_policy(eb.accumulate(eb.sgd(1.0), every=2), policy)
    values = torch.ones(8, dtype=torch.bfloat16)
    state = optimizer.init(values)
    for number in (1, 2):
        values, state = optimizer.step(values, torch.full((8,), 0.1 * number), state)
        if number == 1:
            assert [part.dtype for part in state.inner.gradient] == [torch.bfloat16, torch.bfloat16]
            assert (values == 1).all()
    torch.testing.assert_close(optimizer.export_fp32(values, state), torch.full((8,), 1 - 0.15), rtol=2.0**-15, atol=0)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_accumulate_wants_a_whole_number(every: Any) -> None:
    with pytest.raises(ValueError, match=rf"^every: got {every!r}; accepted is a whole number"):
        eb.accumulate(eb.identity(), every)


# apply_if_finite


def counters(state: Any) -> tuple[int, int, int]:
    return state.step.item(), state.skipped.item(), state.consecutive.item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_anywhere_skips_the_step(bad: float) -> None:
    transform = eb.apply_if_finite(eb.adam(0.1))
    _, state = step(transform, grads(1))
    poisoned = grads(2)
    poisoned["layer"]["b"][1] = bad
    updates, after = step(transform, poisoned, state)
    assert all(bool((u == 0).all()) for u in eb.tree.leaves(updates))
    testing.assert_same_bits(after.inner, state.inner, "inner state")
    assert counters(state) == (1, 0, 0)
    assert counters(after) == (1, 1, 1)


def test_skipped_steps_are_as_if_they_had_not_been() -> None:
    transform = eb.apply_if_finite(eb.adamw(eb.linear_schedule(0.1, 0.0, 10)))
    plain, guarded = eb.adamw(eb.linear_schedule(0.1, 0.0, 10)), transform.init(params())
    state = plain.init(params())
    nan = eb.tree.map(lambda x: x * float("nan"), grads(0))
    seen = []
    for number in range(1, 6):
        _, guarded = step(transform, nan, guarded)
        updates, guarded = step(transform, grads(number), guarded)
        expected, state = step(plain, grads(number), state)
        testing.assert_same_bits(updates, expected, f"update {number}")
        seen.append(counters(guarded))
    assert seen == [(number, number, 0) for number in range(1, 6)]


def test_after_too_many_in_a_row_a_bad_step_is_let_through() -> None:
    transform = eb.apply_if_finite(eb.sgd(0.1), max_consecutive=2)
    nan = torch.tensor([float("nan")])
    state = transform.init(nan)
    finite, seen = [], []
    for g in (nan, nan, nan, nan, torch.ones(1), nan):
        updates, state = step(transform, g, state, nan)
        finite.append(bool(updates.isfinite()))
        seen.append(counters(state))
    assert finite == [True, True, False, False, True, True]
    assert seen == [(0, 1, 1), (0, 2, 2), (1, 2, 3), (2, 2, 4), (3, 2, 0), (3, 3, 1)]


def test_another_shards_infinity_skips_the_step_here_too() -> None:
    class Elsewhere(eb.Local):
        @staticmethod
        def max(value: Tensor) -> Tensor:
            return torch.ones_like(value)

    g = torch.ones(2)
    transform = eb.apply_if_finite(eb.sgd(0.1))
    updates, state = eb.fulfil(transform.update(g, transform.init(g), g, eb.Context(pending=True)), Elsewhere())
    assert updates.tolist() == [0.0, 0.0]
    assert counters(state) == (0, 1, 1)


@pytest.mark.parametrize("limit", [-1, 0.5, True])
def test_apply_if_finite_wants_a_whole_number(limit: Any) -> None:
    with pytest.raises(ValueError, match=rf"^max_consecutive: got {limit!r}; accepted is a whole number"):
        eb.apply_if_finite(eb.identity(), limit)


# holes


def test_a_parameter_that_is_none_is_a_hole_everywhere() -> None:
    at: dict[str, Any] = {"w": torch.ones(2), "frozen": None, "rest": [torch.ones(()), None]}
    g = {"w": torch.ones(2), "frozen": None, "rest": [torch.ones(()), None]}
    for name, build in testing.REGISTRY.items():
        if name in ("partition", "masked", "adam mini", "dion") or "muon" in name:  # want a matrix too
            continue
        optimizer = eb.with_policy(build(0.1), eb.policies.FP32)
        after, state = optimizer.step(at, g, optimizer.init(at))
        assert after["frozen"] is None, name
        assert after["rest"][1] is None, name
        assert [path for path in eb.tree.paths(state) if "'frozen'" in path] == [], name


def test_a_missing_gradient_is_named() -> None:
    optimizer = eb.with_policy(eb.sgd(0.1), eb.policies.FP32)
    at = {"w": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(ValueError, match=r"no tensor at grads\['b'\].*give zeros where there is none"):
        optimizer.step(at, {"w": torch.ones(2), "b": None}, optimizer.init(at))


@pytest.mark.parametrize(
    "tx",
    [
        eb.chain(eb.clip_by_global_norm(1.0), eb.sgd(0.1)),
        eb.partition({"all": eb.sgd(0.1), "none": eb.adamw(0.1)}, lambda path, p: "all" if p.ndim else "none"),
    ],
    ids=["chain", "partition"],
)
def test_a_step_keeps_no_gradient_until_the_garbage_collector_comes(tx: Any) -> None:
    params = {"w": torch.ones(3), "b": torch.ones(())}
    state = tx.init(params)
    grads = {name: torch.ones_like(p) for name, p in params.items()}
    held = weakref.ref(grads["w"])
    gc.collect()
    gc.disable()
    try:
        tx.update(grads, state, params)
        del grads
        assert held() is None
    finally:
        gc.enable()
