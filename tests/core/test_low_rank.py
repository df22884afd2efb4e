"""Transforms in a subspace: that they are what the projection makes of them, how their state is kept, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import everybit as eb
from tests.support.steps import drawn, steps

UNTYPED: Any = eb.low_rank


def test_galore_is_adam_in_a_subspace() -> None:
    adam = eb.scale_by_adam(eps=1e-6, eps_before_correction=True)
    made = eb.chain(eb.low_rank(adam, rank=2, period=2, scale=0.5), eb.scale_by_learning_rate(0.1))
    params = {"w": drawn(4, 5), "b": drawn(3)}
    gradients = [{"w": drawn(4, 5, seed=step), "b": drawn(3, seed=step)} for step in range(1, 5)]
    one, _ = steps(made, params, gradients)
    other, _ = steps(eb.galore(0.1, rank=2, period=2, scale=0.5), params, gradients)
    assert all(torch.equal(one[name], other[name]) for name in params)


INNER: dict[str, Callable[[], Any]] = {
    "lion": lambda: eb.scale_by_lion(),
    "momentum": lambda: eb.trace(0.9),
    "adafactor": lambda: eb.scale_by_factored_rms(),
    "muon": lambda: eb.chain(eb.trace(0.9), eb.orthogonalize(iteration=eb.NewtonSchulz(arithmetic="float32"))),
    "kron": lambda: eb.scale_by_kron(),
    "noise": lambda: eb.chain(eb.add_noise(), eb.trace(0.5)),
}


@pytest.mark.parametrize("side", ["smaller", "larger", "rows", "columns"])
@pytest.mark.parametrize("name", INNER)
def test_the_inner_transform_sees_projections_and_its_updates_are_projected_back(name: str, side: str) -> None:
    """In a fixed basis of as many vectors as the matrix has rows to project, made orthonormal, nothing but the coordinates change."""
    gradients = [drawn(5, 3, seed=step) for step in range(1, 5)]
    if side in ("larger", "rows"):
        gradients = [g.T.contiguous() for g in gradients]
    shape = gradients[0].shape
    projected_rows = side == "rows" or (side == "smaller" and shape[0] < shape[1])
    projected_rows |= side == "larger" and shape[0] >= shape[1]
    tx = UNTYPED(INNER[name](), rank=2, period=1000, scale=0.25, side=side)
    found: list[Tensor] = []
    optimizer = eb.with_policy(eb.chain(tx, eb.scale_by_learning_rate(1.0)), "FP32", seed=3)
    params: Tensor = torch.zeros(shape)
    state = optimizer.init(params)
    for gradient in gradients:
        params, state = optimizer.step(params, gradient, state)
        found.append(params)
    basis = eb.tree.get(state, "basis")["projected"]
    assert torch.allclose(basis.T @ basis, torch.eye(2), atol=1e-5)

    low = [basis.T @ (g if projected_rows else g.T) for g in gradients]
    inner = eb.with_policy(eb.chain(INNER[name](), eb.scale_by_learning_rate(1.0)), "FP32", seed=3)
    inside = torch.zeros_like(low[0])
    inner_state = inner.init(inside)
    if name in ("kron", "noise"):
        return  # their bits are of another place in the chain; that they may draw is all that is asked here
    for gradient, whole in zip(low, found, strict=True):
        inside, inner_state = inner.step(inside, gradient, inner_state)
        back = 0.25 * (basis @ inside if projected_rows else (basis @ inside).T)
        # Products of two to five numbers of size 1, and some 20 steps of an iteration that doubles errors at most.
        assert torch.allclose(whole, back, rtol=0, atol=1e-4)


def test_slots_of_the_inner_transform_are_factors_by_both_names() -> None:
    tx = eb.low_rank(eb.scale_by_factored_rms(), rank=2, view=eb.row_blocks(4, 6))
    _, state = steps(tx, {"w": drawn(10, 7), "b": drawn(3)}, [{"w": drawn(10, 7, seed=1), "b": drawn(3)}])
    variance = eb.tree.get(state, "variance")
    assert {name: tuple(x.shape) for name, x in variance["w"].items()} == {
        "block0_projected_rows": (2, 1), "block0_projected_columns": (1, 7),
        "block1_projected_rows": (2, 1), "block1_projected_columns": (1, 7),
    }  # fmt: skip
    assert variance["b"].shape == (3,)


@pytest.mark.parametrize("policy", ["LEAN_BF16", "LEAN_8BIT"])
def test_a_policy_stores_the_inner_state_as_it_stores_momentum_and_variance(policy: Any) -> None:
    params = {"w": drawn(40, 30).bfloat16()}
    gradients = [{"w": drawn(40, 30, seed=step).bfloat16()} for step in range(1, 4)]
    _, state = steps(eb.galore(0.1, rank=4), params, gradients, policy)
    own = eb.tree.leaves(eb.tree.get(state, "momentum"))
    whole = eb.with_policy(eb.adam(0.1), policy).init(params)
    expected = eb.tree.leaves(eb.tree.get(whole, "momentum"))
    assert [leaf.dtype for leaf in own] == [leaf.dtype for leaf in expected]
    assert own[0].shape == (4, 40)
    assert math.prod(expected[0].shape) == 40 * 30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED(eb.clip_by_global_norm(1.0)), r"^low_rank: got .* which reduces over parameters"),
        (lambda: UNTYPED(eb.masked(eb.trace(0.9), where=lambda path, p: p.ndim > 1)), r"^low_rank: .* with a mask"),
        (lambda: UNTYPED(eb.lookahead(eb.trace(0.9))).init([drawn(6, 6)]), r"^low_rank: .* weights for evaluation"),
        (lambda: UNTYPED(eb.trace(0.9), scale=-1.0), r"^scale: got -1\.0"),
        (lambda: UNTYPED(eb.trace(0.9), rank=0), r"^rank: got 0"),
    ],
)
def test_what_cannot_be_in_a_subspace_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^low_rank: got 3, which has no cut"):
        UNTYPED(3)


def test_adams_eps_may_be_added_before_the_bias_is_corrected() -> None:
    """With gradients of one, Adam's mean and root are one minus powers, which leaves this of the formula."""
    tx = eb.chain(eb.scale_by_adam(0.5, 0.75, eps=0.25, eps_before_correction=True), eb.scale_by_learning_rate(1.0))
    after, _ = steps(tx, torch.zeros(1), [torch.ones(1)])
    assert float(after) == pytest.approx(-(0.5 / (0.5 + 0.25)) * (0.5 / 0.5), rel=1e-6)
    with pytest.raises(ValueError, match=r"^eps_before_correction: got True with amsgrad='corrected'"):
        eb.scale_by_adam(amsgrad="corrected", eps_before_correction=True)
