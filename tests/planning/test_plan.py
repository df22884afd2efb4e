"""A plan is what happens: every byte that persists, the most that comes and goes, and what is sent."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everybit as eb
from everybit.stepping import nbytes, state_bytes
from everybit_torch.collectives.reduction import CHUNK
from everybit_torch.fsdp2.fsdp2_stepper import FSDP2Stepper
from everybit_torch.planning.plan import plan
from everybit_torch.planning.report import in_order
from everybit_torch.segments import host_state
from everybit_torch.segments.segment import piece_size
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import OuterStrategy, Strategy
from everybit_torch.torch_internals.dtensors import local
from tests.support.allocations import counting
from tests.support.exact_models import Cell, Cells, mesh_of, train
from tests.support.programs import FLAT, Block, on_a_mesh, on_buffers
from tests.support.ranks import run
from tests.support.transforms import lamb

BF16_WIRE = eb.Grads(main="float32", comm="bfloat16", reduce="float32")
KAHAN = eb.policies.KAHAN_BF16


class Model(nn.Module):
    """Wide enough for more than one chunk; its own parameters are used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(9, 259)
        self.blocks = nn.ModuleList([Block(259), Block(259), Block(259)])
        self.exit = nn.Linear(259, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.exit(x)
        return out


def measured(
    strategy: Strategy, policy: eb.Policy | None, low: bool, microbatches: int, transform: Any, mesh: Any = None
) -> dict[str, tuple[Any, Any]]:
    """What is planned, and what is there after the second step: of what persists, what comes and goes, and what is sent."""
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16 if low else torch.float32)
    stepper = FlatStepper(model, transform, policy=policy, strategy=strategy, units=[Block], mesh=mesh)
    communicators = {id(c): c for c in (stepper.inner, stepper.outer)}
    peaks = {"forward": 0}
    for _ in range(2):
        for communicator in communicators.values():
            communicator.sent.clear()
        for number in range(microbatches):
            with counting() as counter, stepper.microbatch(last=number == microbatches - 1):
                model(torch.ones(2, 9, dtype=model.entry.weight.dtype)).float().square().mean().backward()
            peaks["backward"] = counter.peak
        with counting() as counter:
            stepper.step()
        peaks["step"] = counter.peak - counter.live
    sent: Counter[str] = Counter()
    for communicator in communicators.values():
        sent.update(communicator.sent)
    found = stepper.plan(microbatches=microbatches)
    return {
        "persistent": (found.persistent, in_order(kept_by(stepper))),
        "wire": (found.wire, {name: nbytes for name, nbytes in sent.items() if nbytes}),
        "transient": (found.transient, peaks),
    }


def kept_by(stepper: FlatStepper) -> Counter[str]:
    """The bytes of the tensors that a stepper has, by use."""
    kept: Counter[str] = Counter()
    for buffer in on_buffers(stepper).buffers:
        kept["parameters"] += buffer.weights.nbytes
        kept["gradients"] += buffer.main.nbytes
    for one in stepper.engine.as_optimizer().own.stepped:
        segment = one.of.segment
        is_main = any(part.name == "main" for part in segment.stored.params.parts())
        kept["main parameters" if is_main else "compensation"] += nbytes(segment.state.extra)
        kept.update(state_bytes(segment.state.inner, counters=segment.state.step.nbytes))
        kept["bookkeeping"] += nbytes(segment.first_tensor)
    return kept


SCRATCH = 2 * CHUNK * torch.float64.itemsize
"""In which sums are converted, a chunk at a time."""


def require_measured(found: list[dict[str, tuple[Any, Any]]], *, totals: bool) -> None:
    """What persists and is sent, to the byte; of what comes and goes the largest tensors."""
    for one in found:
        planned, there = one["persistent"]
        assert planned == there
        planned, there = one["wire"]
        if totals:  # which a transform requests of all ranks: some numbers in an all-reduce
            assert 0 <= there.pop("all_reduce", 0) - planned.pop("all_reduce", 0) <= 2 * 8 * 64
        assert planned == there
        planned, there = one["transient"]
        # Sums that are there give their memory back: not all of them have some at a time.
        assert planned["backward"] / 4 <= there["backward"] <= planned["backward"] + SCRATCH
        # Numbers of parameters are no large tensors; a first step may take more than those after it.
        assert planned["step"] / 1.1 <= there["step"] <= planned["step"] + 1024


CASES: list[tuple[eb.Policy | None, bool, int, Any]] = [
    (None, False, 1, eb.adamw(1e-3)),
    (dataclasses.replace(KAHAN, grads=BF16_WIRE), True, 2, eb.adamw(1e-3)),
    (dataclasses.replace(KAHAN, grads=eb.Grads(main="float32", comm="bfloat16")), True, 1, eb.adamw(1e-3)),
    (eb.policies.LEAN_BF16, True, 1, eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3))),
    (
        dataclasses.replace(eb.policies.MIXED_BF16, grads=eb.Grads(main="float32", comm="float16")),
        True,
        2,
        eb.lion(1e-3),
    ),
    (None, False, 1, eb.sgd(1e-3)),
    (eb.policies.LEAN_BF16, True, 1, lamb(1e-3)),  # a segment for each parameter
    # Formats with a number for each block, of parameters that end inside of one: buffers have gaps.
    (eb.policies.LEAN_8BIT, True, 2, eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3))),
    (eb.policies.LEAN_8BIT, True, 1, eb.lamb(1e-3)),
    # Whole tensors, with factors in the place of a slot; ranks without a tensor.
    (eb.policies.LEAN_BF16, True, 1, eb.chain(eb.clip_by_global_norm(1.0), eb.torch_adafactor(1e-3))),
    (None, False, 2, eb.chain(eb.centralize(), eb.sgd(1e-3, momentum=0.9))),
    (
        dataclasses.replace(KAHAN, grads=BF16_WIRE),
        True,
        2,
        eb.muon(
            1e-3,
            matrices=eb.Matrices(views={"inner": eb.heads(9)}),
            others=eb.adamw,
            iteration=eb.NewtonSchulz(steps=1),
        ),
    ),
    (None, False, 1, eb.muon(1e-3, others=eb.adamw)),
]


@pytest.mark.parametrize(
    ("size", "strategy", "case"),
    [
        pytest.param(*one, marks=() if one[0] == 2 and one[1] == FLAT[one[2] % 3] else pytest.mark.exhaustive)
        for one in itertools.product((1, 2, 3), FLAT, range(len(CASES)))
    ],
)
@pytest.mark.sampled(6)
def test_what_persists_and_is_sent_is_planned_to_the_byte(size: int, strategy: Strategy, case: int) -> None:
    require_measured(run(size, measured, strategy, *CASES[case]), totals=CASES[case][3].reduces)


def offloaded(strategy: Strategy, policy: eb.Policy | None, low: bool, transform: Any) -> tuple[Any, Any]:
    """What is planned on the host, and what is there after two steps."""
    with patch.object(host_state, "IN_TESTS", True), patch.object(host_state, "LENGTH", 1000):
        torch.manual_seed(0)
        model = Model().to(torch.bfloat16 if low else torch.float32)
        stepper = FlatStepper(
            model, transform, policy=policy, strategy=strategy, units=[Block], offload="state", mesh=mesh_of((2,))
        )
        for _ in range(2):
            with stepper.microbatch(last=True):
                model(torch.ones(2, 9, dtype=model.entry.weight.dtype)).float().square().mean().backward()
            stepper.step()
        own = stepper.engine.as_optimizer().own
        found, segments = stepper.plan(), [one.of.segment for one in own.stepped]
        assert own.hosts is not None
        (host,) = own.hosts.values()
        there: Counter[str] = Counter()
        for one in segments:
            is_main = any(part.name == "main" for part in one.stored.params.parts())
            there["main parameters" if is_main else "compensation"] += nbytes(one.state.extra)
            there.update(state_bytes(one.state.inner, counters=one.state.step.nbytes))
        counters = there.pop("counters")
        assert found.persistent["staging"] == host.nbytes
        assert found.persistent_bytes == sum(found.persistent.values())
        if strategy != "optim_grads_params":
            assert found.persistent["counters"] == counters
        assert "host" in str(found)
    return found.host, {name: size for name, size in there.items() if size}


@pytest.mark.parametrize(
    ("strategy", "case"),
    [*itertools.product(("no_shard", "optim"), (0, 3, 6, 7, 9)), *(("optim_grads_params", case) for case in (0, 3, 6))],
)
@pytest.mark.sampled(7)
def test_state_on_the_host_is_planned_to_the_byte(strategy: Strategy, case: int) -> None:
    policy, low, _, transform = CASES[case]
    for planned, there in run(2, offloaded, strategy, policy, low, transform):
        assert planned == there


@pytest.mark.exhaustive
@pytest.mark.slow
def test_so_it_is_in_two_dimensions() -> None:
    for case in (CASES[1], CASES[3], CASES[6]):
        found = run(4, on_a_mesh, measured, 2, 2, "optim_grads", *case)
        require_measured(found, totals=case[3].reduces)


def kept_by_fsdp2(policy: str, shape: tuple[int, ...], outer: OuterStrategy, transform: Any) -> list[Any]:
    """Bytes of a stepper over FSDP2 by use, as planned before and after it is made, and as they are."""
    low = policy != "FP32"
    model = Cells(torch.bfloat16 if low else torch.float32)
    options: dict[str, Any] = {"policy": policy, "strategy": 3, "outer": outer, "units": [Cell]}
    ranks = shape[0] if len(shape) == 1 else (shape[0], shape[1])
    before = plan(model, transform, ranks=ranks, rank=dist.get_rank(), **options)
    stepper = FlatStepper(model, transform, mesh=mesh_of(shape), **options)
    train(stepper, model, range(1), 1)
    assert isinstance(stepper.engine, FSDP2Stepper)
    optimizer = stepper.engine.as_optimizer()
    rows = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    mains = sum(main.main.nbytes for main in stepper.engine.main_gradients if main.main is not None)
    leaves = [x for one in optimizer.own.stepped for x in eb.tree.leaves(one.of.segment.state) if x.ndim]
    state = sum(x.nbytes for x in leaves)
    after = stepper.plan()
    beside = {"parameters", "gradients", "counters", "bookkeeping"}
    planned = [
        (one.persistent["parameters"], one.persistent["gradients"],
         sum(size for name, size in one.persistent.items() if name not in beside))
        for one in (before, after)
    ]  # fmt: skip
    return [*planned, (rows, mains, state)]


@pytest.mark.parametrize("policy", ["FP32", "LEAN_BF16", "MIXED_BF16"])
@pytest.mark.parametrize(("shape", "outer"), [((2,), "no_shard"), ((2, 2), "no_shard"), ((2, 2), "optim")])
@pytest.mark.sampled(3)
def test_what_fsdp2_and_we_keep_is_planned_to_the_byte(
    policy: str, shape: tuple[int, ...], outer: OuterStrategy
) -> None:
    for before, after, there in run(math.prod(shape), kept_by_fsdp2, policy, shape, outer, eb.adamw(1e-2)):
        assert before == after == there


def test_any_rank_can_be_asked_for() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3, bias=False)  # 3 rows over two ranks, which cut them over two others: 1, 1, 1 and none
    options: dict[str, Any] = {"strategy": "optim_grads_params", "ranks": (2, 2), "outer": "optim"}
    found = [plan(model, eb.adamw(1e-3), rank=rank, **options) for rank in range(4)]
    assert [one.persistent.get("momentum") for one in found] == [12, 12, 12, 0]
    assert [(one.ranks.outer_rank, one.ranks.inner_rank) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3] == plan(model, eb.adamw(1e-3), rank=(1, 1), **options)
    for rank in (4, -1, (2, 0), (0, 2)):
        with pytest.raises(ValueError, match=r"rank: got .*; there are 2 x 2 ranks, counted from 0"):
            plan(model, eb.adamw(1e-3), ranks=(2, 2), rank=rank)


def test_accelerators_are_given_larger_pieces_in_the_plan_too() -> None:
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    host, device = (
        plan(model, eb.adamw(1e-3), policy=KAHAN, strategy="optim_grads", ranks=8, device=device)
        for device in ("cpu", "cuda")
    )
    assert host.persistent == device.persistent
    # A rank's 2**21 elements are many pieces for a CPU, and one for an accelerator.
    larger = min(2**21, piece_size(torch.device("cuda"))) // piece_size(torch.device("cpu"))
    assert larger > 1
    assert device.transient["step"] == larger * host.transient["step"]


VIEWS = (eb.row_blocks(2048, 512, 512), eb.heads(24, rows=(96, 32)), eb.transposed(eb.row_blocks(1024, 1024)))


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_say_the_sizes_of_large_matrices_are_planned(view: eb.MatrixView) -> None:
    """Temporaries are measured on a smaller matrix, of which only one side may be smaller. A tenth for products of short sides."""
    with torch.device("meta"):
        model = nn.Linear(2048, 3072, bias=False, dtype=torch.bfloat16)
    plain, seen = (
        plan(
            model,
            eb.muon(1e-2, others=None, matrices=eb.Matrices(view=one)),
            policy="LEAN_BF16",
            strategy="optim",
            ranks=2,
        )
        for one in (None, view)
    )
    assert seen.persistent == plain.persistent
    assert plain.transient["step"] / 1.1 <= seen.transient["step"] <= 1.1 * plain.transient["step"]


# -- formulas ------------------------------------------------------------------------------------------------------------------------

MAIN32 = eb.Grads(main="float32")
# Bytes per parameter of one rank among n: weights, main weights, main gradients, state; (whole, divided by n) for each strategy.
RECIPES: dict[str, tuple[eb.Policy, int, int, int, int]] = {
    "classic mixed precision": (dataclasses.replace(eb.policies.MIXED_BF16, grads=MAIN32), 2, 4, 4, 8),
    "bfloat16 gradients": (eb.policies.MIXED_BF16, 2, 4, 2, 8),
    "bfloat16 and Kahan, float32 gradients": (dataclasses.replace(KAHAN, grads=MAIN32), 2, 2, 4, 4),
    "bfloat16 and Kahan": (KAHAN, 2, 2, 2, 4),
    "bfloat16 throughout": (eb.policies.FLOOR_BF16, 2, 0, 2, 4),
    "exact, remainders": (dataclasses.replace(eb.policies.EXACT_BF16, grads=MAIN32), 2, 2, 4, 8),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.sampled(5)
def test_the_seeds_bytes_per_parameter(recipe: str, ranks: int) -> None:
    """18, 16, 12, 10 and 8 bytes, and what each strategy divides of them."""
    policy, weights, main, gradient, state = RECIPES[recipe]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    expected: dict[Strategy, float] = {
        "no_shard": weights + main + gradient + state,
        "optim": weights + gradient + (main + state) / ranks,
        "optim_grads": weights + (main + gradient + state) / ranks,
        "optim_grads_params": (weights + main + gradient + state) / ranks,
    }
    assert sum((weights, main, gradient, state)) in (18, 16, 12, 10, 8)
    for strategy, bytes_each in expected.items():
        found = plan(model, eb.adamw(1e-3), policy=policy, strategy=strategy, ranks=ranks, units=[nn.Linear])
        counters = found.persistent["counters"] + found.persistent["bookkeeping"]
        assert found.persistent_bytes - counters == bytes_each * found.parameters
        assert counters < 1000


def llama_3_70b() -> nn.Module:
    from everybit_torch.sharded.shapes import SHAPES

    return SHAPES["llama-3-70b"].build("bfloat16")


def test_llama_3_70b_on_1024_ranks_in_seconds() -> None:
    from everybit_torch.sharded.shapes import LlamaBlock

    start = time.monotonic()
    model = llama_3_70b()
    policy, weights, main, gradient, state = RECIPES["classic mixed precision"]
    found = plan(model, eb.adamw(1e-3), policy=policy, strategy="optim_grads_params", ranks=1024, units=[LlamaBlock])
    took = time.monotonic() - start
    assert found.parameters == 70_553_706_496  # https://huggingface.co/meta-llama/Meta-Llama-3-70B: 70.6B
    per_rank = (weights + main + gradient + state) * found.parameters / 1024
    kept = found.persistent_bytes - found.persistent["counters"] - found.persistent["bookkeeping"]
    # FSDP2 keeps whole rows on every rank, of weights and of what is beside them; the first rank has some of all.
    assert per_rank <= kept < 1.01 * per_rank
    block = sum(p.numel() for p in next(m for m in model.modules() if isinstance(m, LlamaBlock)).parameters())
    own = found.parameters - 80 * block
    # Of the model's own unit (embedding, last norm, logits) and two blocks: what is gathered in a forward pass.
    assert found.transient["forward"] == pytest.approx(2 * (own + 2 * block), rel=0.01)
    # k (c + 2 w) (n - 1) / n, without a second gathering of the model's own.
    sent = (4 * found.parameters + 2 * 2 * found.parameters - 2 * own) * 1023 / 1024
    assert found.wire_bytes == pytest.approx(sent, rel=0.01)
    assert took < 60  # no measurement: a plan that allocates, or loops over elements, takes hours


def test_of_ranks_with_different_numbers_of_whole_tensors_the_one_with_the_most_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    whole = eb.chain(eb.centralize(), eb.sgd(1e-3, momentum=0.9))
    found = [plan(model, whole, rank=rank, strategy="optim_grads", ranks=4) for rank in range(4)]
    first = found[0].whole_tensors
    assert first is not None
    elements = first.elements
    assert (first.tensors, len(first.without)) == (3, 1)
    assert all(one.whole_tensors == first for one in found)
    assert sorted(elements) == [0, 8, 32, 64]
    assert [one.persistent["momentum"] for one in found] == [4 * numel for numel in elements]
    assert (first.fullest, first.imbalance) == (elements.index(64), 64 / 26)
    assert "3 whole tensors on 4 ranks, 1 of which have none" in str(found[0]).splitlines()[-1]
    assert plan(model, whole, ranks=4, strategy="no_shard").whole_tensors is None
    assert plan(model, eb.adamw(1e-3), ranks=4, strategy="optim").whole_tensors is None


def test_a_plan_says_what_it_cannot_do() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="ranks: got 0; accepted is 1 or more"):
        plan(model, eb.adamw(1e-3), ranks=0)
    with pytest.raises(ValueError, match="strategy: got 'zero'; accepted are 'no_shard'"):
        plan(model, eb.adamw(1e-3), strategy="zero")  # type: ignore[arg-type]


def test_a_plan_is_printed_as_a_table() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8, bias=False)
    text = str(plan(model, eb.adamw(1e-3), strategy="optim", ranks=2))
    assert text.splitlines()[0] == "optim, 2 ranks: 64 parameters, 12.375 bytes each on this rank"
    assert "momentum" in text
    assert "reduce_scatter" in text


def no_second_gradient(strategy: Strategy) -> tuple[int, int]:
    """Peak bytes of float32 gradients: in place, and as gathered in a list and concatenated."""
    torch.manual_seed(0)
    model = Model().bfloat16()
    policy = dataclasses.replace(KAHAN, grads=eb.Grads(main="float32"))
    stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, strategy=strategy)
    gradients = sum(buffer.main.nbytes for buffer in on_buffers(stepper).buffers)
    peak = 0
    for number in range(3):
        with counting() as counter, stepper.microbatch(last=number == 2):
            model(torch.ones(2, 9, dtype=torch.bfloat16)).float().square().mean().backward()
        peak = max(peak, counter.peak)
    return gradients, peak


def test_gradients_accumulate_in_place() -> None:
    """The gradients of three microbatches, in the one buffer there is: on top of it a chunk of scratch, not a second full-size gradient."""
    for gradients, peak in run(2, no_second_gradient, "optim"):
        assert peak <= 3 * (1 << 16) * 4
        assert peak < gradients / 2
