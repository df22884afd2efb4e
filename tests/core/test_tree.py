"""Trees: order, holes, paths, state."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import pytest

import everybit as eb
import torch
from torch import Tensor

P = TypeVar("P")


class Pair(NamedTuple):
    left: Tensor
    right: Any


@eb.state
@dataclass(frozen=True, slots=True)
class Held(Generic[P]):
    step: Tensor
    momentum: eb.Slot[P]
    inner: Any


def numbers(*values: float) -> list[Tensor]:
    return [torch.tensor(value) for value in values]


def test_dicts_keep_insertion_order_as_named_parameters_do() -> None:
    one, two, ten = numbers(1.0, 2.0, 10.0)
    tree = {"layer2": two, "layer10": ten, "layer1": one}
    assert [float(x) for x in eb.tree.leaves(tree)] == [2.0, 10.0, 1.0]
    assert eb.tree.paths(tree) == ["['layer2']", "['layer10']", "['layer1']"]
    assert list(eb.tree.map(lambda x: x + 1, tree)) == ["layer2", "layer10", "layer1"]


def test_the_order_of_another_trees_keys_does_not_matter() -> None:
    params = {"a": torch.ones(2), "b": torch.zeros(3)}
    grads = {"b": torch.full((3,), 5.0), "a": torch.full((2,), 7.0)}
    opt = eb.with_policy(eb.sgd(1.0), eb.policies.FP32)
    new, _ = opt.step(params, grads, opt.init(params))
    assert list(new) == ["a", "b"]
    torch.testing.assert_close(new["a"], torch.full((2,), -6.0))
    torch.testing.assert_close(new["b"], torch.full((3,), -5.0))


def test_every_container_comes_back_as_itself() -> None:
    a, b, c, d = numbers(1.0, 2.0, 3.0, 4.0)
    tree = {"list": [a, (b,)], "pair": Pair(c, None), "ordered": OrderedDict(x=d)}
    doubled = eb.tree.map(lambda x: 2 * x, tree)
    assert isinstance(doubled["pair"], Pair)
    assert isinstance(doubled["ordered"], OrderedDict)
    assert [float(x) for x in eb.tree.leaves(doubled)] == [2.0, 4.0, 6.0, 8.0]


def test_none_is_a_hole_and_not_a_leaf() -> None:
    (a,) = numbers(3.0)
    tree: dict[str, Any] = {"here": a, "frozen": None}
    assert len(eb.tree.leaves(tree)) == 1
    assert eb.tree.map(lambda x: x * 2, tree)["frozen"] is None
    opt = eb.with_policy(eb.adam(1e-2), eb.policies.FP32)
    new, state = opt.step(tree, {"here": torch.tensor(1.0), "frozen": None}, opt.init(tree))
    assert new["frozen"] is None
    inner: Any = state.inner
    assert inner.states[1].momentum["frozen"] is None
    assert new["here"] < 3.0


def test_paths_are_written_as_python_would() -> None:
    (a,) = numbers(1.0)
    assert eb.tree.paths({"layers": [Pair(a, a)]}) == ["['layers'][0].left", "['layers'][0].right"]
    assert eb.tree.paths(a) == [""]


def test_a_state_tells_slots_from_counters_and_from_state_inside() -> None:
    step, m, n = numbers(0.0, 1.0, 2.0)
    inner = Held(step, {"w": n}, ())
    held = Held(step, {"w": m}, {"nested": (inner,)})
    assert eb.tree.slot_names(held) == ["momentum", "momentum"]
    doubled = eb.tree.map_slots(lambda name, slot: {"w": slot["w"] * 10}, held)
    assert float(doubled.momentum["w"]) == 10.0
    assert float(doubled.inner["nested"][0].momentum["w"]) == 20.0
    assert doubled.step is step
    assert [float(x) for x in eb.tree.leaves(held)] == [0.0, 1.0, 0.0, 2.0]


def test_torch_func_sees_through_a_state() -> None:
    held = Held(torch.zeros(4), torch.arange(4.0), ())
    doubled = torch.func.vmap(lambda h: Held(h.step + 1, h.momentum * 2, ()))(held)
    assert doubled.momentum.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_only_dataclasses_are_states() -> None:
    with pytest.raises(TypeError, match="@state needs a dataclass"):

        @eb.state
        class Plain:
            pass


def test_structures_that_differ_are_named_by_path() -> None:
    params = {"a": torch.ones(2), "b": [torch.ones(3), torch.ones(1)]}
    require = eb.tree.require_same_structure
    with pytest.raises(ValueError, match=r"grads: structure differs from params: no tensor at grads\['b'\]\[1\]"):
        require({"a": torch.ones(2), "b": [torch.ones(3), None]}, params, name="grads", reference_name="params")
    with pytest.raises(ValueError, match=r"unexpected grads\['c'\]"):
        require({**params, "c": torch.ones(1)}, params, name="grads", reference_name="params")
    with pytest.raises(ValueError, match=r"grads\['b'\]\[0\]: shape \(4,\), but params\['b'\]\[0\] has \(3,\)"):
        require(
            {"a": torch.ones(2), "b": [torch.ones(4), torch.ones(1)]}, params, name="grads", reference_name="params"
        )


def test_labels_are_a_prefix_or_a_function() -> None:
    params = {"a": torch.ones(2), "b": [torch.ones(3), torch.ones(1)]}
    assert eb.tree.label({"a": "x", "b": "y"}, params) == ["x", "y", "y"]
    assert eb.tree.label(lambda path, p: f"{path}:{p.numel()}", params) == ["['a']:2", "['b'][0]:3", "['b'][1]:1"]
    with pytest.raises(ValueError, match="labels: not a prefix"):
        eb.tree.label({"a": "x"}, params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_are_taken_in_float32_or_better(dtype: torch.dtype) -> None:
    # 300**2 overflows float16, and 4096 ones stop adding up in bfloat16 at 256.
    tree = {"a": torch.full((4,), 300.0, dtype=dtype), "b": torch.ones(4096, dtype=dtype)}
    expected = (4 * 300.0**2 + 4096) ** 0.5
    norm = eb.tree.norm(tree)
    assert norm.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert float(norm) == pytest.approx(expected, rel=2.0**-20)
    assert float(eb.tree.norm({})) == 0.0
