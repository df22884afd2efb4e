"""Rows times factors have the bits of the same edit of whole weights: alone, in a torch optimizer, and on shards of every kind."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import everybit as eb
from everybit.policies import PolicyName
from everybit_torch import AdamW, FlatStepper, create, evaluation_weights
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import Cells, mesh_of, seeds, train, weights_of
from tests.support.ranks import run
from tests.support.small_models import Awkward, same_bits, values
from tests.support.small_models import train as trained
from tests.support.weights import Weights, equal

EXACT: tuple[PolicyName, ...] = ("FP32", "EXACT_BF16", "LEAN_BF16")
"""Weights have all bits of float32."""


def factors(rows: int, seed: int) -> torch.Tensor:
    return 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(seed))


# -- alone ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_weights_in_full_precision_are_scaled_and_rounded_once(policy: PolicyName) -> None:
    dtype = {"FP32": torch.float32, "FP64": torch.float64}.get(policy, torch.bfloat16)
    params = {
        "q": torch.randn(6, 5).to(dtype),
        "other": torch.randn(4, 3).to(dtype),
        "vector": torch.randn(7).to(dtype),
    }
    optimizer = eb.with_policy(eb.adamw(1e-2), policy, unsafe="allow")
    state = optimizer.init(params)
    for seed in range(3):
        grads = {
            name: torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            for name, x in params.items()
        }
        params, state = optimizer.step(params, grads, state)
    given = {"q": factors(6, 0), "vector": factors(7, 1)}
    before = optimizer.export_fp32(params, state)
    new, after = eb.scale_rows(optimizer, params, state, given)
    expected = before | {
        "q": before["q"] * given["q"].to(before["q"].dtype)[:, None],
        "vector": before["vector"] * given["vector"].to(before["q"].dtype),
    }
    stored, kept = optimizer.import_fp32(expected, params, state)
    found = optimizer.export_fp32(new, after)
    for name in given:
        assert torch.equal(new[name], stored[name])
        assert same_bits(eb.tree.leaves(after.extra[name]), eb.tree.leaves(kept.extra[name]))
        if policy in EXACT:
            assert torch.equal(found[name], expected[name])
    assert torch.equal(new["other"], params["other"])
    assert same_bits(eb.tree.leaves(after.extra["other"]), eb.tree.leaves(state.extra["other"]))
    assert same_bits(eb.tree.leaves(after.inner), eb.tree.leaves(state.inner))


def test_factors_that_do_not_belong_to_rows_are_refused() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = create("adamw", model, lr=1e-2, policy="LEAN_BF16")
    trained(model, optimizer, 1)
    before = values(model)
    name, weight = next((name, p) for name, p in model.named_parameters() if p.ndim == 2)
    for given, message in (
        ({"absent": torch.ones(2)}, r"^factors: got 'absent'; accepted are names of trained parameters"),
        (
            {name: torch.ones(len(weight) + 1)},
            rf"^factors: {name}: got shape \({len(weight) + 1},\); accepted is \({len(weight)},\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.scale_rows({name: torch.zeros(len(weight))} | given)
    averaged = AdamW(nn.Linear(2, 2).parameters(), average=0.9)
    with (
        evaluation_weights(averaged),
        pytest.raises(RuntimeError, match=r"^scale_rows: the model has its weights for evaluation"),
    ):
        averaged.scale_rows({})
    assert same_bits(before, values(model))


# -- in a torch optimizer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["FP32", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16", "LEAN_8BIT"])
def test_an_optimizer_goes_on_as_from_full_precision(policy: PolicyName) -> None:
    """Long parameters, buckets, and a mask of changes."""
    model = Awkward(torch.float32 if policy == "FP32" else torch.bfloat16)
    other = copy.deepcopy(model)
    optimizers = [create("adamw", one, lr=1e-2, policy=policy, watch="bfloat16") for one in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        trained(one, optimizer, 2)
        optimizer.take_changed().discard()
    given = {
        name: factors(len(p), number) for number, (name, p) in enumerate(model.named_parameters()) if p.ndim and len(p)
    }
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers[0].scale_rows(given)
    weights, names = optimizers[1].export_fp32(), [name for name, _ in other.named_parameters()]

    def scaled_by(name: str, x: torch.Tensor) -> torch.Tensor:
        return x * given[name].to(x.dtype).reshape(-1, *(1,) * (x.ndim - 1)) if name in given else x

    scaled = [[scaled_by(name, x) for name, x in zip(names, group, strict=True)] for group in weights]
    optimizers[1].import_fp32(scaled)
    assert same_bits(values(model), values(other))
    if policy in EXACT:
        assert all(map(same_bits, optimizers[0].export_fp32(), scaled))
    for name, indices, _ in optimizers[0].take_changed():
        now = dict(model.named_parameters())[name].detach()
        changed = (now.bfloat16().view(torch.int16) != old[name].bfloat16().view(torch.int16)).reshape(-1).nonzero()
        assert torch.equal(indices.long(), changed.reshape(-1))
    for one, optimizer in zip((model, other), optimizers, strict=True):
        trained(one, optimizer, 2, start=2)
    assert same_bits(values(model), values(other))


# -- on shards ----------------------------------------------------------------------------------------------------------------------

GIVEN = {
    "first.tall": factors(5, 0),
    "second.line": factors(7, 1),
    "second.inner.some": factors(3, 2),
    "own": factors(6, 3),
}


def changes_of_visitors() -> None:
    """Rows that a rank scales of a matrix which its owner steps: of these the changed weights are named, and of no others."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)).bfloat16()
    fully_shard(model, mesh=mesh_of((2,)))
    optimizer = create("muon", model, lr=1e-2, policy="LEAN_BF16", watch="bfloat16", others=None, compile=False)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.take_changed().discard()
    optimizer.scale_rows({"1.weight": torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5])})
    taken = optimizer.take_changed()
    assert taken.whole == ()
    own = {0: [8 * 1 + column for column in range(8)], 1: [8 * 4 + column for column in range(8)]}[dist.get_rank()]
    assert {name: where.tolist() for name, where, _ in taken} == {"0.weight": [], "1.weight": own}


def test_changes_of_parameters_at_owners_are_of_the_scaled_rows() -> None:
    run(2, changes_of_visitors)


def make(name: str) -> Any:
    return {"adamw": eb.adamw(1e-2), "muon": eb.muon(1e-2), "lamb": eb.lamb(1e-2)}[name]


def on_ranks(strategy: Strategy, name: str, policy: PolicyName, shape: tuple[int, ...]) -> list[Weights]:
    model = Cells(torch.float32 if policy == "FP32" else torch.bfloat16)
    options: dict[str, Any] = {"outer": "optim"} if len(shape) == 2 and strategy == "optim_grads_params" else {}
    stepper = FlatStepper(
        model, make(name), policy=policy, strategy=strategy, mesh=mesh_of(shape), units=[type(model.first)], **options
    )
    found = []
    for step in range(4):
        train(stepper, model, range(step, step + 1), 2)
        if step in (1, 2):
            stepper.scale_rows(GIVEN)
        found.append(weights_of(model))
    return found


def alone(name: str, policy: PolicyName, ranks: int) -> list[Weights]:
    """All ranks' microbatches in one process, whose sums are exact."""
    model = Cells(torch.float32 if policy == "FP32" else torch.bfloat16)
    stepper = FlatStepper(
        model, make(name), policy=policy, strategy="no_shard", units=[type(model.first)], divisor=float(ranks)
    )
    found = []
    for step in range(4):
        several = [each for rank in range(ranks) for each in seeds(step, rank, 2)]
        for number, (seed, uses_some) in enumerate(several):
            with stepper.microbatch(last=number == len(several) - 1):
                model(seed, uses_some).backward()
        stepper.step()
        if step in (1, 2):
            before = weights_of(model)
            stepper.scale_rows(GIVEN)
            for key, x in weights_of(model).items():
                factor = GIVEN[key].reshape(-1, *(1,) * (x.ndim - 1)) if key in GIVEN else torch.ones(())
                # The weight of all bits is within an ulp of bfloat16, 2^-7, of the stored weight.
                assert torch.allclose(x.float(), before[key].float() * factor, rtol=2.0**-6, atol=0)
        found.append(weights_of(model))
    return found


@pytest.mark.parametrize(
    ("strategy", "name", "policy", "shape"),
    [
        ("no_shard", "adamw", "LEAN_BF16", (2,)),
        ("optim", "adamw", "EXACT_BF16", (3,)),
        ("optim_grads", "muon", "LEAN_BF16", (2,)),
        ("optim_grads", "lamb", "KAHAN_BF16", (2, 2)),
        ("optim_grads_params", "adamw", "LEAN_BF16", (3,)),
        ("optim_grads_params", "muon", "LEAN_BF16", (2,)),
        ("optim_grads_params", "adamw", "FP32", (2, 2)),
    ],
)
@pytest.mark.sampled(3)
def test_shards_have_the_bits_of_the_whole(
    strategy: Strategy, name: str, policy: PolicyName, shape: tuple[int, ...]
) -> None:
    expected = run(1, alone, name, policy, math.prod(shape))[0]
    for found in run(math.prod(shape), on_ranks, strategy, name, policy, shape):
        assert all(map(equal, found, expected))
