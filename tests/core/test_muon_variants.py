"""NorMuon, MuonEq and Muon+ against their formulas in float64; 200 steps of torch's Muon; matrices that have no rank to speak of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everybit as eb
from everybit.linalg import PUBLISHED, Batching
from everybit.linalg.orthogonalization import CoefficientName
from everybit.transforms import UnitSides
from tests.core.test_muon import ROUNDING, SHAPES, drawn, polar
from tests.support.following import deviation, formula, gradients, ours, schedule, theirs

UNTYPED: Any = eb.muon
ITERATION: Any = eb.NewtonSchulz
NORMUON: Any = eb.normuon
Follow = Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]


# -- against torch's, from beginning to end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nesterov", "scale"),
    [
        (True, "original"),
        (False, "match_rms_adamw"),
        pytest.param(False, "original", marks=pytest.mark.exhaustive),
        pytest.param(True, "match_rms_adamw", marks=pytest.mark.exhaustive),
    ],
)
def test_two_hundred_steps_of_torchs(scale: Any, nesterov: bool) -> None:
    """In float64, where the last bits of the momentum disappear when it is rounded to bfloat16, the iteration's dtype in both."""
    oracle = theirs(
        lambda params: torch.optim.Muon(params, lr=1.0, nesterov=nesterov, weight_decay=0.1, adjust_lr_fn=scale),
        shapes=SHAPES,
    )
    found = ours(eb.muon(schedule, nesterov=nesterov, scale=scale), shapes=SHAPES)
    # Some ten operations a step on weights and updates of the size of the largest.
    assert deviation(found, oracle) <= 200 * 10 * 2.0**-53


# -- against formulas ---------------------------------------------------------------------------------------------------------


def lengths(x: Tensor, side: str, eps: float) -> Tensor:
    return ((x * x).sum(1 if side == "rows" else 0, keepdim=True) + eps).sqrt()


def equalized(x: Tensor, sides: UnitSides | None, eps: float) -> Tensor:
    if sides is None:
        return x
    if sides == "both":
        return x / lengths(x, "rows", eps) / lengths(x, "columns", eps)
    for side in sides.split("_then_"):
        x = x / lengths(x, side, eps)
    return x


def equal_muon(before: UnitSides | None, after: UnitSides | None) -> Follow:
    """MuonEq and Muon+ as their papers write them, at momentum 0.95 and weight decay 0.1."""

    def follow(p: Tensor, grads: list[Tensor], lr: Callable[[int], float]) -> Iterator[Tensor]:
        mean = torch.zeros_like(p)
        for done, g in enumerate(grads):
            mean = 0.95 * mean + 0.05 * g
            ahead = equalized(0.95 * mean + 0.05 * g, before, 1e-8)
            u = equalized(polar(ahead, eb.NewtonSchulz().triples, "frobenius"), after, 1e-7)
            p = p - lr(done) * (math.sqrt(max(1.0, p.shape[0] / p.shape[1])) * u + 0.1 * p)
            yield p

    return follow


EQUAL: dict[str, dict[str, Any]] = {
    "MuonEq": {"before": "rows"},
    "MuonEq of columns": {"before": "columns"},
    "MuonEq of both": {"before": "both"},
    "Muon+": {"after": "columns_then_rows"},
    "Muon+, rows first": {"after": "rows_then_columns"},
    "Muon+ of rows": {"after": "rows"},
    "both": {"before": "rows", "after": "columns"},
}


SAMPLED = ("MuonEq", "MuonEq of both", "Muon+")


@pytest.mark.parametrize(
    "name", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.exhaustive) for name in EQUAL]
)
@pytest.mark.sampled(3)
def test_equal_rows_and_columns_follow_their_formulas(name: str) -> None:
    options = EQUAL[name]
    expected = formula(equal_muon(options.get("before"), options.get("after")), SHAPES)
    found = ours(eb.muon(schedule, iteration=eb.NewtonSchulz(arithmetic="float64"), **options), shapes=SHAPES)
    assert deviation(found, expected) <= ROUNDING
    assert deviation(formula(equal_muon(None, None), SHAPES), expected) > 1e6 * ROUNDING


def norm_muon(*, side: str = "rows", norm: str = "kept", debias: bool = False, moonlight: bool = False) -> Follow:
    """NorMuon: its authors' code, and the answers of others, at momentum 0.95 and b2 0.95; without weight decay."""

    def follow(p: Tensor, grads: list[Tensor], lr: Callable[[int], float]) -> Iterator[Tensor]:
        rows, columns = p.shape
        along = 1 if side == "rows" or rows >= columns else 0
        mean, v = torch.zeros_like(p), torch.zeros_like(p.sum(along, keepdim=True))
        for done, g in enumerate(grads):
            mean = 0.95 * mean + 0.05 * g
            o = polar(0.95 * mean + 0.05 * g, eb.NewtonSchulz().triples, "frobenius")
            v = 0.95 * v + 0.05 * (o * o).mean(along, keepdim=True)
            u = o / ((v / (1 - 0.95 ** (done + 1)) if debias else v).sqrt() + 1e-10)
            size = float(o.norm()) if norm == "kept" else math.sqrt(min(rows, columns))
            u = u * size / (u.norm() + 1e-10)
            scale = 0.2 * math.sqrt(max(rows, columns)) if moonlight else math.sqrt(max(1.0, rows / columns))
            p = p - lr(done) * scale * u
            yield p

    return follow


NORMUONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "its authors'": ({}, {}),
    "the paper's": ({"norm": "exact", "scale": "match_rms_adamw"}, {"norm": "exact", "moonlight": True}),
    "modded-nanogpt's": ({"side": "longer"}, {"side": "longer"}),
    "an exact norm": ({"norm": "exact"}, {"norm": "exact"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name == "an exact norm" else name for name in NORMUONS]
)
@pytest.mark.sampled(3)
def test_normuon_follows_its_formulas(name: str) -> None:
    options, its = NORMUONS[name]
    expected = formula(norm_muon(**its), SHAPES)
    assert (
        deviation(
            ours(eb.normuon(schedule, iteration=eb.NewtonSchulz(arithmetic="float64"), **options), shapes=SHAPES),
            expected,
        )
        <= ROUNDING
    )
    if options:
        assert deviation(formula(norm_muon(), SHAPES), expected) > 1e6 * ROUNDING
    else:  # and it is another than Muon
        assert (
            deviation(
                ours(
                    eb.muon(schedule, iteration=eb.NewtonSchulz(arithmetic="float64"), weight_decay=0.0), shapes=SHAPES
                ),
                expected,
            )
            > 1e-3
        )


def test_a_norm_that_is_brought_back_takes_the_correction_of_the_bias_out_again() -> None:
    """But for eps, of 1e-10 beside roots of mean squares of about 0.4."""
    expected = formula(norm_muon(debias=True), SHAPES)
    debiased = partial(eb.scale_by_normuon, debias=True)
    tx = eb.muon(schedule, iteration=eb.NewtonSchulz(arithmetic="float64"), after=debiased, weight_decay=0.0)
    found = ours(tx, shapes=SHAPES)
    assert deviation(found, expected) <= ROUNDING
    assert deviation(formula(norm_muon(), SHAPES), expected) <= 200 * 1e-8


def test_each_matrix_of_a_parameter_has_its_own_moments() -> None:
    """A fused projection, experts and heads, over several steps, as each of their matrices alone."""
    fused, experts = drawn(9, 4), drawn(3, 3, 4)
    for view, x in ((eb.row_blocks(3, 3, 3), fused), (eb.heads(3), fused), (eb.batched(), experts)):
        for side in ("rows", "longer"):
            tx: Any = eb.normuon(0.1, matrices=eb.Matrices(view=view), side=side, others=None)
            one: Any = eb.normuon(0.1, side=side, others=None)
            state, states = tx.init(x), [one.init(part) for part in x.reshape(3, 3, 4)]
            for step in range(3):
                g = drawn(*x.shape, seed=step)
                u, state = tx.update(g, state, x)
                for number, part in enumerate(g.reshape(3, 3, 4)):
                    alone, states[number] = one.update(part, states[number], x.reshape(3, 3, 4)[number])
                    assert torch.equal(u.reshape(3, 3, 4)[number], alone), (view, side, step)


# -- degenerate matrices ------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {}, "MuonEq": {"before": "both"}, "Muon+": {"after": "columns_then_rows"}, "together": {},
}  # fmt: skip
DEGENERATE = {
    "zero": torch.zeros(4, 6),
    "a row": drawn(1, 5),
    "a column": drawn(5, 1),
    "one element": drawn(1, 1),
    "rank one": drawn(5, 1) @ drawn(1, 4, seed=1),
    "rows of zeros": torch.cat([torch.zeros(2, 4), drawn(2, 4)]),
    "very small": 1e-30 * drawn(3, 4),
    "very large": 1e30 * drawn(3, 4),
}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("name", [*VARIANTS, "normuon"])
def test_degenerate_gradients_never_give_nan(name: str, kind: str) -> None:
    x = DEGENERATE[kind]
    batching = "together" if name == "together" else "alone"
    for arithmetic in ("bfloat16", "float32"):
        tx: Any = (
            NORMUON(0.1, iteration=eb.NewtonSchulz(arithmetic=arithmetic))
            if name == "normuon"
            else UNTYPED(0.1, iteration=ITERATION(arithmetic=arithmetic, batching=batching), **VARIANTS[name])
        )
        params = {"w": torch.ones_like(x)}
        state = tx.init(params)
        for g in (x, torch.zeros_like(x), x):
            updates, state = tx.update({"w": g}, state, params)
            assert updates["w"].isfinite().all()
            if kind == "zero":  # weight decay alone is left, which NorMuon has none of by default
                left = 0.0 if name == "normuon" else 0.01
                assert float((updates["w"] + left).abs().max()) <= 2.0**-30


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_vector_becomes_a_unit_vector_times_what_the_polynomials_make_of_one(name: CoefficientName) -> None:
    """Matrices of one row or column, and of rank 1, have one singular value, which the norm makes 1."""
    value = 1.0
    for a, b, c in eb.NewtonSchulz(name).triples:
        value = a * value + b * value**3 + c * value**5
    for x in (drawn(1, 7, dtype=torch.float64), drawn(7, 1, dtype=torch.float64)):
        found = eb.NewtonSchulz(name, arithmetic="float64").orthogonalized(x)
        # Rounding of some 20 operations, which each step can make a_k times larger.
        assert float((found - value * x / x.norm()).abs().max()) <= 100 * 2.0**-53 * math.prod(
            a for a, _, _ in eb.NewtonSchulz(name).triples
        )


# -- equal shapes together ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 99),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_together_is_alone_but_for_rounding(count: int, rows: int, columns: int, seed: int, arithmetic: Any) -> None:
    batch = drawn(count, rows, columns, seed=seed)
    alone, together = (
        eb.NewtonSchulz("cubic", 3, arithmetic=arithmetic, batching=batching).orthogonalized(batch)
        for batching in get_args(Batching)
    )
    # Values of at most 1; three steps of three products, each rounded a few times, and each able to make an error 1.5 times larger.
    unit = 2.0**-8 if arithmetic == "bfloat16" else 2.0**-24 * math.sqrt(max(rows, columns))
    assert float((alone - together).abs().max()) <= 3 * 10 * 1.5**3 * unit


def test_together_takes_matrices_of_one_shape_from_all_parameters() -> None:
    """Each gets its own, in whatever parameter it is, under its view."""
    params = {
        "a": drawn(4, 6),
        "b": drawn(4, 6, seed=1),
        "c": drawn(6, 4, seed=2),
        "d": drawn(3, 4, 6, seed=3),
        "none": torch.ones(0, 3),
    }
    for name in ("a", "b", "c", "d"):
        view = eb.batched() if name == "d" else None
        (alone, _) = eb.orthogonalize(view, iteration=eb.NewtonSchulz(arithmetic="float64")).update(
            params[name], eb.identity().init(None), params[name]
        )
        chosen = {key: x for key, x in params.items() if (key == "d") == (name == "d")}
        together, _ = eb.orthogonalize(
            view, iteration=eb.NewtonSchulz(arithmetic="float64", batching="together")
        ).update(chosen, eb.identity().init(None), chosen)
        assert together.keys() == chosen.keys()
        assert float((together[name] - alone).abs().max()) <= 1e-10
        assert "none" not in chosen or together["none"].shape == (0, 3)


@pytest.mark.exhaustive
def test_together_is_compiled_to_eager_bits() -> None:
    def step(x: Tensor) -> Tensor:
        return eb.NewtonSchulz(batching="together").orthogonalized(x * 1.5) * 0.2

    x = drawn(5, 33, 20)
    assert torch.equal(torch.compile(step, fullgraph=True)(x), step(x))


def test_gradients_of_the_problem_are_not_degenerate() -> None:
    """So that comparisons of 200 steps compare something: singular values of all matrices stay where the iteration brings them up."""
    least = min(float(torch.linalg.svdvals(x)[-1] / x.norm()) for x in gradients(shapes=SHAPES)[0].values())
    assert least > 1e-3
