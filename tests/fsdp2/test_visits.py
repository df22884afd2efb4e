"""Whole tensors that visit an owner get the bits of one process, wherever their rows lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import everybit as eb
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.optim.visits import Visitor, Visits, entries_of, shared_out
from everybit_torch.placements import row_edges
from everybit_torch.segments.segment import Segment
from everybit_torch.segments.totals import Work, find_totals
from everybit_torch.torch_internals.dtensors import local
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
        totals = find_totals(work)[0]
        for segment, grad, *_ in work:
            segment.step(grad, totals)
    return weights_of(model)


def skips(step: int, grad: Tensor) -> bool:
    """One parameter has no gradient in one step."""
    return step == 1 and tuple(grad.shape) == SHAPES[2]


State = list[dict[str, Tensor]]


def visiting(
    name: str,
    policy: Any,
    shape: tuple[int, ...],
    elements: int,
    steps: range = range(STEPS),
    begun: tuple[Weights, State] | None = None,
) -> tuple[Weights, State]:
    """The whole weights after some steps, and this rank's rows of the state; ``begun``: whole ones with which it goes on."""
    model, mesh = Tensors(name, torch.bfloat16), mesh_of(shape)
    if begun is not None:
        model.load_state_dict(begun[0])
    fully_shard(model, mesh=mesh)
    shards = Communicator(mesh.get_group(mesh.ndim - 1))
    copies = Communicator(mesh.get_group(0)) if mesh.ndim > 1 else None
    optimizer = optimizer_of(name, policy)
    visitors = [Visitor(p, optimizer, first) for p, first in zip(model.parameters(), FIRSTS, strict=False)]
    visits = Visits(visitors, shards, copies, elements=elements)
    if begun is not None:
        rows = [{key: own_rows(x, shards) for key, x in state.items()} for state in begun[1]]
        with pytest.raises(ValueError, match=r"^state of parameter 1, .*: got nothing; accepted is"):
            visits.take([rows[0], {}, *rows[2:]], entries_of, write, weights=False)
        visits.take(rows, entries_of, write, weights=False)
    for step in steps:
        grads: list[Tensor | None] = []
        for p, whole in zip(model.parameters(), gradients(step, name, torch.bfloat16), strict=True):
            grads.append(None if skips(step, whole) else own_rows(whole, shards))
            assert local(p).shape == own_rows(whole, shards).shape
        totals: list[Tensor] = []
        if optimizer.reduces:
            # A vector without elements takes part where this rank owns nothing.
            none = torch.empty(0, dtype=torch.bfloat16)
            axis = GroupAxis((shards, *([copies] if copies else [])))
            work = [Work(Segment.new(optimizer, none), none, axis=axis)]
            found = [(one.segment, one.segment.tensor, one.grad) for one in visits.look(grads)]
            for segment, tensor, grad in found:
                segment.tensor = tensor
                work.append(Work(segment, grad, axis=axis))
            totals = find_totals(work)[0]
        visits.step(grads, lambda segment, grad, totals=totals: segment.step(grad, totals, due=segment.due()))  # type: ignore[misc]
    return weights_of(model), visits.hand_out(entries_of, weights=False)


def write(segment: Segment, values: Mapping[str, Tensor]) -> None:
    for name, held in entries_of(segment).items():
        held.copy_(values[name])


def own_rows(whole: Tensor, shards: Communicator) -> Tensor:
    if not whole.ndim:
        return whole
    low, high = row_edges(whole.shape[0], shards.size)[shards.rank : shards.rank + 2]
    return whole[low:high]


def together(states: list[State]) -> State:
    """The whole of what ranks have rows of."""
    return [
        {key: torch.cat([one[key] for one in of]) if of[0][key].ndim else of[0][key] for key in of[0]}
        for of in zip(*states, strict=True)
    ]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("shape", "elements"), [((1,), 1), ((2,), 40), ((3,), 1 << 20), ((4,), 1), ((2, 2), 40)])
@pytest.mark.sampled(5)
def test_visitors_have_the_bits_of_one_process(name: str, shape: tuple[int, ...], elements: int) -> None:
    expected = alone(name, "LEAN_BF16")
    for weights, _ in run(torch.Size(shape).numel(), visiting, name, "LEAN_BF16", shape, elements):
        assert equal(weights, expected)


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "clipped"])
@pytest.mark.parametrize(("before", "after"), [((1,), (3,)), ((3,), (2, 2)), ((2, 2), (1,))])
@pytest.mark.sampled(4)
def test_state_by_rows_goes_on_with_other_ranks(name: str, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """What is handed out is also what one process keeps: nothing of it depends on ranks."""
    found = run(torch.Size(before).numel(), visiting, name, "LEAN_BF16", before, 40, range(2))
    begun = found[0][0], together([state for _, state in found][: before[-1]])
    for weights, _ in run(torch.Size(after).numel(), visiting, name, "LEAN_BF16", after, 40, range(2, STEPS), begun):
        assert equal(weights, alone(name, "LEAN_BF16"))


@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=40), owners=st.integers(1, 8))
def test_no_owner_has_much_more_than_its_share(costs: list[int], owners: int) -> None:
    """The owner with the most had the least before its last piece: at most the mean of the others (Graham 1966)."""
    found = shared_out([float(cost) for cost in costs], owners)
    loads = [sum(cost for cost, owner in zip(costs, found, strict=True) if owner == number) for number in range(owners)]
    assert owners * max(loads) <= sum(costs) + (owners - 1) * max(costs)
