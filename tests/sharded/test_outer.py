"""DiLoCo: ranks that train by themselves and meet, against one process that plays all of them, and the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch import AdamW, FlatStepper, OuterOptimizer
from tests.support import exact_models
from tests.support.ranks import RankFailedError, run
from tests.support.weights import Weights, equal

EVERY, STEPS = 3, 8


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def inputs(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64).to(dtype)


def loss(out: Tensor) -> Tensor:
    return (out.to(torch.promote_types(out.dtype, torch.float32)) - 1).square().mean()


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_a_rank(kind: str, dtype: torch.dtype, policy: Any, resumed: bool = False) -> tuple[Weights, int]:
    """The weights after some inner steps, two meetings among them; with ``resumed`` from a saved outer state after half of them."""
    model = network(dtype)
    inner: Any = (
        torch.optim.AdamW(model.parameters(), lr=0.02)
        if kind == "torch"
        else AdamW(model.parameters(), lr=0.02, policy=policy)
    )
    outer = OuterOptimizer(inner, every=EVERY)
    met = []
    for step in range(STEPS):
        if resumed and step == 4:
            saved = outer.state_dict()
            outer = OuterOptimizer(inner, every=EVERY)
            outer.load_state_dict(saved)
        inner.zero_grad()
        loss(model(inputs(dist.get_rank() if dist.is_initialized() else 0, step, dtype))).backward()  # type: ignore[no-untyped-call]
        inner.step()
        met.append(outer.step())
    assert met == [(step + 1) % EVERY == 0 for step in range(STEPS)]
    assert outer.rounds == 2
    return weights_of(model), outer.bytes_reduced


def played(ranks: int, dtype: torch.dtype, policy: Any) -> list[Weights]:
    """The same by pure functions, in one process."""
    model = network(dtype)
    opt = eb.with_policy(eb.adamw(0.02), policy)
    outer = eb.with_policy(eb.sgd(0.7, momentum=0.9, nesterov=True), "FP32")
    params = [weights_of(model) for _ in range(ranks)]
    states = [opt.init(one) for one in params]
    start = opt.export_fp32(params[0], states[0])
    outer_state = outer.init(start)

    def gradient(one: Weights, rank: int, step: int) -> Weights:
        def at(one: Weights) -> Tensor:
            return loss(torch.func.functional_call(model, one, (inputs(rank, step, dtype),)))

        return torch.func.grad(at)(one)  # type: ignore[no-any-return]

    for step in range(STEPS):
        for rank in range(ranks):
            params[rank], states[rank] = opt.step(params[rank], gradient(params[rank], rank, step), states[rank])
        if (step + 1) % EVERY == 0:
            ends = [opt.export_fp32(one, state) for one, state in zip(params, states, strict=True)]
            start, outer_state = outer.step(start, eb.outer_gradient(start, *ends), outer_state)
            for rank in range(ranks):
                params[rank], states[rank] = opt.import_fp32(start, params[rank], states[rank])
    return params


@pytest.mark.parametrize(("dtype", "policy"), [(torch.float32, "FP32"), (torch.bfloat16, "LEAN_BF16")])
def test_two_ranks_have_the_bits_of_one_process_that_plays_both(dtype: torch.dtype, policy: str) -> None:
    found = run(2, on_a_rank, "ours", dtype, policy)
    expected = played(2, dtype, policy)
    for (weights, reduced), own in zip(found, expected, strict=True):
        assert equal(weights, own)
        assert reduced == 4 * sum(p.numel() for p in own.values())
    # Each trained on its own data since they met.
    assert not equal(found[0][0], found[1][0])


def test_a_run_that_is_resumed_goes_on_with_the_same_bits() -> None:
    for (whole, _), (resumed, _) in zip(
        run(2, on_a_rank, "ours", torch.float32, "FP32"),
        run(2, on_a_rank, "ours", torch.float32, "FP32", True),
        strict=True,
    ):
        assert equal(whole, resumed)


def test_optimizers_of_torch_are_taken() -> None:
    """Ours follows torch's AdamW to a few units in the last place of float32 in eight steps."""
    for (theirs, _), own in zip(
        run(2, on_a_rank, "torch", torch.float32, None), played(2, torch.float32, "FP32"), strict=True
    ):
        for name, value in theirs.items():
            torch.testing.assert_close(value, own[name], rtol=8 * 16 * 2.0**-24, atol=8 * 16 * 2.0**-24)


def sharded(shards: int) -> Weights:
    """Two replicas, each a stepper over ranks of its own, which have the same data: their means are exact."""
    mesh = exact_models.mesh_of((2, shards))
    replicas, inner = (mesh[name] for name in mesh.mesh_dim_names or ())
    replica = replicas.get_local_rank()
    model = network(torch.float32)
    stepper = FlatStepper(
        model, eb.adamw(0.02), policy="FP32", mesh=inner, strategy="optim_grads_params", units=[nn.Linear]
    )
    outer = OuterOptimizer(stepper, every=EVERY, group=replicas.get_group())
    for step in range(STEPS):
        with stepper.microbatch(last=True):
            loss(model(inputs(replica, step, torch.float32))).backward()  # type: ignore[no-untyped-call]
        stepper.step()
        outer.step()
    found = exact_models.weights_of(model)
    stepper.close()
    return found


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_replicas_may_be_sharded(shards: int) -> None:
    """With the bits of replicas that are not."""
    expected = played(2, torch.float32, "FP32")
    for rank, found in enumerate(run(2 * shards, sharded, shards)):
        assert equal(found, expected[rank // shards])


def test_a_stepper_of_sixteen_bits_is_refused() -> None:
    stepper = FlatStepper(network(torch.bfloat16), eb.sgd(0.1), policy="LEAN_BF16", strategy="no_shard")
    with pytest.raises(TypeError, match=r"^optimizer: got a FlatStepper whose parameter 0\.weight is torch\.bfloat16"):
        OuterOptimizer(stepper, every=2)
    with pytest.raises(TypeError, match=r"^optimizer: got parameters that are shards"):
        OuterOptimizer(stepper.as_optimizer(), every=2)


def different_weights() -> None:
    model = network(torch.float32)
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] += dist.get_rank()
    OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), every=2).step()


def test_ranks_that_begin_with_different_weights_are_refused() -> None:
    with pytest.raises(RankFailedError, match=r"OuterOptimizer: the ranks began with different weights"):
        run(2, different_weights)


def test_one_rank_is_lookahead() -> None:
    """The outer optimizer plain gradient descent, and nobody to meet: slow weights and fast ones."""
    model, other = network(torch.float64), network(torch.float64)
    inner = AdamW(model.parameters(), lr=0.02, policy="FP64")
    outer = OuterOptimizer(inner, eb.sgd(0.5), every=3, policy="FP64")
    opt = eb.with_policy(eb.lookahead(eb.adamw(0.02), period=3, share=0.5), "FP64")
    params = weights_of(other)
    state = opt.init(params)
    for step in range(9):
        inner.zero_grad()
        loss(model(inputs(0, step, torch.float64))).backward()  # type: ignore[no-untyped-call]
        inner.step()
        outer.step()

        def at(one: Weights, step: int = step) -> Tensor:
            return loss(torch.func.functional_call(other, one, (inputs(0, step, torch.float64),)))

        grads = torch.func.grad(at)(params)
        with torch.no_grad():
            params, state = opt.step(params, grads, state)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), params[name], rtol=1e-13, atol=1e-13)


def test_the_formula_of_the_paper() -> None:
    """Algorithm 1 with torch.optim.SGD as the outer optimizer, in float64."""
    start = {"w": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    theirs = nn.Parameter(start["w"].clone())
    oracle = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    outer = eb.with_policy(eb.sgd(0.7, momentum=0.9, nesterov=True), "FP64")
    mine, state = start, outer.init(start)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        moves = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        moved = [{"w": mine["w"] + move} for move in moves]
        theirs.grad = theirs.detach() - (theirs.detach() + moves).mean(0)
        oracle.step()
        mine, state = outer.step(mine, eb.outer_gradient(mine, *moved), state)
        torch.testing.assert_close(mine["w"], theirs.detach(), rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"^every: got 0; accepted is a whole number of steps"):
        OuterOptimizer(inner, every=0)
    with pytest.raises(ValueError, match=r"^replicas: got none"):
        eb.outer_gradient(torch.ones(1))
    with pytest.raises(ValueError, match=r"^replicas\[1\]: shape \(2,\), but start has \(1,\)"):
        eb.outer_gradient(torch.ones(1), torch.ones(1), torch.ones(2))
