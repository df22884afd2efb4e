"""However parameters are cut, gathered and compiled, segments step with the bits of one pure step of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import everybit as eb
from everybit.base import Blocks, Scattered
from everybit_torch import AdamW
from everybit_torch.collectives.communicator import Communicator, GroupAxis
from everybit_torch.placements import row_edges
from everybit_torch.segments import segment as module
from everybit_torch.segments.contiguous import neighbours
from everybit_torch.segments.segment import Segment
from everybit_torch.segments.short import Bucket, indices
from everybit_torch.segments.steps import Steps
from everybit_torch.segments.totals import Work, find_totals
from tests.support.exact_models import mesh_of
from tests.support.ranks import run

SHAPES = [(300, 30), (7,), (64, 6), (5, 3), (1,), (40, 20)]
FIRSTS = [sum(torch.Size(s).numel() for s in SHAPES[:n]) for n in range(len(SHAPES))]
POLICIES = ["FP32", "EXACT_BF16", "LEAN_BF16", "KAHAN_BF16", "FLOOR_BF16", "TIGHT_BF16", "MIXED_BF16"]


def clipped(learning_rate: Any) -> eb.Transform[Any]:
    return eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(learning_rate), eb.clip_by_global_norm(0.01))


FACTORIES: dict[str, Callable[..., eb.Transform[Any]]] = {
    "adamw": eb.adamw,
    "clipped": clipped,
    "accumulated": lambda learning_rate: eb.accumulate(eb.adamw(learning_rate), every=2),
    "guarded": lambda learning_rate: eb.apply_if_finite(eb.sgd(learning_rate, momentum=0.9)),
    "prodigy": lambda learning_rate: eb.prodigy(learning_rate),
}


def weights(policy: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(s).to(torch.float32 if policy == "FP32" else torch.bfloat16) for s in SHAPES]


def gradients(step: int, like: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in like]
    if step == 3:
        found[0][0, 0] = float("nan")
    return found


def pure(factory: Callable[..., eb.Transform[Any]], policy: Any, steps: int) -> list[Tensor]:
    """The weights after some steps of the whole tree."""
    optimizer = eb.with_policy(factory(learning_rate=0.03), policy, seed=5)
    tree = weights(policy)
    state = optimizer.init(tree)
    for step in range(steps):
        tree, state = optimizer.step(tree, gradients(step, tree), state)
    return tree


def steps_of(factory: Callable[..., eb.Transform[Any]], policy: Any, compile: bool) -> tuple[Steps, eb.Optimizer[Any]]:
    steps = Steps(factory, eb.policies.PRESETS[policy], seed=5, compile=compile)
    steps.follow({"learning_rate": 0.03})
    return steps, eb.with_policy(factory(learning_rate=0.03), policy, seed=5)


class Drive:
    """Long parameters as segments, short ones in buckets."""

    def __init__(
        self, made: tuple[Steps, eb.Optimizer[Any]], parameters: list[Tensor], short: Sequence[Sequence[int]]
    ) -> None:
        (self.steps, optimizer), self.parameters = made, parameters
        gathered = {number for bucket in short for number in bucket}
        self.long = {
            n: Segment.new(optimizer, p.detach().view(-1), FIRSTS[n])
            for n, p in enumerate(parameters) if n not in gathered
        }  # fmt: skip
        self.buckets = [
            (list(bucket), Bucket(optimizer, [parameters[n] for n in bucket], [FIRSTS[n] for n in bucket]))
            for bucket in short
        ]

    def step(self, grads: list[Tensor]) -> None:
        work = [Work(segment, grads[n].reshape(-1)) for n, segment in self.long.items()]
        work += [Work(bucket.segment, bucket.gather([grads[n] for n in numbers])) for numbers, bucket in self.buckets]
        totals = find_totals(work, find=self.steps.find)[0]
        for segment, grad, *_ in work:
            self.steps.step(segment, grad, totals)
        for _, bucket in self.buckets:
            bucket.scatter()

    def come_apart(self) -> None:
        for numbers, bucket in self.buckets:
            self.long |= {n: one.segment for n, one in zip(numbers, bucket.apart(), strict=True)}
        self.buckets = []


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(module, "CHUNK", 700)


SHORT: list[list[list[int]]] = [[], [[1, 2, 3, 4]], [[1, 3], [2, 4, 5]], [[4, 1]]]


def cases() -> Iterator[Any]:
    """All of them; `make test` has each transform under each policy, and each way of gathering under each of them."""
    for one, two, three in product(*(range(len(x)) for x in (FACTORIES, POLICIES, SHORT))):
        marks = () if three == (one + 2 * two) % len(SHORT) else pytest.mark.exhaustive
        yield pytest.param([*FACTORIES][one], POLICIES[two], SHORT[three], marks=marks)


@pytest.mark.parametrize(("name", "policy", "short"), list(cases()))
@pytest.mark.sampled(4)
def test_segments_have_the_bits_of_the_whole(
    name: str, policy: Any, short: list[list[int]], small_pieces: None
) -> None:
    factory, parameters = FACTORIES[name], weights(policy)
    at = [p.data_ptr() for p in parameters]
    drive = Drive(steps_of(factory, policy, compile=False), parameters, short)
    for step in range(4):
        drive.step(gradients(step, parameters))
    drive.come_apart()
    for step in range(4, 6):
        drive.step(gradients(step, parameters))
    assert [p.data_ptr() for p in parameters] == at
    for found, expected in zip(parameters, pure(factory, policy, 6), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if policy == own else pytest.mark.exhaustive)
        for name, own in (("adamw", "LEAN_BF16"), ("clipped", "KAHAN_BF16"))
        for policy in ("FP32", "LEAN_BF16", "KAHAN_BF16")
    ],
)
@pytest.mark.sampled(2)
def test_compiled_steps_have_the_bits_of_the_whole(name: str, policy: Any) -> None:
    factory, parameters = FACTORIES[name], weights(policy)
    drive = Drive(steps_of(factory, policy, compile=True), parameters, [[1, 2, 3, 4]])
    for step in range(3):
        drive.step(gradients(step, parameters))
    for found, expected in zip(parameters, pure(factory, policy, 3), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_compiled_steps_of_columns_have_the_bits_of_the_whole() -> None:
    """Rows whose length is a power of two are counted in another way than others."""
    steps, optimizer = steps_of(eb.lion, "LEAN_BF16", compile=True)
    for columns in (8, 6):
        whole = [torch.linspace(-1, 1, 64 * 12).bfloat16()]
        part = whole[0].view(64, 12)[:, 3 : 3 + columns].reshape(-1)
        segment = Segment.new(optimizer, part, Blocks(torch.arange(64) * 12 + 3, None, columns))
        state = optimizer.init(whole)
        for _ in range(2):
            steps.step(segment, part.sin())
            whole, state = optimizer.step(whole, [whole[0].sin()], state)
        pairs = zip(eb.tree.leaves((part, segment.state)), eb.tree.leaves((whole, state)), strict=True)
        for found, expected in pairs:
            own = expected.view(64, 12)[:, 3 : 3 + columns].reshape(-1) if expected.ndim else expected
            assert torch.equal(found, own)


@settings(deadline=None, max_examples=30)
@given(edges=st.lists(st.integers(1, 800 - 1), unique=True, max_size=4), policy=st.sampled_from(POLICIES))
def test_a_vector_may_be_cut_anywhere_at_any_time(edges: list[int], policy: Any) -> None:
    dtype = torch.float32 if policy == "FP32" else torch.bfloat16
    vector = torch.randn(800, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = [torch.randn(800, generator=torch.Generator().manual_seed(2 + step)).to(dtype) for step in range(3)]
    optimizer = eb.with_policy(eb.adamw(0.1), policy)
    whole, cut = (Segment.new(optimizer, vector.clone(), 2**32 - 100) for _ in range(2))
    for grad in grads:
        whole.step(grad)
    cut.step(grads[0])
    bounds = [0, *sorted(edges), 800]
    parts = [(slice(a, b), cut.cut(a, b)) for a, b in pairwise(bounds)]
    for grad in grads[1:]:
        for where, part in parts:
            part.step(grad[where])
    assert torch.equal(cut.tensor, whole.tensor)
    for (entry, a), (_, b) in zip(whole.entries(), cut.entries(), strict=True):
        assert entry.role == "shared" or torch.equal(a, b), entry.name


def test_a_bucket_follows_its_parameters_and_takes_any_strides() -> None:
    tree = [torch.randn(4, 6).t(), torch.randn(5)]
    parameters = [torch.nn.Parameter(x.clone()) for x in tree]
    optimizer = eb.with_policy(eb.adamw(0.1), "FP32")
    bucket = Bucket(optimizer, parameters, [0, 24])
    state = optimizer.init(tree)
    for step in range(3):
        grads = gradients(step + 10, tree)
        bucket.segment.step(bucket.gather(grads))
        with torch.no_grad():
            bucket.scatter()
        tree, state = optimizer.step(tree, grads, state)
        assert all(torch.equal(p, x) for p, x in zip(parameters, tree, strict=True))
        parameters[step % 2].data = parameters[step % 2].data.clone()
        assert not bucket.in_place()
        bucket.relocate()
    assert parameters[0]._version > 0


def test_blocks_of_a_format_begin_with_each_parameter() -> None:
    policy = eb.Policy(momentum=eb.Blockwise("float", block=64), variance=eb.Blockwise("float", block=64))
    tree = [torch.randn(70), torch.randn(3, 20), torch.randn(130)]
    parameters = [x.clone() for x in tree]
    optimizer = eb.with_policy(eb.adamw(0.1), policy, unsafe="allow")
    bucket = Bucket(optimizer, parameters, [0, 70, 130])
    states = [optimizer.init([x]) for x in tree]
    for step in range(3):
        grads = gradients(step + 10, tree)
        bucket.segment.step(bucket.gather(grads))
        bucket.scatter()
        for number, first in enumerate([0, 70, 130]):
            (tree[number],), states[number] = optimizer.step(
                [tree[number]], [grads[number]], states[number], eb.Context(first_element=first)
            )
    assert all(torch.equal(p, x) for p, x in zip(parameters, tree, strict=True))


def test_segments_that_make_different_requests_are_refused() -> None:
    optimizers = [
        eb.with_policy(one, "FP32") for one in (clipped(0.1), eb.chain(eb.clip_by_global_norm(1.0), eb.sgd(0.1)))
    ]
    work = [Work(Segment.new(one, torch.ones(3)), torch.ones(3)) for one in optimizers]
    with pytest.raises(RuntimeError, match="makes different requests for different parameters"):
        find_totals(work)


@pytest.mark.usefixtures("traced")
def test_new_values_of_hyperparameters_compile_nothing(caplog: pytest.LogCaptureFixture) -> None:
    steps, optimizer = steps_of(eb.adamw, "FP32", compile=True)
    segment, reference = (Segment.new(optimizer, torch.ones(100)) for _ in range(2))
    steps.step(segment, torch.ones(100))
    with torch.compiler.set_stance("fail_on_recompile"):
        steps.follow({"learning_rate": 0.2})
        segment.optimizer = eb.with_policy(eb.adamw(0.2), "FP32", seed=5)
        steps.step(segment, torch.ones(100))
    reference.step(torch.ones(100))
    reference.optimizer = segment.optimizer
    reference.step(torch.ones(100))
    assert torch.equal(segment.tensor, reference.tensor)


REQUESTS: dict[str, eb.Transform[Any]] = {
    "norm of gradients": eb.clip_by_global_norm(1.0),
    "norm of updates": eb.chain(eb.scale(2.0), eb.clip_by_global_norm(1.0)),
    "of each parameter": eb.scale_by_trust_ratio(),
}


def totals_of(name: str, axis: eb.Axis, *, counts: bool) -> list[Any]:
    segment = Segment.new(eb.with_policy(REQUESTS[name], "FP32"), torch.arange(5.0), is_part=True)
    (totals,) = find_totals([Work(segment, torch.arange(5.0) - 1, (), counts, axis)])
    return [total.tolist() for total in totals]


def copied(name: str) -> list[Any]:
    ranks = Communicator(dist.group.WORLD)
    return totals_of(name, GroupAxis((ranks,)), counts=ranks.rank == 1)


@pytest.mark.parametrize("name", REQUESTS)
def test_of_copies_on_several_ranks_one_contributes(name: str) -> None:
    assert run(3, copied, name) == [totals_of(name, eb.Local, counts=True)] * 3


def on_two_meshes(shape: tuple[int, ...]) -> list[float]:
    """Rows of a dense parameter over all ranks, and of an expert's over the inner ranks: outer ranks have other experts."""
    mesh = mesh_of(shape)
    outer, inner = (Communicator(mesh.get_group(number)) for number in range(2))
    rank, size = dist.get_rank(), dist.get_world_size()
    dense, experts = GroupAxis((inner, outer)), GroupAxis((inner, outer))
    optimizer = eb.with_policy(eb.clip_by_global_norm(1.0), "FP32")
    work = []
    for numbers, ranks, at, axis in (
        (torch.arange(12.0), size, rank, dense), (torch.arange(10.0) + 100 * outer.rank, inner.size, inner.rank, experts),
    ):  # fmt: skip
        edges = row_edges(len(numbers), ranks)
        rows = numbers[edges[at] : edges[at + 1]]
        work.append(Work(Segment.new(optimizer, torch.zeros_like(rows)), rows, axis=axis))
    alone = torch.full((2,), 3.0)  # every rank has it
    work.append(Work(Segment.new(optimizer, torch.zeros(2)), alone))
    return [float(total) for total in find_totals(work)[0]]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_a_norm_goes_over_each_parameters_own_mesh_once(shape: tuple[int, int]) -> None:
    whole = [
        torch.arange(12.0),
        *(torch.arange(10.0) + 100 * number for number in range(shape[0])),
        torch.full((2,), 3.0),
    ]
    squares = sum(float(x.square().sum()) for x in whole)
    for totals in run(torch.Size(shape).numel(), on_two_meshes, shape):
        assert totals == [squares]


WORD = 1 << 32


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=10),
    st.integers(WORD - 20, WORD + 2),
    st.integers(1, 12),
)
def test_neighbours_stepped_at_once_follow_each_other_or_are_short_within_one_word(
    lying: list[tuple[int, int]], first: int, short: int
) -> None:
    lengths, firsts = [], []
    for length, skipped in lying:
        first += skipped
        lengths.append(length)
        firsts.append(first)
        first += length
    found = neighbours(lengths, firsts, short)
    assert [number for where in found for number in range(where.start, where.stop)] == [*range(len(lengths))]
    for where in found:
        index = indices(lengths[where], firsts[where], 1, torch.device("cpu"))
        expected = [one + n for one, length in zip(firsts[where], lengths[where], strict=True) for n in range(length)]
        if isinstance(index, int):
            assert [index + n for n in range(len(expected))] == expected
        else:
            assert isinstance(index, Scattered)
            assert len(expected) < short
            assert [(int(index.high) << 32) + (low & (WORD - 1)) for low in index.low.tolist()] == expected


def test_short_parameters_on_both_sides_of_two_to_the_32_are_stepped_with_the_bits_of_each_alone() -> None:
    """Scattered elements of one vector have one upper word; a parameter may lie on the edge."""
    shapes, firsts = [(5,), (6,), (7,), (3,)], [WORD - 9, WORD - 2, WORD + 40, WORD - 30]
    values = [torch.linspace(-1, 1, *shape).bfloat16() for shape in shapes]

    def trained(which: list[int]) -> list[Tensor]:
        parameters = [nn.Parameter(values[number].clone()) for number in which]
        optimizer = AdamW(parameters, 0.1, policy="LEAN_BF16", compile=False)
        optimizer.own.number_at({p: firsts[number] for p, number in zip(parameters, which, strict=True)})
        for _ in range(2):
            for p, number in zip(parameters, which, strict=True):
                p.grad = values[number].square()
            optimizer.step()
        return [p.detach() for p in parameters]

    together = trained([0, 1, 2, 3])
    assert all(torch.equal(together[number], *trained([number])) for number in range(4))
