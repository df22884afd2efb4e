"""Muon: its iteration, how parameters become matrices, and its options against torch's optimizer and formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

import everybit as eb
from everybit.linalg import PUBLISHED, Normalization
from everybit.linalg.orthogonalization import CoefficientName, IterationForm
from everybit.transforms.matrix_wise import SCALES
from tests.support.following import PEAK, STEPS, deviation, formula, ours, schedule
from tests.support.matrix_model import small

UNTYPED: Any = eb.muon
UNTYPED_VIEW: Any = eb.MatrixView
ITERATION: Any = eb.NewtonSchulz
FORMS: tuple[IterationForm, ...] = ("plain", "gram")
QUINTIC = PUBLISHED["quintic"][0]
SIDES = st.integers(1, 12)
SEEDS = st.integers(0, 2**16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def of_singular_values(values: Tensor, rows: int, columns: int) -> Tensor:
    u, _ = torch.linalg.qr(drawn(rows, len(values), seed=1, dtype=torch.float64))
    v, _ = torch.linalg.qr(drawn(columns, len(values), seed=2, dtype=torch.float64))
    found: Tensor = u @ torch.diag(values) @ v.T
    return found


def torchs(x: Tensor, steps: int = 5) -> Tensor:
    # It divides its argument in place if that is bfloat16.
    return torch.as_tensor(_muon._zeropower_via_newtonschulz(x.clone(), QUINTIC, steps, 1e-7))


# -- the iteration ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(SIDES, SIDES, SEEDS, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-20, 20))
def test_torchs_bits(rows: int, columns: int, seed: int, dtype: torch.dtype, exponent: int) -> None:
    x = drawn(rows, columns, seed=seed, dtype=dtype) * 2.0**exponent
    assert torch.equal(eb.NewtonSchulz().orthogonalized(x), torchs(x).to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (64, 48), (48, 64), (33, 33)])
def test_torchs_bits_of_vectors_and_larger_matrices(shape: tuple[int, int]) -> None:
    x = drawn(*shape)
    assert torch.equal(eb.NewtonSchulz().orthogonalized(x), torchs(x).float())


# The least and the greatest value to which the polynomials take [least, 1], on two million points, and to spare 1e-3. The quintic set's
# are its fixed interval; Polar Express is made for values of at least 1e-3 in five steps.
INTERVALS: dict[str, tuple[CoefficientName, int, float, float, float]] = {
    "quintic": ("quintic", 5, 0.05, 0.681, 1.135),
    "quintic, more steps": ("quintic", 12, 1e-5, 0.681, 1.135),
    "cubic": ("cubic", 40, 1e-5, 0.999, 1.001),
    "polar express": ("polar_express", 5, 1.01e-3, 0.852, 1.142),
    "deepseek": ("deepseek", 10, 9e-5, 0.999, 1.003),
    "deepseek, more steps": ("deepseek", 14, 1e-5, 0.999, 1.003),
}


KINDS = {
    "random": torch.linalg.svdvals(drawn(6, 9, seed=3, dtype=torch.float64)),
    "ill-conditioned": torch.logspace(0, -4, 8, dtype=torch.float64),
    "rank-deficient": torch.tensor([3.0, 2.0, 1.5], dtype=torch.float64),
}
ENOUGH = [
    (name, kind)
    for name, (_, _, least, _, _) in INTERVALS.items()
    for kind, values in KINDS.items()
    if float(values.min() / values.norm()) >= least
]


@pytest.mark.parametrize(("name", "kind"), ENOUGH)
@pytest.mark.parametrize(("form", "columns"), [("plain", 10), ("gram", 20)])
def test_singular_values_end_in_the_published_interval(name: str, kind: str, form: IterationForm, columns: int) -> None:
    """R has the squares of singular values: rounding errors of it grow by the squares of the factors of small ones."""
    coefficients, steps, _, low, high = INTERVALS[name]
    values = KINDS[kind]
    x = of_singular_values(values, 8, columns)
    normalization: Normalization = "polar_express" if coefficients == "polar_express" else "frobenius"
    iteration = eb.NewtonSchulz(coefficients, steps, "float64", normalization, form=form)
    chosen, found = iteration.triples, iteration.orthogonalized(x)
    after = torch.linalg.svdvals(found)
    assert low <= float(after[: len(values)].min())
    assert float(after.max()) <= high
    # What has no singular value gets none but rounding, which each step can make a_k times larger.
    grown = math.prod(a for a, _, _ in chosen) ** (2 if form == "gram" else 1)
    assert float(after[len(values) :].sum()) <= 80 * 2.0**-53 * grown
    # And each value goes where its polynomials take it: singular vectors stay.
    expected = of_singular_values(mapped(values, chosen, normalization), 8, columns)
    assert float((found - expected).abs().max()) <= 100 * 2.0**-53 * grown


def mapped(values: Tensor, coefficients: tuple[Any, ...], normalization: str) -> Tensor:
    """The singular values after the iteration, from the polynomials alone."""
    norm = values.norm()
    x = values / (norm.clamp(min=1e-7) if normalization == "frobenius" else norm * 1.01 + 1e-7)
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return torch.as_tensor(x)


def test_in_bfloat16_they_stay_around_one() -> None:
    """Keller Jordan's page says: between 0.5 and 1.5."""
    for shape in ((16, 16), (24, 64), (64, 24)):
        found = torch.linalg.svdvals(eb.NewtonSchulz(steps=7).orthogonalized(drawn(*shape)))
        assert 0.5 <= float(found.min()) <= float(found.max()) <= 1.5


@pytest.mark.parametrize("arithmetic", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_zero_stays_zero(name: CoefficientName, arithmetic: Any) -> None:
    for normalization in ("frobenius", "polar_express"):
        for x in (torch.zeros(3, 5), torch.full((5, 3), 1e-30)):
            found = eb.NewtonSchulz(name, arithmetic=arithmetic, normalization=normalization).orthogonalized(x)
            assert found.isfinite().all()
            assert x.any() or not found.any()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), SIDES, SIDES, SEEDS)
def test_bits_do_not_depend_on_the_batch(count: int, rows: int, columns: int, seed: int) -> None:
    batch = drawn(count, rows, columns, seed=seed)
    found = eb.NewtonSchulz().orthogonalized(batch)
    mapped_over: Tensor = torch.func.vmap(lambda x: eb.NewtonSchulz().orthogonalized(x))(batch)
    for one, together, in_map in zip(batch, found, mapped_over, strict=True):
        alone = eb.NewtonSchulz().orthogonalized(one)
        assert torch.equal(alone, together)
        assert torch.equal(alone, in_map)


@pytest.mark.exhaustive
def test_compiled_bits_are_eager_bits() -> None:
    x = drawn(33, 20)
    for arithmetic in ("bfloat16", "float32"):

        def step(x: Tensor, arithmetic: Any = arithmetic) -> Tensor:
            return eb.NewtonSchulz(arithmetic=arithmetic).orthogonalized(x * 1.5) * 0.2

        assert torch.equal(torch.compile(step, fullgraph=True)(x), step(x))


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "equal": lambda n: torch.ones(n),
    "power law": lambda n: 1 / torch.arange(1, n + 1),
    "to 1e-6": lambda n: torch.logspace(0, -6, n),
    "of low rank": lambda n: torch.where(torch.arange(n) < n // 8, 1.0, 1e-5),
    "one great": lambda n: torch.where(torch.arange(n) == 0, 1.0, 3e-3),
}


def of_spectrum(name: str, rows: int, columns: int, seed: int) -> Tensor:
    left, right = (torch.linalg.qr(drawn(size, rows, seed=seed + size))[0] for size in (rows, columns))
    made: Tensor = (left * SPECTRA[name](rows)) @ right.mT
    return made


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("coefficients", ["quintic", "polar_express", "deepseek", "cubic"])
@pytest.mark.sampled(5)
def test_the_gram_form_leaves_no_singular_value_above_the_greatest(name: str, coefficients: CoefficientName) -> None:
    """The greatest to which polynomials take (0, 1], with an error of 2^-8 of it for each of three products in each step.

    In bfloat16 R has no digit of singular values below 1/16. Runs of two and three steps, as in float32, take some of these to 10^21.
    """
    steps = 10 if coefficients == "deepseek" else 5
    normalization: Normalization = "polar_express" if coefficients == "polar_express" else "frobenius"
    grid = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    for a, b, c in eb.NewtonSchulz(coefficients, steps).triples:
        grid = a * grid + b * grid**3 + c * grid**5
    for arithmetic, digits in (("float32", 24), ("bfloat16", 8)):
        for seed, shape in enumerate(((300, 700), (160, 40), (128, 512))):
            rows, columns = sorted(shape)
            x = of_spectrum(name, rows, columns, seed)
            x = x if shape[0] < shape[1] else x.mT
            iteration = ITERATION(coefficients, steps, arithmetic, normalization, form="gram")
            values = torch.linalg.svdvals(iteration.orthogonalized(x.float()))
            assert float(values.max()) <= float(grid.max()) * (1 + 3 * steps * 2.0**-digits) + 2.0**-20


def test_the_gram_form_of_short_matrices_has_the_bits_of_the_plain_one() -> None:
    for shape in ((7, 13), (5, 5), (3, 40, 40)):
        plain, gram = (eb.NewtonSchulz(form=form).orthogonalized(drawn(*shape)) for form in FORMS)
        assert torch.equal(plain, gram)
    plain, gram = (eb.NewtonSchulz(form=form).orthogonalized(drawn(40, 160)) for form in FORMS)
    assert not torch.equal(plain, gram)


@pytest.mark.parametrize("shape", [(300, 900), (40, 160), (160, 40), (64, 80)])
@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.sampled(4)
def test_the_cost_is_that_of_the_products(shape: tuple[int, int], steps: int) -> None:
    """As torch counts the operations: two for each multiply-add."""
    arithmetics: tuple[Any, ...] = ("float32", "bfloat16")
    for arithmetic in arithmetics:
        for form in FORMS:
            for coefficients in ("quintic", "cubic"):
                iteration = ITERATION(coefficients, steps, arithmetic, form=form)
                x = drawn(*shape).requires_grad_()  # then the operations are torch's
                with FlopCounterMode(display=False) as counter:
                    iteration.orthogonalized(x)
                assert 2 * iteration.cost(*shape) == counter.get_total_flops()


# -- how parameters become matrices -------------------------------------------------------------------------------------------


Batches = list[list[Tensor]]
Seen = tuple[eb.MatrixView, tuple[int, ...], Callable[[Tensor], Batches]]
"""A view, the shape of a parameter that it fits, and a slow way to its matrices by indices, in batches."""


@st.composite
def inside(draw: st.DrawFn, depth: int) -> Seen:
    """Of a matrix."""
    kind = draw(
        st.sampled_from(("matrix", "heads", "parts", "interleaved", "transposed", "blocks")[: 6 if depth else 1])
    )
    if kind == "matrix":
        return eb.matrix(), (draw(SIDES), draw(SIDES)), lambda x: [[x]]
    view, (rows, columns), of = draw(inside(depth - 1))
    count = draw(st.integers(1, 3))
    both = [rows, draw(st.integers(1, 5))]
    if kind == "heads":
        return eb.heads(count, inside=view), (count * rows, columns), lambda x: _each(x.split(rows), of)
    if kind == "interleaved":
        shape = (count * rows, columns)
        return eb.interleaved(count, inside=view), shape, lambda x: _each([x[h::count] for h in range(count)], of)
    if kind == "transposed":
        return eb.transposed(view), (columns, rows), lambda x: of(x.T)
    if kind == "blocks":
        return (
            eb.row_blocks(*both, inside=(view, eb.matrix())),
            (sum(both), columns),
            lambda x: [*of(x[:rows]), [x[rows:]]],
        )

    def parts(x: Tensor) -> Batches:
        each = [torch.split(head, both) for head in torch.split(x, sum(both))]
        return [*_each([one for one, _ in each], of), [rest for _, rest in each]]

    return eb.heads(count, rows=both, inside=(view, eb.matrix())), (count * sum(both), columns), parts


def _each(matrices: Iterable[Tensor], of: Callable[[Tensor], Batches]) -> Batches:
    """The first batch of each in one, and so on."""
    return [[one for batch in several for one in batch] for several in zip(*map(of, matrices), strict=True)]


@st.composite
def views(draw: st.DrawFn) -> Seen:
    kind = draw(st.sampled_from(["inside", "flattened", "batched"]))
    if kind == "flattened":
        long = (draw(SIDES), *draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
        return eb.flattened(), long, lambda x: [[x.reshape(long[0], -1)]]
    view, shape, of = draw(inside(2))
    if kind == "inside":
        return view, shape, of
    lead = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return eb.batched(view), (*lead, *shape), lambda x: _each(x.reshape(-1, *shape), of)


@settings(deadline=None, max_examples=200)
@given(views())
def test_a_view_is_its_matrices_and_what_is_split_can_be_joined(case: Seen) -> None:
    view, shape, of = case
    x = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    parts = view.split(x)
    assert [tuple(part.shape) for part in parts] == view.shapes(shape)
    assert torch.equal(view.joined(parts, shape), x)
    assert view.joined(parts, shape).is_contiguous()
    found = [one for part in parts for one in part.reshape(-1, *part.shape[-2:])]
    expected = [*chain.from_iterable(of(x))]
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@settings(deadline=None, max_examples=60)
@given(views())
def test_each_matrix_of_a_view_has_the_bits_of_the_matrix_alone(case: Seen) -> None:
    view, shape, of = case
    x = drawn(*shape)
    updates, _ = stepped(eb.muon(0.1, weight_decay=0.0, matrices=eb.Matrices(view=view), others=None), x)
    for found, one in zip(*map(chain.from_iterable, (of(updates), of(x))), strict=True):
        alone, _ = stepped(eb.muon(0.1, weight_decay=0.0, others=None), one.contiguous())
        assert torch.equal(found, alone)


def test_rows_and_columns_are_where_they_should_be() -> None:
    x = drawn(6, 4)
    assert torch.equal(eb.heads(3).split(x)[0][1], x[2:4])
    assert torch.equal(eb.row_blocks(1, 5).split(x)[1], x[1:])
    kernel = drawn(5, 2, 3)
    assert torch.equal(eb.flattened().split(kernel)[0][4], kernel[4].reshape(-1))
    assert torch.equal(eb.batched().split(kernel)[0][4], kernel[4])


@pytest.mark.parametrize(
    ("view", "shape", "message"),
    [
        (eb.heads(4), (6, 4), r"^layers\.0\.w: heads\(4\): got \(6, 4\); accepted are parameters whose rows 4 divides"),
        (
            eb.heads(2, rows=(2, 2)),
            (6, 4),
            r"^layers\.0\.w: heads\(2, rows=\(2, 2\)\): got \(6, 4\); accepted .* of 8 rows",
        ),
        (eb.interleaved(4), (6, 4), r"^layers\.0\.w: interleaved\(4\): got \(6, 4\); accepted .* whose rows 4 divides"),
        (eb.batched(eb.heads(4)), (3, 6, 4), r"^layers\.0\.w: heads\(4\): got \(3, 6, 4\); accepted .* 4 divides"),
        (eb.row_blocks(4, 4), (6, 4), r"^layers\.0\.w: row_blocks\(4, 4\): got \(6, 4\); accepted .* of 8 rows"),
        (
            eb.matrix(),
            (6, 4, 2),
            r"^layers\.0\.w: matrix: got a parameter of shape \(6, 4, 2\); accepted .* two dimensions",
        ),
        (eb.batched(), (6, 4), r"^layers\.0\.w: batched: got .*three dimensions or more"),
        (eb.flattened(), (6,), r"^layers\.0\.w: flattened: got .*two dimensions or more"),
        (None, (6,), r"^layers\.0\.w: got shape \(6,\); accepted are matrices, .*others=everybit\.adamw"),
        (None, (6, 4, 2), r"^layers\.0\.w: got shape \(6, 4, 2\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(
    view: eb.MatrixView | None, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        eb.muon(1e-3, matrices=eb.Matrices(view=view), others=None).init({"layers": [{"w": torch.ones(shape)}]})


# -- against torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_every_step_is_torchs_from_torchs_own_state(scale: Any, nesterov: bool) -> None:
    """Momentum differs in its last bits, which rounding to bfloat16 hides in nearly all steps; where it does, weights agree closely."""
    momentum, rate, decay = 0.95, 0.02, 0.1
    weights = {"tall": nn.Parameter(drawn(9, 4)), "wide": nn.Parameter(drawn(3, 8, seed=1))}
    theirs = torch.optim.Muon(
        weights.values(), lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, adjust_lr_fn=scale
    )
    tx: Any = eb.muon(rate, momentum=momentum, nesterov=nesterov, weight_decay=decay, scale=scale, others=None)
    state = tx.init({name: p.detach() for name, p in weights.items()})
    alike = 0
    for step in range(STEPS):
        before = {name: p.detach().clone() for name, p in weights.items()}
        grads = {name: drawn(*p.shape, seed=2 + step) + 0.5 for name, p in weights.items()}
        updates, state = tx.update(grads, state, before)
        for name, p in weights.items():
            p.grad = grads[name].clone()
        theirs.step()  # type: ignore[no-untyped-call]
        own = {name: theirs.state[p]["momentum_buffer"] for name, p in weights.items()}
        found = eb.tree.get(state, "momentum")
        for name, p in weights.items():
            # Three rounded operations here, three there, each of a number no larger than both arguments together.
            size = float(own[name].abs().max() + grads[name].abs().max())
            assert float((found[name] - own[name]).abs().max()) <= 6 * 2.0**-24 * size
            ahead, its = (
                momentum * m + (1 - momentum) * grads[name] if nesterov else m for m in (found[name], own[name])
            )
            if torch.equal(ahead.bfloat16(), its.bfloat16()):
                alike += 1
                apart = (before[name] + updates[name] - p.detach()).abs().max()
                # Some five rounded operations on each side, of numbers up to the largest weight or update.
                largest = float(before[name].abs().max() + updates[name].abs().max())
                # The iteration of torch's own lerp may round otherwise than the formula above in single elements.
                assert float(apart) <= 10 * 2.0**-24 * largest or not torch.equal(ahead, its)
        state = eb.tree.set(state, "momentum", {name: value.clone() for name, value in own.items()})
    assert alike >= STEPS  # of twice as many


# -- against formulas ---------------------------------------------------------------------------------------------------------

SHAPES = {"tall": (6, 4), "wide": (3, 5), "row": (1, 4), "column": (3, 1)}

# A step rounds some 100 times; the iteration makes this up to the product of its first coefficients, at most 1000, times larger, and a
# weight gets it times a learning rate and a scale below 1; and that in each of the steps.
ROUNDING = STEPS * PEAK * 100 * 1000 * 2.0**-53


def polar(x: Tensor, coefficients: Any, normalization: str) -> Tensor:
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    found: Tensor = u @ torch.diag(mapped(values, coefficients, normalization)) @ v
    return found


def muon(
    *,
    averaged: bool = True,
    nesterov: bool = True,
    coefficients: CoefficientName = "quintic",
    normalization: str = "frobenius",
    scale: Callable[[int, int], float] = SCALES["original"],
    decay_kind: str = "decoupled",
) -> Callable[[Tensor, list[Tensor], Callable[[int], float]], Iterator[Tensor]]:
    def follow(p: Tensor, grads: list[Tensor], lr: Callable[[int], float]) -> Iterator[Tensor]:
        mean = torch.zeros_like(p)
        for done, given_gradient in enumerate(grads):
            g = given_gradient + 0.1 * p if decay_kind == "coupled" else given_gradient
            share = 0.05 if averaged else 1.0
            mean = 0.95 * mean + share * g
            ahead = 0.95 * mean + share * g if nesterov else mean
            u = scale(*p.shape) * polar(ahead, eb.NewtonSchulz(coefficients).triples, normalization)
            rate = lr(done)
            shrink = {"decoupled": rate * 0.1, "cautious": rate * 0.1, "independent": 0.1 * rate / PEAK}.get(
                decay_kind, 0.0
            )
            where = (u * p > 0).to(p) if decay_kind == "cautious" else torch.ones_like(p)
            p = p - rate * u - shrink * where * p
            yield p

    return follow


FORMULAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch, Keller Jordan": ({}, {}),
    "momentum alone": ({"nesterov": False}, {}),
    "Moonlight": ({"averaged": False, "scale": "match_rms_adamw"}, {"scale": lambda r, c: 0.2 * max(r, c) ** 0.5}),
    "Dion": (
        {"averaged": False, "nesterov": False, "scale": "spectral_unclamped"},
        {"scale": lambda r, c: (r / c) ** 0.5},
    ),
    "Polar Express": ({"coefficients": "polar_express", "normalization": "polar_express"}, {}),
    "cubic": ({"coefficients": "cubic"}, {}),
    "a number": ({"scale": 0.3}, {"scale": lambda _r, _c: 0.3}),
    "a function": ({"scale": lambda r, c: 0.1 * (r + c)}, {"scale": lambda r, c: 0.1 * (r + c)}),
    "coupled": ({"decay_kind": "coupled"}, {}),
    "independent": ({"decay_kind": "independent", "max_learning_rate": PEAK}, {}),
    "cautious": ({"decay_kind": "cautious"}, {}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if number % 2 else pytest.mark.exhaustive) for number, name in enumerate(FORMULAS)],
)
@pytest.mark.sampled(3)
def test_options_follow_their_formulas(name: str) -> None:
    options, its = FORMULAS[name]
    of_iteration = {key: options[key] for key in options if key in ("coefficients", "normalization")}
    others = {key: options[key] for key in options if key not in of_iteration}
    tx = eb.muon(schedule, iteration=ITERATION(arithmetic="float64", **of_iteration), **others)
    same = of_iteration | {key: others[key] for key in others if key in ("averaged", "nesterov", "decay_kind")}
    expected = formula(muon(**(same | its)), SHAPES)
    assert deviation(ours(tx, shapes=SHAPES), expected) <= ROUNDING
    if name != "torch, Keller Jordan":
        assert deviation(formula(muon(), SHAPES), expected) > 1e6 * ROUNDING


def test_a_convolution_is_a_matrix_and_experts_are_many() -> None:
    """As each matrix alone."""
    kernel = drawn(4, 2, 3, 3)
    (found, _), (flat, _) = (stepped(eb.muon(0.1, weight_decay=0.0), x) for x in (kernel, kernel.reshape(4, 18)))
    assert torch.equal(found.reshape(4, 18), flat)
    experts = drawn(3, 4, 5)
    together, _ = stepped(eb.muon(0.1, matrices=eb.Matrices(view=eb.batched())), experts)
    blocks, _ = stepped(eb.muon(0.1, matrices=eb.Matrices(view=eb.row_blocks(4, 4, 4))), experts.reshape(12, 5))
    for index, expert in enumerate(experts):
        alone, _ = stepped(eb.muon(0.1), expert)
        assert torch.equal(together[index], alone)
        assert torch.equal(blocks.reshape(3, 4, 5)[index], alone)


def stepped(tx: Any, x: Tensor) -> tuple[Tensor, Any]:
    params = {"w": x}
    updates, state = tx.update({"w": x.cos()}, tx.init(params), params)
    return updates["w"], state


# -- with another optimizer for the rest --------------------------------------------------------------------------------------


def test_labels_of_a_model() -> None:
    params = dict(small().named_parameters())
    tx: Any = eb.muon(1e-3, others=eb.adamw, matrices=eb.Matrices(views={"qkv": eb.row_blocks(6, 6, 6)}))
    assert eb.label_table(tx.labels, params).splitlines() == [
        "others: 5 parameters, 114 elements",
        "  embed.weight (7, 6)",
        "  qkv.bias (18,)",
        "  norm.weight (6,)",
        "  norm.bias (6,)",
        "  lm_head.weight (7, 6)",
        "qkv: 1 parameter, 108 elements",
        "  qkv.weight (18, 6)",
        "matrix: 1 parameter, 108 elements",
        "  ensemble.weight (6, 18)",
    ]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("encoder.layer.0.attention.output.dense.weight", "matrix"),
        ("blocks.0.mlp.members.weight", "matrix"),
        ("layers.0.shared_expert.up_proj.weight", "matrix"),
        ("layers.0.multihead.weight", "matrix"),
        ("model.embed_tokens.weight", "others"),
        ("tok_embeddings.weight", "others"),
        ("transformer.wte.weight", "others"),
        ("shared.weight", "others"),
        ("output.weight", "others"),
        ("score.weight", "others"),
        ("head.weight", "others"),
        ("classifier.0.weight", "others"),
        ("logits.weight", "others"),
        ("to_logits.1.weight", "others"),
    ],
)
def test_first_and_last_layers_by_name(name: str, label: str) -> None:
    assert eb.HiddenMatrices()(f"['{name}']", torch.ones(2, 2)) == label


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"no parameter is labelled 'matrix'; the labels given are 'others', to \['b'\] of shape \(3,\)\. ",
    ):
        eb.muon(1e-3, others=eb.adamw).init({"b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"no parameter is labelled 'qkv'; the labels given are 'matrix', 'others'"):
        eb.muon(1e-3, others=eb.adamw, matrices=eb.Matrices(views={"qkv": eb.heads(2)})).init(
            {"a": torch.ones(3, 2), "b": torch.ones(3)}
        )
    eb.muon(1e-3, others=eb.adamw).init({"a": torch.ones(3, 2)})
    eb.muon(1e-3, matrices=eb.Matrices(views={"a": eb.heads(3)})).init({"a": torch.ones(3, 2)})
