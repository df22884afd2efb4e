"""Labels by name and depth, masks that select nothing, questions to a state, and hyperparameters in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from everybit.base import plain_name

MODEL: dict[str, Tensor] = {
    "embed.weight": torch.ones(5, 4),
    "layers.0.attention.weight": torch.ones(4, 4),
    "layers.0.norm.weight": torch.ones(4),
    "layers.1.attention.weight": torch.ones(4, 4),
    "layers.1.norm.weight": torch.ones(4),
    "norm.weight": torch.ones(4),
    "head.weight": torch.ones(5, 4),
}


def nested() -> Any:
    return {"layers": [{"weight": torch.ones(2, 2)}, {"weight": torch.ones(2, 2)}], "head": torch.ones(2)}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("['layers.0.weight']", "layers.0.weight"),
        ("['layers'][0].weight", "layers.0.weight"),
        ('["it\'s"]', "it's"),
        ("", ""),
        (".weight", "weight"),
        ("[3]", "3"),
    ],
)
def test_names_have_dots(path: str, name: str) -> None:
    assert plain_name(path) == name


def test_the_first_pattern_that_is_found_decides() -> None:
    labels = eb.by_name({r"^head|embed": "ends", "norm": "norms"}, default="matrices")
    given = dict(zip(MODEL, eb.tree.label(labels, MODEL), strict=True))
    assert given["embed.weight"] == given["head.weight"] == "ends"
    assert given["layers.0.norm.weight"] == given["norm.weight"] == "norms"
    assert given["layers.1.attention.weight"] == "matrices"
    tx = eb.partition({"ends": eb.scale(1.0), "norms": eb.scale(2.0), "matrices": eb.scale(3.0)}, labels)
    updates, _ = tx.update(MODEL, tx.init(MODEL), MODEL)
    assert {name: float(u.mean()) for name, u in updates.items()} == {
        name: {"ends": 1.0, "norms": 2.0, "matrices": 3.0}[label] for name, label in given.items()
    }


def test_the_table_says_what_went_where() -> None:
    labels = eb.by_name({"norm": "norms"}, default="rest")
    assert eb.label_table(labels, {name: MODEL[name] for name in ("norm.weight", "head.weight")}) == (
        "norms: 1 parameter, 4 elements\n  norm.weight (4,)\nrest: 1 parameter, 20 elements\n  head.weight (5, 4)"
    )
    table = eb.label_table(eb.not_norm_or_bias, MODEL)
    assert table.startswith("True: 4 parameters, 72 elements\n  embed.weight (5, 4)\n")
    assert "False: 3 parameters, 12 elements\n  layers.0.norm.weight (4,)" in table


def test_labels_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^patterns: got '\('; accepted are regular expressions"):
        eb.by_name({"(": "x"})
    with pytest.raises(ValueError, match=r"^by_name: 'embed\.weight' matches none of 'norm'; accepted"):
        eb.tree.label(eb.by_name({"norm": "norms"}), MODEL)
    with pytest.raises(ValueError, match=r"^by_name: no parameter is labelled by 'bias'; .* embed\.weight, "):
        eb.label_table(eb.by_name({"bias": "biases"}, default="rest"), MODEL)
    with pytest.raises(
        ValueError, match=r"no parameter is labelled by 'attention'; a pattern before it may have taken"
    ):
        eb.label_table(eb.by_name({"weight": "all", "attention": "some"}), MODEL)


def test_a_mask_that_selects_nothing_is_refused() -> None:
    tx = eb.chain(eb.masked(eb.add_decayed_weights(0.1), where=lambda path, _p: "wieght" in path), eb.scale(-1.0))
    with pytest.raises(
        ValueError,
        match=r"^masked: the mask selects none of the 7 parameters, \['embed\.weight'\], .* and others\. Drop",
    ):
        eb.with_policy(tx, "FP32").init(MODEL)
    assert tx.init({}).states  # where there are no parameters there is no mistake


def test_the_learning_rate_decays_by_depth() -> None:
    tx = eb.layerwise_decay(MODEL, 0.5)
    updates, _ = tx.update(MODEL, tx.init(MODEL), MODEL)
    assert [float(u.mean()) for u in updates.values()] == [0.125, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]
    assert eb.label_table(tx.labels, MODEL).splitlines()[:4] == [
        "depth 0: 1 parameter, 20 elements",
        "  embed.weight (5, 4)",
        "depth 1: 2 parameters, 20 elements",
        "  layers.0.attention.weight (4, 4)",
    ]
    deep = eb.layerwise_decay(nested(), 0.5)
    updates, _ = deep.update(nested(), deep.init(nested()), nested())
    assert [float(u.mean()) for u in eb.tree.leaves(updates)] == [0.25, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"^layer: got 'stage"):
        eb.layerwise_decay(MODEL, 0.5, r"stage(\d+)")
    with pytest.raises(ValueError, match=r"^decay: got -1\.0"):
        eb.layerwise_decay(MODEL, -1.0)


def stepped(policy: eb.PolicyName) -> tuple[Any, Any, Any]:
    opt = eb.with_policy(eb.chain(eb.trace(0.9), eb.adamw(0.1)), policy)
    params = {name: p.to(torch.bfloat16 if "BF16" in policy else torch.float32) for name, p in MODEL.items()}
    params, state = opt.step(params, params, opt.init(params))
    return opt, params, state


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "KAHAN_BF16"])
def test_what_is_got_is_what_is_stored_and_set_puts_it_back(policy: eb.PolicyName) -> None:
    opt, params, state = stepped(policy)
    slot = eb.tree.get(state, "variance")
    assert slot is eb.tree.get(state, "inner.states[1].states[0].variance")
    for path in eb.tree.paths(params):
        one = eb.tree.get(state, "variance", path=path)
        zero = eb.tree.zeros_like(one)
        changed = eb.tree.set(state, "variance", zero, path=path)
        for other in eb.tree.paths(params):
            expected = zero if other == path else eb.tree.get(state, "variance", path=other)
            assert all(
                map(torch.equal, eb.tree.leaves(eb.tree.get(changed, "variance", path=other)), eb.tree.leaves(expected))
            )
        again = eb.tree.set(changed, "variance", one, path=path)
        assert all(map(torch.equal, eb.tree.leaves(again), eb.tree.leaves(state)))
    opt.step(params, params, eb.tree.set(state, "variance", eb.tree.zeros_like(slot)))


def test_set_takes_a_dict_in_any_order_and_a_number() -> None:
    _, _, state = stepped("FP32")
    slot = eb.tree.get(state, "variance")
    backwards = dict(reversed(slot.items()))
    again = eb.tree.set(state, "variance", backwards)
    assert all(map(torch.equal, eb.tree.leaves(again), eb.tree.leaves(state)))
    assert int(eb.tree.set(state, "inner.states[1].step", 7).inner.states[1].step) == 7


def test_what_is_not_there_or_does_not_fit_is_refused() -> None:
    _, _, state = stepped("FP32")
    with pytest.raises(
        KeyError, match=r"'momentum' is the name of several fields: inner\.states\[0\]\.momentum, inner\.states\[1\]"
    ):
        eb.tree.get(state, "momentum")
    with pytest.raises(KeyError, match=r"'velocity' is no field of the state: step, extra, inner, inner\.step"):
        eb.tree.get(state, "velocity")
    with pytest.raises(KeyError, match=r"'w' is no path in .*variance: \['embed\.weight'\]"):
        eb.tree.get(state, "variance", path="w")
    with pytest.raises(ValueError, match=r"^value: structure differs from inner\.states\[1\]\.states\[0\]\.variance"):
        eb.tree.set(state, "variance", {})
    with pytest.raises(ValueError, match=r"^value: shape \(3,\), but .*\['norm\.weight'\] has \(4,\)"):
        eb.tree.set(state, "variance", torch.zeros(3), path="['norm.weight']")
    with pytest.raises(TypeError, match=r"^value: got torch\.float64 for .* accepted is torch\.float32"):
        eb.tree.set(state, "variance", torch.zeros(4, dtype=torch.float64), path="['norm.weight']")


def widths(width: int, heads: int = 2) -> dict[str, Tensor]:
    shapes = {
        "embed.weight": (11, width),
        "hidden.weight": (3 * width, width),
        "conv.weight": (width, width, 3),
        "norm.weight": (width,),
        "head.weight": (5, width),
        "scale": (heads,),
    }
    return {name: torch.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Table 8 of the paper: Adam's hidden matrices by 1 / fan-in, and nothing else; SGD's vectors by their width.
        ("adam", {"hidden.weight": 1 / 8, "conv.weight": 1 / 8}),
        ("sgd", {"embed.weight": 8.0, "norm.weight": 8.0, "head.weight": 8.0}),
    ],
)
def test_learning_rates_are_scaled_by_width(kind: Any, expected: dict[str, float]) -> None:
    params = widths(32)
    tx = eb.mup_scales(params, widths(4), kind)
    updates, _ = tx.update(params, tx.init(params), params)
    assert {name: float(u.mean()) for name, u in updates.items()} == {name: expected.get(name, 1.0) for name in params}
    same = eb.mup_scales(params, params, kind)
    updates, _ = same.update(params, same.init(params), params)
    assert all(torch.equal(u, params[name]) for name, u in updates.items())


def test_widths_that_differ_have_the_ratio_of_both() -> None:
    wide, narrow = {"w": torch.ones(12, 32)}, {"w": torch.ones(4, 4, device="meta")}
    for kind, factor in (("adam", 1 / 8), ("sgd", 3 / 8)):
        tx = eb.mup_scales(wide, narrow, kind)  # type: ignore[arg-type]
        updates, _ = tx.update(wide, tx.init(wide), wide)
        assert float(updates["w"].mean()) == factor
        assert eb.label_table(tx.labels, wide).splitlines()[0].startswith({"adam": "1/8:", "sgd": "3/8:"}[kind])


def test_widths_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^base: has other names than params, head\.weight in one of them only\."):
        eb.mup_scales(widths(8), {name: p for name, p in widths(4).items() if "head" not in name})
    with pytest.raises(ValueError, match=r"^base: w has the shape \(2,\), and \(4, 4\) in params"):
        eb.mup_scales({"w": torch.ones(4, 4)}, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"^params: w of the shape \(4, 4, 4\) has 3 widths"):
        eb.mup_scales({"w": torch.ones(4, 4, 4)}, {"w": torch.ones(2, 2, 2)})
    with pytest.raises(ValueError, match=r"^params: w of the shape \(4, 3, 4\) has 2 widths, .* the first two"):
        eb.mup_scales({"w": torch.ones(4, 3, 4)}, {"w": torch.ones(2, 3, 2)})
    with pytest.raises(ValueError, match=r"^kind: got 'lion'; accepted are 'adam' and 'sgd'"):
        eb.mup_scales(widths(8), widths(4), "lion")  # type: ignore[arg-type]
