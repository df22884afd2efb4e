"""The tree facade: order, holes, paths, states."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as torch_pytree

import everybit as eb
from everybit import testing, tree


class Pair(NamedTuple):
    first: Any
    second: Any


def leaf(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def numbers(values: object) -> list[float]:
    return [x.item() for x in tree.leaves(values)]


LAYERS = {f"layer{number}": leaf(number) for number in range(12)}


def test_dicts_keep_insertion_order_as_named_parameters_does() -> None:
    assert numbers(LAYERS) == list(range(12))
    assert list(tree.map(lambda x: x, LAYERS)) == list(LAYERS)
    assert numbers({"b": leaf(1), "a": {"z": leaf(2), "y": leaf(3)}}) == [1, 2, 3]
    assert tree.paths({"b": leaf(1), "a": leaf(2)}) == ["['b']", "['a']"]


def test_maps_match_dicts_by_key() -> None:
    total = tree.map(torch.add, {"a": leaf(1), "b": leaf(2)}, {"b": leaf(20), "a": leaf(10)})
    assert {key: value.item() for key, value in total.items()} == {"a": 11, "b": 22}
    assert list(total) == ["a", "b"]
    back = tree.ordered_as({"a": 0, "b": 0}, {"b": leaf(2), "a": leaf(1)})
    assert list(back) == ["a", "b"]
    assert numbers(back) == [1, 2]


@pytest.mark.parametrize("name", testing.REGISTRY)
@pytest.mark.sampled(10)
def test_the_order_of_the_gradients_keys_does_not_matter(name: str) -> None:
    optimizer = eb.with_policy(testing.REGISTRY[name](0.1), eb.policies.LEAN_BF16)
    params = testing.example_params(torch.bfloat16)
    grads = testing.example_grads(params, 1)
    shuffled = {
        key: [dict(reversed(layer.items())) for layer in grads[key]] if key == "layers" else grads[key]
        for key in reversed(grads)
    }
    expected = optimizer.step(params, grads, optimizer.init(params))
    got = optimizer.step(params, shuffled, optimizer.init(params))
    assert tree.paths(got) == tree.paths(expected)
    testing.assert_same_bits(got, expected, "shuffled gradients")


def test_none_is_a_hole_and_no_leaf() -> None:
    values: dict[str, Any] = {"a": None, "b": [leaf(1), None], "c": Pair(None, leaf(2))}
    assert numbers(values) == [1, 2]
    assert tree.paths(values) == ["['b'][0]", "['c'].second"]
    doubled = tree.map(lambda x: 2 * x, values)
    assert doubled["a"] is None
    assert doubled["b"][1] is None
    assert doubled["c"].first is None
    assert tree.flatten_up_to({"a": leaf(0), "b": leaf(0)}, {"a": None, "b": (leaf(1), leaf(2))})[0] is None


def test_elementwise_does_not_let_a_coefficient_promote_a_number() -> None:
    coefficient = torch.tensor(1 / 3, dtype=torch.float64)
    values = {"number": torch.tensor(3.0), "vector": torch.tensor([3.0]), "empty": torch.zeros(0)}
    plain = tree.map(lambda x: coefficient * x, values)
    assert plain["number"].dtype is torch.float64, "if torch no longer does this, elementwise has no reason"
    scaled = tree.elementwise(lambda x, y: coefficient * x + 0 * y, values, values)
    assert {x.dtype for x in tree.leaves(scaled)} == {torch.float32}
    assert scaled["number"].shape == ()
    assert scaled["number"].item() == scaled["vector"].item()


def test_paths_are_written_as_python_would() -> None:
    state = eb.chain(eb.trace()).init({"layers": [Pair(leaf(0), leaf(1))]})
    assert tree.paths(state) == [
        ".step",
        ".states[0].momentum['layers'][0].first",
        ".states[0].momentum['layers'][0].second",
    ]
    assert tree.paths(leaf(0)) == [""]


def test_trees_of_any_container_keep_their_type() -> None:
    trees: list[Any] = [leaf(1), (leaf(1),), [leaf(1)], Pair(leaf(1), [leaf(2)]), OrderedDict(b=leaf(1), a=leaf(2))]
    optimizer = eb.with_policy(eb.adamw(0.1), eb.policies.FP32)
    for values in trees:
        after, state = optimizer.step(values, values, optimizer.init(values))
        assert type(after) is type(values)
        assert type(state.inner.states[0].momentum) is type(values)
        assert tree.paths(after) == tree.paths(values)


def test_replace_keeps_containers_and_takes_new_leaves_in_order() -> None:
    assert tree.replace({"b": leaf(1), "a": (leaf(2),)}, ["x", None]) == {"b": "x", "a": (None,)}


def test_labels_come_from_a_prefix_or_a_function() -> None:
    values = {"layer": {"w": leaf(1), "b": leaf(2)}, "scale": leaf(3)}
    assert tree.label({"layer": "x", "scale": "y"}, values) == ["x", "x", "y"]
    assert tree.label("z", values) == ["z", "z", "z"]
    assert tree.label(lambda path, x: f"{path}={x.item():g}", values)[1] == "['layer']['b']=2"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"w": leaf(1)},
            r"^got: structure differs from expected: no tensor at got\['b'\]\. got must have one tensor for each of the 2",
        ),
        ({"w": leaf(1), "b": None}, r"no tensor at got\['b'\]"),
        ({"w": leaf(1), "b": leaf(1), "c": leaf(1)}, r"unexpected got\['c'\]"),
        ({"w": leaf(1), "b": [leaf(1)]}, r"no tensor at got\['b'\]; unexpected got\['b'\]\[0\]"),
        ({"b": torch.ones(2), "w": leaf(1)}, r"^got\['b'\]: shape \(2,\), but expected\['b'\] has \(1,\)"),
        ([leaf(1), leaf(1)], r"no tensor at got\['w'\]; no tensor at got\['b'\]; unexpected got\[0\]"),
    ],
)
def test_structures_that_differ_are_told_apart_by_path(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.require_same_structure(wrong, {"w": leaf(1), "b": leaf(1)}, name="got", reference_name="expected")


def test_a_list_is_not_a_tuple_though_their_paths_agree() -> None:
    with pytest.raises(ValueError, match="containers differ"):
        tree.require_same_structure([leaf(1)], (leaf(1),), name="got", reference_name="expected")


@eb.state
class Averages:
    count: torch.Tensor
    average: eb.Slot[Any]
    nested: Any
    size: int = 7


def averages() -> Averages:
    return Averages(leaf(0), {"w": leaf(1)}, ({"x": Averages(leaf(2), {"w": leaf(3)}, ())}, [leaf(4)]))


def test_states_are_trees_for_optree_and_for_torch() -> None:
    state = averages()
    assert tree.slot_fields(state) is not None
    assert tree.slot_fields({"w": leaf(1)}) is None
    assert numbers(state) == [0, 1, 2, 3, 4]
    assert tree.paths(state)[1:3] == [".average['w']", ".nested[0]['x'].count"]
    leaves, structure = torch_pytree.tree_flatten(state)
    assert [x.item() for x in leaves] == [0, 1, 2, 3, 4]
    assert isinstance(torch_pytree.tree_unflatten(leaves, structure), Averages)


def test_slots_are_found_by_name_at_any_depth_and_nothing_else_is_touched() -> None:
    state = averages()
    assert [(name, numbers(slot)) for name, slot in tree.slots(state)] == [("average", [1]), ("average", [3])]
    tenfold = tree.map_slots(lambda name, slot: tree.map(lambda x: len(f"{name}...") * x, slot), state)
    assert numbers(tenfold) == [0, 10, 2, 30, 4]
    moved = tree.map_slots(lambda _, slot: slot, state, lambda x: x + 5)
    assert (numbers(moved), moved.size) == ([5, 1, 7, 3, 9], 7)  # a whole number is no tensor


def test_a_structure_reads_trees_by_key_and_builds_them_in_its_own_order() -> None:
    structure = tree.Structure.of({"a": leaf(0), "b": [leaf(1), None]})
    assert numbers(structure.leaves({"b": [leaf(5), None], "a": leaf(4)})) == [4, 5]
    assert structure.tree([4, 5]) == {"a": 4, "b": [5, None]}
    with pytest.raises(ValueError, match="key mismatch"):
        structure.leaves({"a": leaf(0)})


def test_several_numbers_of_each_element_are_several_trees() -> None:
    """A 0-d leaf keeps its dtype beside float64 coefficients, as in ``elementwise``; a tree without leaves has as many."""
    half, params = torch.tensor(0.5, dtype=torch.float64), {"a": torch.tensor(4.0), "b": [torch.tensor([2.0])]}
    halves, sums = tree.several(lambda x, y: (x * half, x + y), 2, params, params)
    assert (numbers(halves), numbers(sums)) == ([2, 1], [8, 4])
    assert {x.dtype for x in tree.leaves(halves)} == {torch.float32}
    assert tree.several(lambda x: (x, x), 2, {"b": None}) == [{"b": None}, {"b": None}]


def test_a_dataclass_may_become_a_state() -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        average: torch.Tensor

    state: Any = eb.state(Own)(leaf(1))
    assert type(state) is Own
    assert numbers(tree.map(lambda x: x + 1, state)) == [2]


def test_norms_sizes_and_finiteness_of_trees() -> None:
    values = {"a": torch.tensor([3.0, 0.0]), "b": [torch.tensor(4.0), torch.zeros(0)], "c": None}
    assert tree.norm(values).item() == 5.0
    assert tree.sum_of_squares(values).item() == 25.0
    assert tree.size(values) == 3
    assert tree.all_finite(values)
    assert not tree.all_finite([leaf(1), leaf(float("inf"))])
    assert tree.all_finite({})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_are_squared_in_float32_or_better_and_added_up_in_float64(dtype: torch.dtype) -> None:
    # 300**2 overflows float16, and 4096 ones stop adding up in bfloat16 at 256.
    values = {"a": torch.full((4,), 300.0, dtype=dtype), "b": torch.ones(4096, dtype=dtype)}
    norm = tree.norm(values)
    assert norm.dtype is torch.float64
    assert norm.item() == pytest.approx((4 * 300.0**2 + 4096) ** 0.5, rel=2.0**-20)


def test_torch_func_sees_through_a_state() -> None:
    state = Averages(torch.zeros(4), torch.arange(4.0), ())
    doubled = torch.func.vmap(lambda s: Averages(s.count + 1, s.average * 2, ()))(state)
    assert doubled.average.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_where_chooses_whole_trees() -> None:
    yes, no = {"a": leaf(1)}, {"a": leaf(2)}
    assert numbers(tree.where(torch.tensor(True), yes, no)) == [1]
    assert numbers(tree.where(torch.tensor(False), yes, no)) == [2]
