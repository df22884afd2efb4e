"""Whole tensors that visit an owner get the bits of one process, wherever their rows lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import everybit as eb
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.dtensors import local, row_edges
from everybit_torch.fsdp2.visits import Visitor, Visits, shared_out
from everybit_torch.segments.segment import Segment
from everybit_torch.segments.totals import Work, find_totals
from tests.support.exact_models import mesh_of, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

SHAPES = [(7, 5), (1, 4), (13, 3), (6, 6), (9,)]
STEPS = 4
TRANSFORMS: dict[str, Callable[[], eb.Transform[Any]]] = {
    "muon": lambda: eb.chain(eb.trace(0.95), eb.orthogonalize(), eb.scale_by_learning_rate(0.02)),
    "soap": lambda: eb.soap(3e-3),
    "shampoo": lambda: eb.shampoo(1e-2),
    "lamb": lambda: eb.lamb(1e-2),
    "adafactor": lambda: eb.adafactor(1e-2),
    "clipped": lambda: eb.chain(
        eb.clip_by_global_norm(0.5), eb.trace(0.9), eb.orthogonalize(), eb.scale_by_learning_rate(0.02)
    ),
    "8 bits": lambda: eb.adamw(1e-2),
}
FIRSTS = [sum(torch.Size(s).numel() for s in SHAPES[:n]) for n in range(len(SHAPES))]


class Tensors(nn.Module):
    """Rows that ranks cannot share out evenly, and fewer rows than ranks."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for number, shape in enumerate(shapes(name)):
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{number}", nn.Parameter(values))


def shapes(name: str) -> list[tuple[int, ...]]:
    return SHAPES if name in ("lamb", "adafactor", "8 bits", "shampoo") else SHAPES[:-1]


def gradients(step: int, name: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes(name)]


def optimizer_of(name: str, policy: Any) -> eb.Optimizer[Any]:
    if name == "8 bits":
        policy = eb.Policy(params=eb.Split(16), momentum=eb.Blockwise("float", block=32))
    return eb.with_policy(TRANSFORMS[name](), policy, unsafe="allow", seed=3)


def alone(name: str, policy: Any) -> Weights:
    """Each parameter whole, in one process, with the totals of all."""
    model = Tensors(name, torch.bfloat16)
    optimizer = optimizer_of(name, policy)
    parameters = list(model.parameters())
    segments = [Segment.new(optimizer, p.detach(), first) for p, first in zip(parameters, FIRSTS, strict=False)]
    for step in range(STEPS):
        work = [
            Work(segment, grad)
            for segment, grad in zip(segments, gradients(step, name, torch.bfloat16), strict=True)
            if not skips(step, grad)
        ]
        totals = find_totals(work)
        for segment, grad, *_ in work:
            segment.step(grad, totals)
    return weights_of(model)


def skips(step: int, grad: Tensor) -> bool:
    """One parameter has no gradient in one step."""
    return step == 1 and tuple(grad.shape) == SHAPES[2]


def visiting(name: str, policy: Any, shape: tuple[int, ...], elements: int) -> Weights:
    model, mesh = Tensors(name, torch.bfloat16), mesh_of(shape)
    fully_shard(model, mesh=mesh)
    shards, copies = (
        Communicator(mesh.get_group(mesh.ndim - 1)),
        Communicator(mesh.get_group(0)) if mesh.ndim > 1 else None,
    )
    optimizer = optimizer_of(name, policy)
    visitors = [Visitor(p, optimizer, first) for p, first in zip(model.parameters(), FIRSTS, strict=False)]
    visits = Visits(visitors, shards, copies, elements=elements)
    for step in range(STEPS):
        grads: list[Tensor | None] = []
        for p, whole in zip(model.parameters(), gradients(step, name, torch.bfloat16), strict=True):
            low, high = row_edges(p.shape[0], shards.size)[shards.rank : shards.rank + 2]
            grads.append(None if skips(step, whole) else whole[low:high])
            assert local(p).shape[0] == high - low
        totals: list[Tensor] = []
        if optimizer.reduces:
            # A vector without elements takes part where this rank owns nothing.
            work = [
                Work(Segment.new(optimizer, torch.empty(0, dtype=torch.bfloat16)), torch.empty(0, dtype=torch.bfloat16))
            ]
            found = [(one.segment, one.segment.tensor, one.grad) for one in visits.look(grads)]
            for segment, tensor, grad in found:
                segment.tensor = tensor
                work.append(Work(segment, grad))
            totals = find_totals(work, GroupAxis((shards, *([copies] if copies else []))))
        visits.step(grads, lambda segment, grad, totals=totals: segment.step(grad, totals))  # type: ignore[misc]
    return weights_of(model)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("shape", "elements"), [((1,), 1), ((2,), 40), ((3,), 1 << 20), ((4,), 1), ((2, 2), 40)])
def test_visitors_have_the_bits_of_one_process(name: str, shape: tuple[int, ...], elements: int) -> None:
    expected = alone(name, "LEAN_BF16")
    for weights in run(torch.Size(shape).numel(), visiting, name, "LEAN_BF16", shape, elements):
        assert equal(weights, expected)


@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=40), owners=st.integers(1, 8))
def test_no_owner_has_much_more_than_its_share(costs: list[int], owners: int) -> None:
    """The owner with the most had the least before its last piece: at most the mean of the others (Graham 1966)."""
    found = shared_out([float(cost) for cost in costs], owners)
    loads = [sum(cost for cost, owner in zip(costs, found, strict=True) if owner == number) for number in range(owners)]
    assert owners * max(loads) <= sum(costs) + (owners - 1) * max(costs)
