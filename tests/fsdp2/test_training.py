"""A model that FSDP2 shards trains as one process does, bit for bit, wherever sums of gradients are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import everybit as eb
from everybit_torch import FlatStepper
from everybit_torch.sharded.strategies import OuterStrategy
from tests.support.exact_models import Cell, Cells, Pattern, context_of, mesh_of, train, train_alone, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights

LAYOUTS = [
    *(((n,), "no_shard") for n in (1, 2, 4)),
    *((shape, outer) for shape in [(2, 2), (2, 1)] for outer in ("no_shard", "optim")),
]

WHOLE: dict[str, eb.Transform[Any]] = {
    "muon": eb.chain(eb.clip_by_global_norm(4.0), eb.muon(0.03)),
    "soap": eb.soap(0.03),
}


def by_owners(name: str, shape: tuple[int, ...] | None, ranks: int) -> tuple[Weights, list[float], int]:
    """Weights, norms, and how many elements of state whole tensors have here."""
    model, transform = Cells(torch.bfloat16), WHOLE[name]
    if shape is None:
        alone = FlatStepper(model, transform, policy="LEAN_BF16", strategy="no_shard", divisor=1.0)
        norms = train_alone(alone, model, range(3), 1, ranks)
        kept = [one.of.segment for one in alone.engine.as_optimizer().own.stepped if one.of.segment.is_whole]
    else:
        stepper = FlatStepper(
            model, transform, policy="LEAN_BF16", mesh=mesh_of(shape), strategy="optim_grads_params", outer="optim",
            units=[Cell], divisor=1.0,
        )  # fmt: skip
        norms = train(stepper, model, range(3), 1)
        visitors = [member.visitor for member in stepper.engine.as_optimizer().own.visited()]
        kept = [visitor.segment for visitor in visitors if visitor.segment is not None]
    leaves = [x for one in kept for x in eb.tree.leaves((one.state.extra, one.state.inner)) if x.ndim]
    return weights_of(model), norms, sum(x.numel() for x in leaves)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (3, 1)])
@pytest.mark.sampled(3)
def test_whole_tensors_are_stepped_by_owners_among_all_ranks(name: str, shape: tuple[int, ...]) -> None:
    """Rows are not cut once more for them; state lies with one rank each."""
    ranks = torch.Size(shape).numel()
    weights, norms, kept = by_owners(name, None, ranks)
    every = run(ranks, by_owners, name, shape, ranks)
    for found, theirs, _ in every:
        assert theirs == norms
        assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert sum(here for *_, here in every) == kept
    assert max(here for *_, here in every) < kept


class Scale(nn.Module):
    """One number, whose gradient is what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return (self.scale * x).sum()


def summed(pattern: Pattern, outer: OuterStrategy, shape: tuple[int, ...], computes: torch.dtype | None) -> float:
    model, mesh, grads = Scale(torch.float32 if computes else torch.bfloat16), mesh_of(shape), eb.Grads(main="float32")
    if computes:
        names = mesh.mesh_dim_names
        assert names is not None
        fully_shard(model, mesh=mesh[names[-1]], mp_policy=MixedPrecisionPolicy(computes))
    stepper = FlatStepper(
        model, eb.sgd(0.1), policy=eb.Policy(grads=grads) if computes else eb.Policy(params=eb.Split(16), grads=grads),
        mesh=mesh, strategy="optim_grads_params", outer=outer, divisor=1.0,
    )  # fmt: skip
    for number, gradient in enumerate([256.0, 1.0, 1.0]):
        with context_of(stepper, pattern, last=number == 2):
            model(gradient).backward()
    return float(stepper.step().grad_norm)


@pytest.mark.parametrize("computes", [None, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("pattern", ["microbatch", "no_sync", "neither"])
@pytest.mark.parametrize(("shape", "outer"), LAYOUTS)
def test_main_gradients_are_summed_in_their_own_dtype(
    pattern: Pattern, shape: tuple[int, ...], outer: OuterStrategy, computes: torch.dtype | None
) -> None:
    """In bfloat16 256 + 1 is 256."""
    ranks = torch.Size(shape).numel()
    assert run(ranks, summed, pattern, outer, shape, computes) == [258.0 * ranks] * ranks
