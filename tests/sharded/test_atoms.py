"""Heads and experts as atoms: shares are cut between them, and the bits are those of one process, also where some have no gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit.linalg import eigenvectors
from everybit_torch import TorchOptimizer
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.model_layout import describe
from everybit_torch.sharded.packing import Piece
from everybit_torch.sharded.plan import plan
from everybit_torch.sharded.row_blocks import RowBlocks
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import whole_of
from tests.support.programs import FLAT, on_buffers
from tests.support.ranks import run
from tests.support.weights import Weights, equal

STEPS = 3
EXPERTS = 5
QKV = eb.row_blocks(4, 2, 2)
"""As many rows of queries as of keys and values together, so that the rows alone do not tell which blocks a part has."""


class Weight(nn.Module):
    """Its gradient is what it is called with: multiples of a quarter, exact in every order of addition."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).square().sub(0.3))

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.weight.reshape(-1)
        return (flat * x[: flat.numel()]).sum()


class Block(nn.Module):
    """Heads, a batch of experts, queries with keys and values, and experts that are modules of their own, of which some ranks use some."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = Weight(6, 5)
        self.batch = Weight(EXPERTS, 6, 4)
        self.qkv = Weight(8, 7)
        self.experts = nn.ModuleList(Weight(4, 3) for _ in range(3))
        self.bias = Weight(3)

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        total: Tensor = self.heads(x) + self.batch(x) + self.qkv(x) + self.bias(x)
        for number in used:
            total = total + self.experts[number](x)
        return total


class Mixture(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = Weight(7, 2)

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        total: Tensor = self.out(x)
        for block in self.blocks:
            total = total + block(x, used)
        return total


def muon(policy: str) -> eb.Transform[Any]:
    return muon_at(1e-2, policy)


def muon_at(learning_rate: eb.Hyperparameter, policy: str) -> eb.Transform[Any]:
    arithmetic: Any = "bfloat16" if policy == "LEAN_BF16" else "float32"
    views = {r"heads": eb.heads(3), r"batch": eb.batched(), r"qkv": QKV}
    return eb.muon(learning_rate, views=views, others=eb.adamw, arithmetic=arithmetic)


def stored(policy: str, comm: str = "float32") -> eb.Policy:
    exact: Any = {"comm": comm, "reduce": "fp32"} if comm == "bfloat16" else {"comm": comm}
    return dataclasses.replace(eb.policies.PRESETS[policy], grads=eb.Grads(main="float32", **exact))


def new_model(policy: str) -> Mixture:
    return Mixture() if policy == "FP32" else Mixture().bfloat16()


def inputs(step: int, rank: int, model: Mixture) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(-8, 9, (120,), generator=generator).float() / 4).to(model.out.weight.dtype)


def used(step: int, rank: int) -> tuple[int, ...]:
    """The first expert always, the second on every other rank, the last on no rank in every other step."""
    return (0, *((1,) if rank % 2 else ()), *((2,) if step % 2 and not rank else ()))


def one_process(policy: str, size: int, steps: int = STEPS) -> Weights:
    model = new_model(policy)
    optimizer = TorchOptimizer(
        model.named_parameters(), lambda lr: muon_at(lr, policy), lr=1e-2, policy=stored(policy), seed=5
    )
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            model(inputs(step, rank, model), used(step, rank)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(size)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def new_stepper(model: nn.Module, policy: str, comm: str = "float32", **given: Any) -> FlatStepper:
    return FlatStepper(
        model, muon(policy), policy=stored(policy, comm), units=[Block], divisor=dist.get_world_size(), seed=5, **given
    )


def train(model: Mixture, stepper: FlatStepper, steps: range, *, alike: bool = False) -> Weights:
    for step in steps:
        rank = 0 if alike else dist.get_rank()
        with stepper.microbatch(last=True):
            model(inputs(step, rank, model), used(step, rank)).backward()
        stepper.step()
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}


def every_strategy(policy: str, comm: str) -> tuple[dict[str, Weights], dict[str, list[tuple[int, ...]]]]:
    found: dict[str, Weights] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for strategy in FLAT:
        model = new_model(policy)
        stepper = new_stepper(model, policy, comm, strategy=strategy)
        shapes[strategy] = [tuple(unit.tensor.shape) for unit in on_buffers(stepper).as_optimizer().engine.units]
        found[strategy] = train(model, stepper, range(STEPS))
        stepper.close()
    return found, shapes


@pytest.mark.parametrize(
    ("size", "policy", "comm"),
    [
        (3, "LEAN_BF16", "bfloat16"),
        pytest.param(1, "FP32", "float32", marks=pytest.mark.exhaustive),
        pytest.param(2, "KAHAN_BF16", "float32", marks=pytest.mark.exhaustive),
        pytest.param(4, "FP32", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_shares_that_are_cut_between_atoms_give_the_bits_of_the_whole_model(size: int, policy: str, comm: str) -> None:
    expected, found = one_process(policy, size), run(size, every_strategy, policy, comm)
    for weights, _ in found:
        for strategy, one in weights.items():
            assert equal(one, expected), strategy
    batches = [shape for _, shapes in found for shape in shapes["optim_grads"] if shape[1:] == (1, 6, 4)]
    assert sum(shape[0] for shape in batches) == 2 * EXPERTS  # each expert of both blocks once
    assert (max(shape[0] for shape in batches) < EXPERTS) is (size > 1)
    # Queries with keys and values are cut between these, and have a dimension of 1 for each block before a part.
    parts = [shape for _, shapes in found for shape in shapes["optim_grads"] if shape[-1] == 7]
    assert sum(shape[-2] for shape in parts) == 2 * 8
    assert any(len(shape) > 2 for shape in parts) is (size > 1)


def saved(place: str, strategy: Strategy) -> Weights:
    model = new_model("LEAN_BF16")
    stepper = new_stepper(model, "LEAN_BF16", strategy=strategy)
    train(model, stepper, range(2))
    save_sharded(stepper, place)
    return train(model, stepper, range(2, 4), alike=True)


def loaded(place: str, strategy: Strategy) -> Weights:
    model = new_model("LEAN_BF16")
    stepper = new_stepper(model, "LEAN_BF16", strategy=strategy)
    load_sharded(stepper, place)
    return train(model, stepper, range(2, 4), alike=True)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    after, *_ = run(3, saved, str(tmp_path), "optim_grads")
    for size, strategy in ((1, "optim"), (2, "optim_grads")):
        for found in run(size, loaded, str(tmp_path), strategy):
            assert equal(found, after), (size, strategy)


def test_what_cannot_be_seen_so_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"blocks\.0\.heads\.weight: heads\(4\): got \(6, 5\); accepted are parameters whose rows 4"
    ):
        describe(Mixture(), eb.muon(views={"heads": eb.heads(4), "batch": eb.batched()}, others=eb.adamw), None)


@pytest.mark.parametrize(
    ("transform", "atoms"),
    [
        (eb.orthogonalize(eb.batched()), 8),
        (eb.chain(eb.trace(0.9), eb.orthogonalize(eb.batched()), eb.scale_by_learning_rate(0.1)), 8),
        (eb.chain(eb.clip_by_unit_norm(0.1), eb.orthogonalize(eb.batched())), 1),  # which must see all of the parameter
        (eb.chain(eb.orthogonalize(eb.batched()), eb.lamb(0.1)), 1),  # which reduces over it
        (eb.adamw(0.1), 1),
        (eb.muon(view=eb.batched(), before="rows", after="columns_then_rows", others=None), 8),
        (eb.orthogonalize(eb.batched(), batching="together"), 1),  # a matrix' bits depend on the others
        (eb.normuon(view=eb.batched(), others=None), 1),  # whose state has other shapes
    ],
)
def test_a_parameter_is_cut_if_every_transform_allows_it(transform: eb.Transform[Any], atoms: int) -> None:
    model = nn.Module()
    model.experts = Weight(8, 4, 3)
    described = describe(model, transform, None)
    assert described.specs[0].atoms == atoms


@pytest.mark.parametrize(
    ("view", "shape", "atoms"),
    [
        (eb.heads(3), (6, 5), 3), (eb.row_blocks(2, 2, 2), (6, 5), 3), (eb.row_blocks(4, 1, 1), (6, 5), 1), (eb.batched(), (4, 2, 3, 5), 4),
        (eb.flattened(), (6, 5, 2, 2), 1), (eb.matrix(), (6, 5), 1), (None, (6, 5), 1),
    ],
)  # fmt: skip
def test_a_batch_of_atoms_is_made_orthogonal_as_the_whole(
    view: eb.MatrixView | None, shape: tuple[int, ...], atoms: int
) -> None:
    transform = eb.orthogonalize(view)
    assert transform.atoms(shape) == atoms
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole, _ = transform.update(x, transform.init(x), x)
    if atoms > 1:
        batch = x.reshape(atoms, shape[0] // atoms, *shape[1:])
        some, _ = transform.of_atoms().update(batch[1:], transform.init(x), batch[1:])
        assert torch.equal(some.reshape(-1), whole.reshape(-1)[x.numel() // atoms :])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
def test_neighbouring_row_blocks_are_made_orthogonal_as_in_the_whole(low: int, high: int) -> None:
    sizes, transform = (4, 2, 2), eb.orthogonalize(eb.row_blocks(4, 2, 2))
    assert transform.row_blocks((8, 5)) == sizes
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    whole, state = transform.update(x, transform.init(x), x)
    first, last = sum(sizes[:low]), sum(sizes[:high])
    part = x[first:last].reshape((1,) * low + (last - first, 5))
    some, _ = transform.of_row_blocks().update(part, state, part)
    assert torch.equal(some.reshape(-1, 5), whole[first:last])


def test_what_are_no_neighbouring_row_blocks_is_refused() -> None:
    for shape in ((5, 5), (1, 3, 5), (1, 1, 1, 2, 5), (2, 2, 5)):
        with pytest.raises(ValueError, match=r"^row_blocks\(4, 2, 2\): got a part of shape .* neighbouring blocks"):
            eb.row_blocks(4, 2, 2).of_row_blocks().shapes(shape)


def test_row_blocks_are_joined_where_a_share_cannot_end() -> None:
    blocks = RowBlocks((12, 4, 4), (5.0, 2.0, 1.0))
    assert blocks.pieces(4) == [Piece(12, 5.0), Piece(4, 2.0), Piece(4, 1.0)]
    assert blocks.pieces(8) == [Piece(16, 7.0), Piece(4, 1.0)]
    assert blocks.pieces(32) == [Piece(20, 8.0)]


def test_the_plan_knows_that_queries_with_keys_and_values_are_three_pieces_of_work() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 10, bias=False)
    tx = eb.muon(1e-3, view=eb.row_blocks(4, 4, 2), others=None)
    found = plan(model, tx, strategy="optim", ranks=3).whole_tensors
    assert found is not None
    assert (found.tensors, found.parts, found.idle) == (1, 3, 0)
    alone = [eb.orthogonalize().step_cost((rows, 8)) for rows in (4, 4, 2)]
    # And an element's other operations.
    assert found.most_work == pytest.approx(max(alone) + 4 * 8)
    assert found.mean_work == pytest.approx((sum(alone) + 10 * 8) / 3)


@pytest.mark.parametrize(
    "transform",
    [
        eb.chain(eb.clip_by_unit_norm(0.1), eb.orthogonalize(QKV)),
        eb.orthogonalize(QKV, batching="together"),
        eb.chain(eb.orthogonalize(QKV), eb.orthogonalize(eb.row_blocks(2, 2, 4))),
        eb.chain(eb.orthogonalize(QKV), eb.scale_by_shape()),
    ],
)
def test_row_blocks_are_cut_if_every_transform_allows_it(transform: eb.Transform[Any]) -> None:
    model = nn.Module()
    model.qkv = Weight(8, 3)
    (allowed,), (refused,) = (describe(model, one, None).specs for one in (eb.orthogonalize(QKV), transform))
    assert allowed.row_blocks is not None
    assert allowed.row_blocks.sizes == (12, 6, 6)
    assert refused.row_blocks is None


def test_the_cost_of_a_step_is_that_of_the_products() -> None:
    quintic, cubic = eb.orthogonalize(steps=5), eb.orthogonalize(coefficients="cubic", steps=2)
    assert quintic.step_cost((8, 3)) == quintic.step_cost((3, 8)) == 5 * (3 * 8 * 3 + 3 * 3 * 3 + 3 * 3 * 8)
    assert cubic.step_cost((8, 3)) == 2 * (3 * 8 * 3 + 3 * 3 * 8)
    assert eb.orthogonalize(eb.heads(4)).step_cost((8, 3)) == 4 * quintic.step_cost((2, 3))


def test_more_ranks_than_matrices_share_the_experts() -> None:
    with torch.device("meta"):
        model = Mixture()
    kept = [plan(model, muon("FP32"), strategy="optim_grads", ranks=16, rank=rank, units=[Block]) for rank in range(16)]
    assert all(one.padding <= 16 * 3 for one in kept)  # of the parameters that AdamW steps


def test_what_an_iteration_allocates_is_counted() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    with AllocationCounter() as counter:
        eb.orthogonalize().update(x, eb.orthogonalize().init(x), x)
    # In 16 bits: the matrix before and after a product, and the two products with its transpose; the result is not there yet.
    assert counter.peak >= 2 * (2 * 64 * 128 + 2 * 64 * 64)


def test_what_a_decomposition_allocates_is_counted() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    with AllocationCounter() as counter:
        eigenvectors(x @ x.T)
    # In 64 bits: the matrix, what is decomposed, and the vectors in two orders.
    assert counter.peak >= 8 * 4 * 64 * 64


def all_gather_as_documented(parts: list[Tensor], own: Tensor, group: Any, async_op: bool) -> Any:
    assert async_op
    assert parts[dist.get_rank(group)].shape == own.shape
    parts[dist.get_rank(group)].copy_(own)
    works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
    for work in works:
        work.wait()
    return works[-1]


def reduce_scatter_as_documented(into: Tensor, parts: list[Tensor], group: Any, async_op: bool) -> Any:
    assert async_op
    assert parts[dist.get_rank(group)].shape == into.shape
    works = [dist.reduce(part, group=group, group_dst=rank, async_op=True) for rank, part in enumerate(parts)]
    for work in works:
        work.wait()
    into.copy_(parts[dist.get_rank(group)])
    return works[-1]


def as_if_over_nccl() -> tuple[Weights, int]:
    """Lists of parts, which torch documents, in the place of what is done for gloo."""
    with (
        mock.patch.object(Communicator, "_takes_lists", return_value=True),
        mock.patch.object(Communicator, "_goes_over_gloo", return_value=False),
        mock.patch.object(dist, "all_gather", mock.Mock(side_effect=all_gather_as_documented)) as gathered,
        mock.patch.object(dist, "reduce_scatter", mock.Mock(side_effect=reduce_scatter_as_documented)) as reduced,
    ):
        model = new_model("LEAN_BF16")
        found = train(model, new_stepper(model, "LEAN_BF16", strategy="optim_grads"), range(STEPS))
        return found, min(gathered.call_count, reduced.call_count)


def test_backends_that_take_lists_are_given_parts_of_different_lengths() -> None:
    expected = one_process("LEAN_BF16", 3)
    for found, calls in run(3, as_if_over_nccl):
        assert equal(found, expected)
        assert calls >= STEPS
