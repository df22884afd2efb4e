"""What all optimizers of matrices hold: views, gradients of zero, formats that stall, and arguments that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

import everybit as eb
from everybit.transforms import dion, kron
from tests.support.following import schedule
from tests.support.steps import drawn, steps

# As somebody without a type checker calls them.
E: Any = eb

OPTIMIZERS: dict[str, Any] = {
    "muon": partial(E.muon, others=None, weight_decay=0.5),
    "normuon": partial(E.normuon, others=None, weight_decay=0.5),
    "soap": partial(E.soap, period=2, weight_decay=0.5),
    "soap, corrected": partial(E.soap, period=2, correction="kl", weight_decay=0.5),
    "soap of vectors": partial(E.soap, period=2, where=E.Kronecker(vectors=True), weight_decay=0.5),
    "soap of vectors, corrected": partial(
        E.soap, period=2, correction="kl", where=E.Kronecker(vectors=True), weight_decay=0.5
    ),
    "shampoo": partial(E.shampoo, period=2, weight_decay=0.5),
    "kron": partial(E.kron, normalize=True, weight_decay=0.5),
    "dion": partial(E.dion, others=None, weight_decay=0.5),
} | {
    f"shampoo, {of}": partial(E.shampoo, period=2, weight_decay=0.5, graft=E.Grafting(of=of, start=1))
    for of in ("none", "sgd", "adagrad", "rmsprop", "adam")
}
LATE = tuple(name for name in OPTIMIZERS if name.startswith("soap"))
"""The first update moves nothing, not even by decay."""


@pytest.mark.parametrize("view", [eb.heads(3), eb.row_blocks(2, 4)], ids=str)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "vectors" not in name])
def test_a_view_is_a_parameter_for_each_matrix(name: str, view: eb.MatrixView) -> None:
    """But for what is drawn, which goes by the elements' place; here it is one everywhere."""
    make, parts = OPTIMIZERS[name], [2, 2, 2] if view == eb.heads(3) else [2, 4]
    params, grads = drawn(6, 4), [drawn(6, 4, seed=step) for step in range(1, 6)]
    one = lambda like, _radius, _angle: torch.ones_like(like)  # noqa: E731
    with patch.object(kron, "normal", one), patch.object(dion, "normal", one):
        together, state = steps(make(0.1, matrices=eb.Matrices(view=view)), params, grads)
        pieces = zip(*(torch.split(x, parts) for x in (params, *grads)), strict=True)
        apart = [steps(make(0.1), first, rest)[0] for first, *rest in pieces]
    assert torch.equal(together, torch.cat(apart))
    if name == "soap" and len(parts) == 2:
        names = {"block0_along0", "block0_along1", "block1_along0", "block1_along1"}
        assert set(eb.tree.get(state, "basis")) == names


SHAPES: list[tuple[int, ...]] = [(4, 4), (1, 5), (5, 1), (1, 1), (3, 2, 2), (3, 2, 2, 1), (0, 3), (3,), ()]
OF_MATRICES = ("muon", "normuon", "dion")


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in OPTIMIZERS for shape in SHAPES if name not in OF_MATRICES or len(shape) in (2, 4)],
)
def test_without_gradients_weights_only_decay(name: str, shape: tuple[int, ...]) -> None:
    before, tx = torch.ones(shape), OPTIMIZERS[name](0.5)
    after, state = steps(tx, before, [torch.zeros(shape)] * 3)
    assert torch.equal(after, before * 0.75 ** (2 if name in LATE else 3))
    assert all(bool(leaf.isfinite().all()) for leaf in eb.tree.leaves(state))
    if name == "kron":
        begun = eb.with_policy(tx, "FP32").init(before)
        for kept, factor in eb.tree.get(state, "factors").items():
            assert torch.equal(factor, eb.tree.get(begun, "factors")[kept])


@pytest.mark.parametrize(
    ("name", "slot"), [("soap", "basis"), ("shampoo", "roots"), ("kron", "factors"), ("dion", "momentum")]
)
def test_what_moves_slowly_is_not_rounded_to_nearest_in_bfloat16(name: str, slot: str) -> None:
    """A basis turns by less than half a unit in the last place; what Dion's rank leaves out adds up."""
    nearest = eb.Nearest("bfloat16")
    policy = replace(eb.policies.FP32, slots={slot: nearest})
    with pytest.raises(ValueError, match=rf"^Policy\.slots\['{slot}'\]: .*{slot}"):
        eb.with_policy(OPTIMIZERS[name](), policy)
    if slot == "momentum":
        with pytest.raises(ValueError, match=r"^Policy\.momentum: .*momentum"):
            eb.with_policy(OPTIMIZERS[name](), replace(eb.policies.FP32, momentum=nearest))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: E.heads(0), r"^heads: count: got \(0,\); accepted are whole numbers, at least 1"),
    (lambda: E.heads(2, rows=(0, 1)), r"^heads: rows: got \(0, 1\); accepted are whole numbers, at least 1"),
    (lambda: E.row_blocks(2, 3, inside=(E.heads(1),) * 3), r"^row_blocks\(2, 3\): inside: got 3 views; accepted .* or 2\."),
    (lambda: E.heads(2, inside=E.batched()), r"^inside: got batched; accepted are views of matrices"),
    (lambda: E.MatrixView("matrix", (2,)), r"^matrix: sizes: got \(2,\); accepted with it are none"),
    (lambda: E.MatrixView("heads", (2, 3)), r"^heads: count: got \(2, 3\); accepted"),
    (lambda: E.MatrixView("rows"), r"^kind: got 'rows'; accepted are 'matrix', 'flattened'"),
    (lambda: E.row_blocks(), r"^row_blocks: sizes: got \(\); accepted"),
    (lambda: E.row_blocks(2, True), r"^row_blocks: sizes: got \(2, True\); accepted"),
    (lambda: E.muon(decay_kind="l2"), r"^decay_kind: got 'l2'; accepted are 'decoupled', 'coupled', 'independent', 'cautious'"),
    (lambda: E.muon(matrices=E.Matrices(views={"(": E.heads(2)})), r"^views: got '\('; accepted are regular expressions"),
    (lambda: E.muon(iteration=E.NewtonSchulz(steps=100)), r"^steps: got 100; accepted is a whole number of steps, from 1 to 99"),
    (lambda: E.NewtonSchulz(arithmetic="float16"), r"^arithmetic: got 'float16'; accepted are 'bfloat16'"),
    (lambda: E.NewtonSchulz(normalization="spectral"), r"^normalization: got 'spectral'; accepted are 'frobenius'"),
    (lambda: E.muon(scale="muon"), r"^scale: got 'muon'; accepted are 'original', .*a function of rows and columns"),
    (lambda: E.muon(iteration=E.NewtonSchulz(eps=0.0)), r"^eps: got 0\.0; accepted is a number above zero"),
    (lambda: E.muon(decay_kind="independent"), r"^max_learning_rate: .*needs both or neither"),
    (lambda: E.muon(before="left"), r"^before: got 'left'; accepted are 'rows', 'columns', 'both', 'rows_then_columns'"),
    (lambda: E.muon(after="top"), r"^after: got 'top'; accepted are"),
    (lambda: E.equalize(sides="left"), r"^sides: got 'left'"),
    (lambda: E.normuon(side="columns"), r"^side: got 'columns'; accepted are 'rows', 'longer'"),
    (lambda: E.normuon(norm="spectral"), r"^norm: got 'spectral'; accepted are 'kept', 'exact'"),
    (lambda: E.normuon(b2=1.0), r"^b2: got 1\.0"),
    (lambda: E.scale_by_normuon(eps=0.0), r"^eps: got 0\.0; accepted is a number above zero"),
    (lambda: E.scale_by_shape(scale="muon"), r"^scale: got 'muon'"),
    (lambda: E.NewtonSchulz(batching="apart"), r"^batching: got 'apart'; accepted are 'alone', 'together'"),
    (lambda: E.muon(others_rate=-1.0), r"^others_rate: got -1\.0"),
    (lambda: E.muon(others=None, others_rate=0.1), r"^others_rate: got 0\.1 with others=None; accepted with it is None"),
    (lambda: E.muon(max_learning_rate=0.1), r"^max_learning_rate: got 0\.1 with decay_kind='decoupled'; accepted"),
    (lambda: E.muon(others=None, matrices=E.Matrices(labels=lambda path, p: "matrix")), r"^labels: got a function with others=None"),
    (lambda: E.normuon(others=None).init({"w": torch.ones(3)}), r"^w: got shape \(3,\); accepted are matrices"),
    (lambda: E.soap(correction="shampoo"), r"^correction: got 'shampoo'; accepted are 'none', 'kl'"),
    (lambda: E.soap(period=0), r"^period: got 0; accepted is a whole number of updates, at least 1"),
    (lambda: E.soap(where=E.Kronecker(sides="left")), r"^sides: got 'left'; accepted are 'all', 'smaller'"),
    (lambda: E.soap(where=E.Kronecker(max_dimension=0)), r"^max_dimension: got 0; accepted is a whole number of rows"),
    (lambda: E.soap(factor_decay=1.0), r"^factor_decay: got 1\.0"),
    (lambda: E.soap(where=E.Kronecker(E.heads(2)), matrices=E.Matrices(view=E.heads(3))), r"^where\.view: got .*is one of them"),
    (lambda: E.soap(matrices=E.Matrices(view=E.heads(2)), where=E.Kronecker(merge=True)), r"^merge: got True with a view"),
    (lambda: E.Grafting("lion"), r"^of: got 'lion'; accepted are 'none', 'sgd', 'adagrad', 'rmsprop', 'adam'"),
    (lambda: E.shampoo(damping="middle"), r"^damping: got 'middle'; accepted are 'root', 'start'"),
    (lambda: E.shampoo(graft=E.Grafting(of="none", start=3)), r"^start: got 3 without a graft"),
    (lambda: E.shampoo(graft=E.Grafting(start=0)), r"^start: got 0; accepted is a whole number of updates, at least 1, or None"),
    (lambda: E.shampoo(period=1.5), r"^period: got 1\.5"),
    (lambda: E.shampoo(exponent=-0.5), r"^exponent: got -0\.5"),
    (lambda: E.kron(period=0), r"^period: got 0; accepted is a whole number of updates, at least 1"),
    (lambda: E.kron(start=0.0), r"^start: got 0\.0; accepted is a number above zero"),
    (lambda: E.kron(preconditioner_rate=1.5), r"^preconditioner_rate: got 1\.5"),
    (lambda: E.kron(max_rms=-1.0), r"^max_rms: got -1\.0"),
    (lambda: E.dion(others=None, rank_divisor=0), r"^rank_divisor: got 0; accepted is a whole number, at least 1"),
    (lambda: E.dion(others=None, decay=1.5), r"^decay: got 1\.5"),
    (lambda: E.dion(others=None, scale="muon"), r"^scale: got 'muon'; accepted are 'original'"),
    (lambda: E.dion(others=None).init({"a": {"b": drawn(3)}}), r"^a\.b: got shape \(3,\); accepted are matrices, .*everybit\.dion"),
    (lambda: E.dion(others=None, matrices=E.Matrices(view=E.heads(4))).init([drawn(6, 2)]), r"^0: heads\(4\): got \(6, 2\)"),
    (lambda: E.shampoo(eps=schedule, damping="start").init({"w": drawn(2, 2)}), r"^eps: got a schedule with damping='start'"),
    (
        lambda: E.soap(matrices=E.Matrices(view=E.heads(4))).init({"layers": [drawn(6, 4)]}),
        r"^layers\.0: heads\(4\): got \(6, 4\); accepted are parameters whose rows",
    ),
    (lambda: E.NewtonSchulz("quartic"), r"^coefficients: got 'quartic'; accepted are 'quintic', 'cubic', 'polar_express'"),
    (lambda: E.NewtonSchulz(((1.0, 2.0),)), r"^coefficients: got \(\(1.0, 2.0\),\); accepted is a tuple of triples"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[1:30] for _, message in REFUSED])
def test_arguments_that_cannot_be_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["soap", "shampoo", "kron", "dion", "muon"])
def test_what_is_no_view_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"^view: got 8; accepted are None and values such as everybit.heads\(8\)"):
        OPTIMIZERS[name](matrices=E.Matrices(view=8))
