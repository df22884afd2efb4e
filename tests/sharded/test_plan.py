"""A plan is what happens: every byte that persists, the most that comes and goes, and what is sent."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit.protocol import ALONE
from everybit_torch.sharded import arguments as stepper_arguments
from everybit_torch.sharded import offload
from everybit_torch.sharded.offload import Offload
from everybit_torch.sharded.plan import Plan, plan
from everybit_torch.sharded.planning.peaks import SMALLEST
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, OuterStrategy, Strategy
from everybit_torch.stepping import piece_size
from everybit_torch.torch_internals import compiler
from tests.support.allocations import counting
from tests.support.programs import Block, Pair, on_a_mesh
from tests.support.ranks import run
from tests.support.transforms import ScaleByOldMagnitudes, lamb, old_norm, rms_clipped

BF16_WIRE = eb.Grads(main="float32", comm="bfloat16", reduce="fp32")
KAHAN = eb.policies.KAHAN_BF16


class Model(nn.Module):
    """Wide enough for more than one chunk; its own parameters are used first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(9, 259)
        self.blocks = nn.ModuleList([Block(259), Block(259), Block(259)])
        self.exit = nn.Linear(259, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(x)
        return out


class Nested(Model):
    """One of its units has units in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(259), Pair(259), Block(259)])


def measured(
    strategy: Strategy, policy: eb.Policy | None, low: bool, microbatches: int, transform: Any, reshard: bool = True,
    outer: OuterStrategy = "no_shard", mesh: Any = None, keep: bool = True, nested: bool = False, steps: int = 2,
    defer: bool = False, second_order: bool = False, ahead: int | None = None, stays: Sequence[tuple[str, int]] = (),
    away: bool | Offload = False,
) -> tuple[Plan, int, dict[str, int], dict[str, int]]:  # fmt: skip
    """The plan; and of the steps from the second on: what persists, the most by phase on top of it, and what was sent in the last."""
    torch.manual_seed(0)
    model = (Nested() if nested else Model()).to(torch.bfloat16 if low else torch.float32)
    with counting() as counter:
        stepper = FlatStepper(
            model,
            transform,
            policy=policy,
            strategy=strategy,
            units=[Block, Pair] if nested else [Block],
            reshard_after_forward=reshard,
            outer=outer,
            mesh=mesh,
            keep_gradients=keep,
            defer_reduction=defer,
            offload=away,
        )
        for number, block in enumerate(model.blocks if ahead is not None else ()):
            stepper.set_modules_to_forward_prefetch(block, list(model.blocks)[number + 1 :][:ahead])
            stepper.set_modules_to_backward_prefetch(block, list(model.blocks)[:number][::-1][:ahead])
        for after, which in stays:
            module = model if which < 0 else model.blocks[which]
            if after == "forward":
                stepper.set_reshard_after_forward(module, reshard_after_forward=False)
            else:
                stepper.set_reshard_after_backward(module, reshard_after_backward=False)
        communicators = {id(c): c for c in (stepper.inner, stepper.outer)}
        if stepper._gathering is not None:
            communicators[id(stepper._gathering.communicator)] = stepper._gathering.communicator
        peaks = dict.fromkeys(("forward", "backward", "step"), 0)
        persistent = 0
        for step in range(steps):
            forward = backward = 0
            for communicator in communicators.values():
                communicator.sent.clear()
            for number in range(microbatches):
                x = torch.ones(2, 9, dtype=model.entry.weight.dtype, requires_grad=second_order)
                with stepper.microbatch(last=number == microbatches - 1):
                    counter.peak = counter.live
                    loss = model(x).float().square().mean()
                    forward = max(forward, counter.peak)
                    counter.peak = counter.live
                    if second_order:
                        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                        loss = loss + slope.square().sum()
                        del slope
                    loss.backward()
                    backward = max(backward, counter.peak)
                del loss
            counter.peak = counter.live
            stepper.step()
            if step:
                reached = {"forward": forward, "backward": backward, "step": counter.peak}
                peaks = {name: max(peaks[name], peak - persistent) for name, peak in reached.items()}
            persistent = counter.live
        sent: dict[str, int] = {}
        for communicator in communicators.values():
            for name, size in communicator.sent.items():
                sent[name] = sent.get(name, 0) + size
        predicted = stepper.plan(microbatches=microbatches, second_order=second_order)
        # test_construction.py measures that phase.
        cycled = {name: size for name, size in predicted.transient.items() if name != "construction"}
        predicted = dataclasses.replace(predicted, transient=cycled)
        # Tensors of one element that persist are in the plan; the counter leaves them out.
        small = sum(
            tensor.nbytes
            for tensor in [
                *(
                    t
                    for unit in stepper.as_optimizer().engine.units
                    for t in eb.tree.leaves((unit.first_tensor, unit.state))
                ),
                stepper._passes.nonfinite,
                *([] if stepper._pass_counts is None else [stepper._pass_counts.numbers]),
            ]
            if tensor.untyped_storage().nbytes() < SMALLEST
        )
        absent = sum(x.untyped_storage().nbytes() for w in stepper.weights for x in w._absent)
        # Made of lists, which the counter does not see.
        members = {id(x): x.nbytes for unit in stepper.as_optimizer().engine.units for x in eb.tree.leaves(unit.whole)}
        return predicted, persistent + small + absent + sum(members.values()), peaks, sent


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
    (None, False, 1, eb.sgd(1e-3)),  # whose step takes less than the norm of the gradient
    (eb.policies.LEAN_BF16, True, 1, lamb(1e-3)),  # whose norms of each parameter are computed from all slots
    # Formats with a number for each block, of parameters that end inside of one: buffers have gaps.
    (eb.policies.LEAN_8BIT, True, 2, eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(1e-3))),
    (eb.policies.LEAN_8BIT, True, 1, eb.lamb(1e-3)),
    # Whole tensors, with factors in the place of a slot; ranks without a tensor.
    (eb.policies.LEAN_BF16, True, 1, eb.chain(eb.clip_by_global_norm(1.0), eb.torch_adafactor(1e-3))),
    (None, False, 2, eb.novograd(1e-3)),
    # Matrices that are cut between heads, and others that are not, in shares of different lengths.
    (
        dataclasses.replace(KAHAN, grads=BF16_WIRE),
        True,
        2,
        eb.muon(1e-3, views={"inner": eb.heads(9)}, others=eb.adamw, steps=1),
    ),
    # Matrices of one shape, whose iterations are done together.
    (None, False, 1, eb.muon(1e-3, batching="together", others=eb.adamw)),
]


def is_sampled(size: int, strategy: Strategy, case: int) -> bool:
    """Of two ranks all cases of the strategy with most events, and each case of one other strategy."""
    return size == 2 and strategy in ("optim_grads_params", STRATEGIES[case % 3])


@pytest.mark.parametrize(
    ("size", "strategy", "case"),
    [
        pytest.param(*one, marks=() if is_sampled(*one) else pytest.mark.exhaustive)
        for one in itertools.product((1, 2, 3), STRATEGIES, range(len(CASES)))
    ],
)
def test_plan_and_measurement_agree_to_the_byte(size: int, strategy: Strategy, case: int) -> None:
    for predicted, persistent, peaks, sent in run(size, measured, strategy, *CASES[case]):
        assert predicted.persistent_bytes == persistent
        assert predicted.transient == peaks
        assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


@dataclasses.dataclass(frozen=True, slots=True)
class LongWork(ScaleByOldMagnitudes):
    """Its work takes more memory than the rest of a step."""

    def update(self, updates: Any, state: Any, params: Any, ctx: eb.Context = ALONE) -> tuple[Any, Any]:
        def work() -> Any:
            return eb.tree.map(lambda u: (u.double().abs() * 2.0 + u.double()).to(u.dtype), updates)

        size = ctx.every(self.period, work, lambda: state.size)
        return eb.tree.elementwise(lambda u, s: u / (s.abs() + 1), updates, size), dataclasses.replace(state, size=size)


@pytest.mark.parametrize("transform", ["long work", "reductions in the work"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_step_with_the_most_work_is_planned_where_work_is_not_due_at_every_step(size: int, transform: str) -> None:
    """Of the steps two to four the last one is due. Where ranks reduce in the work, all steps do both."""
    chosen = eb.chain(LongWork(3), eb.sgd(1e-3)) if transform == "long work" else old_norm(1e-3)
    for strategy in ("no_shard", "optim_grads"):
        arguments = (strategy, None, False, 1, chosen, True, "no_shard", None, True, False, 4)
        for predicted, persistent, peaks, sent in run(size, measured, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


@pytest.mark.parametrize("outer", [pytest.param("no_shard", marks=pytest.mark.exhaustive), "optim"])
def test_in_two_dimensions(outer: str) -> None:
    for case in (CASES[1], CASES[3], CASES[6]):
        arguments = (measured, 2, 2, "optim_grads_params", *case, True, outer)
        for predicted, persistent, peaks, sent in run(4, on_a_mesh, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


def test_weights_that_are_kept_after_the_forward_pass() -> None:
    for predicted, persistent, peaks, sent in run(2, measured, "optim_grads_params", *CASES[0], False):
        assert predicted.persistent_bytes == persistent
        assert predicted.transient == peaks
        assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


def measured_away(buckets: int, *arguments: Any) -> Any:
    """As :func:`measured`, with the host's memory in the place of a device's; a step brings so many elements at a time."""
    with (
        mock.patch.object(stepper_arguments, "is_host", return_value=False),
        mock.patch.object(offload, "BUCKET", buckets),
    ):
        return measured(*arguments)


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_what_lies_on_the_host_and_what_a_step_brings_of_it_is_planned(more: bool) -> None:
    everything = Offload(weights=True, gradients=True)
    cases: list[tuple[int, Strategy, Any, int, int]] = [
        (1, "optim_grads_params", everything, 20_000, 2),
        (6, "optim_grads", True, 1 << 24, 1),
    ]
    others: list[tuple[int, Strategy, Any, int, int]] = [
        (3, "optim_grads_params", everything, 1 << 24, 1),
        (0, "optim_grads_params", everything, 30_000, 3),
        (4, "optim", True, 30_000, 1),
    ]
    for number, strategy, away, buckets, microbatches in others if more else cases:
        policy, low, _, transform = CASES[number]
        arguments = (
            buckets, strategy, policy, low, microbatches, transform, True, "no_shard", None, True, False, 2, False, False, None, (), away,
        )  # fmt: skip
        for predicted, persistent, peaks, sent in run(2, measured_away, *arguments):
            assert predicted.persistent_bytes + predicted.host_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}
            there = {"momentum"} | ({"parameters", "gradients"} if away is everything else set())
            assert there <= set(predicted.host)
            assert not {"momentum", "variance", "main parameters", "compensation"} & set(predicted.persistent)
            assert ("parameters" in predicted.persistent) == (away is True)


def test_weights_of_some_units_that_stay_are_planned() -> None:
    """After their forward pass, after a backward pass, or both; of three microbatches the first finds none there."""
    transient, sent_in_all = [], []
    for number, stays in enumerate(
        [(), [("forward", 1)], [("backward", 0), ("backward", 2)], [("forward", 1), ("backward", -1)]]
    ):
        policy, low, _, transform = CASES[0]
        arguments = (
            "optim_grads_params", policy, low, 3, transform, True, "no_shard", None, True, number == 3, 2, False, False, None, stays,
        )  # fmt: skip
        for predicted, persistent, peaks, sent in run(2, measured, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}
        transient.append(predicted.transient)
        sent_in_all.append(predicted.wire["all_gather"])
    assert transient[0]["step"] < transient[2]["step"]
    # A block is gathered twice in each microbatch: once in each if it stays after the forward pass, twice less if after backward passes.
    block = sum(p.numel() for p in Block(259).parameters()) * 4 // 2
    assert sent_in_all[0] - sent_in_all[1] == 3 * block
    assert sent_in_all[0] - sent_in_all[2] == 2 * 2 * block


@pytest.mark.parametrize(
    "strategy",
    [
        "optim",
        "optim_grads_params",
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("no_shard", "optim_grads")),
    ],
)
def test_a_unit_with_units_in_it_is_planned_to_the_byte(strategy: Strategy) -> None:
    """Its weights stay gathered while those in it compute."""
    for reshard, keep in ((True, True), (False, False)):
        arguments = (*CASES[1], reshard, "no_shard", None, keep, True)
        for predicted, persistent, peaks, sent in run(2, measured, strategy, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_kept(strategy: Strategy) -> None:
    for case in (CASES[0], CASES[1]):
        arguments = (*case, True, "no_shard", None, False)
        for predicted, persistent, peaks, sent in run(2, measured, strategy, *arguments):
            assert "gradients" not in predicted.persistent
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


def test_whole_gradients_are_planned_while_their_reduction_is_deferred() -> None:
    """In the phases of a cycle, for they are gone when a step is; and what is sent is sent once, whatever the number of microbatches."""
    for number, strategy, keep, nested in (
        (1, "optim_grads_params", True, False),
        (4, "optim_grads", False, False),
        (0, "optim_grads_params", False, True),
    ):
        policy, low, _, transform = CASES[number]
        arguments = (strategy, policy, low, 3, transform, True, "no_shard", None, keep, nested, 2, True)
        for predicted, persistent, peaks, sent in run(2, measured, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_weights_that_are_kept_for_a_graph_of_a_backward_pass_are_planned(reshard: bool) -> None:
    policy, low, _, transform = CASES[0]
    arguments = (
        "optim_grads_params",
        policy,
        low,
        2,
        transform,
        reshard,
        "no_shard",
        None,
        True,
        False,
        2,
        False,
        True,
    )
    for predicted, persistent, peaks, sent in run(2, measured, *arguments):
        assert predicted.persistent_bytes == persistent
        assert predicted.transient == peaks
        assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}


def test_lists_of_units_that_are_gathered_ahead_are_planned() -> None:
    peaks_by_list = []
    for ahead in (0, 2):
        arguments = ("optim_grads_params", *CASES[0], True, "no_shard", None, True, False, 2, False, False, ahead)
        for predicted, persistent, peaks, sent in run(2, measured, *arguments):
            assert predicted.persistent_bytes == persistent
            assert predicted.transient == peaks
            assert predicted.wire == {name: nbytes for name, nbytes in sent.items() if nbytes}
        peaks_by_list.append(predicted.transient["forward"])
    assert peaks_by_list[0] < peaks_by_list[1]


def test_the_price_of_weights_that_stay_is_memory_and_their_gain_is_traffic() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    found = {
        (forward, backward): plan(
            model, eb.adamw(1e-3), policy=KAHAN, strategy="optim_grads_params", ranks=4, units=[nn.Linear], microbatches=8,
            reshard_after_forward=forward, reshard_after_backward=backward,
        )
        for forward, backward in itertools.product((True, False), repeat=2)
    }  # fmt: skip
    weights = found[True, True].parameters * 2 * 3 // 4
    gathered = {key: one.wire["all_gather"] // weights for key, one in found.items()}
    assert gathered == {(True, True): 16, (False, True): 8, (True, False): 9, (False, False): 1}
    assert (
        found[True, False].transient["step"] - found[True, True].transient["step"] == found[True, True].parameters * 2
    )


def test_the_price_of_deferred_reduction_is_a_whole_gradient_and_its_gain_is_traffic() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    policy = dataclasses.replace(KAHAN, grads=BF16_WIRE)
    each, once = (
        plan(
            model, eb.adamw(1e-3), policy=policy, strategy="optim_grads", ranks=4, units=[nn.Linear], microbatches=8,
            defer_reduction=defer,
        )
        for defer in (False, True)
    )  # fmt: skip
    assert once.transient["forward"] - each.transient["forward"] == 4 * each.parameters
    assert each.wire["all_to_all"] == 8 * once.wire["all_to_all"]
    assert each.wire["all_gather"] == once.wire["all_gather"]
    assert each.persistent == once.persistent


# -- what persists, seen from outside ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A tied weight, frozen units and frozen parts of units, buffers, a scalar, a parameter without elements, perhaps an unused layer."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList([Block(5), Block(5), Block(5)])
        self.blocks[1].requires_grad_(False)
        self.blocks[2].get_parameter("inner.weight").requires_grad_(False)
        self.exit = nn.Linear(5, 7, bias=False)
        self.exit.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 5) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embedding(x))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.exit(x) * self.scale + self.empty.sum()
        return out


@contextmanager
def counting_live() -> Iterator[Callable[[], None]]:
    """From the call of what it gives on, ``live_bytes`` sees what was made since."""
    try:
        yield gc.freeze
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Of all tensors' memory, counted once where several lie in it."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter)]
    ranges = {(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors if x.device.type == "cpu"}
    total = end = 0
    for start, size in sorted(ranges):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


def settled_bytes(expected: int) -> int:
    """``live_bytes`` once nothing is under way: a comparison of ranks holds a number until its thread has let go of it, a moment later."""
    found = live_bytes()
    for _ in range(40):
        if found == expected:
            break
        time.sleep(0.05)
        found = live_bytes()
    return found


def matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1


LABELLED = eb.by_label(
    lambda name, p: "matrix" if p.ndim > 1 else "vector",
    {"matrix": eb.policies.LEAN_BF16, "vector": eb.policies.EXACT_BF16},
)
KEPT: list[tuple[Any, bool, Any]] = [
    (None, False, eb.adamw(1e-3)),
    (KAHAN, True, eb.chain(eb.clip_by_global_norm(1.0), eb.sgd(1e-3, momentum=0.9))),
    (eb.policies.LEAN_BF16, True, eb.chain(eb.masked(eb.add_decayed_weights(0.1), matrix), eb.adam(1e-3))),
    (eb.policies.MIXED_BF16, True, eb.lion(1e-3)),
    (LABELLED, True, eb.accumulate(eb.adamw(1e-3), every=2)),
    (eb.policies.LEAN_BF16, True, rms_clipped(1e-3)),
]


REGISTERED = {one.name: one.function() for one in eb.optimizers().values()}
KEPT += [(eb.policies.LEAN_BF16, True, transform) for transform in REGISTERED.values()]
NAMED = dict(zip(REGISTERED, range(len(KEPT) - len(REGISTERED), len(KEPT)), strict=True))
"""The numbers of the optimizers that have names."""


def kept(
    mesh: Any = None, strategies: tuple[Strategy, ...] = STRATEGIES, outer: OuterStrategy = "no_shard", unused: bool = False,
    numbers: Sequence[int] = range(len(KEPT)), **options: Any,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """Where what is there, before the first step or after it, is not what is planned; the plan of a stepper and that of its arguments."""
    shape = (1, dist.get_world_size()) if mesh is None else tuple(mesh.mesh.shape)
    wrong: list[tuple[Any, ...]] = []
    with counting_live() as start_counting:
        for number, strategy in itertools.product(numbers, strategies):
            policy, low, transform = KEPT[number]
            arguments: dict[str, Any] = {
                "policy": policy, "strategy": strategy, "outer": outer, "units": [Block], **options
            }  # fmt: skip
            start_counting()
            model = Mixed(unused=unused).to(torch.bfloat16 if low else torch.float32)
            buffers = sum(buffer.nbytes for buffer in model.buffers())
            stepper = FlatStepper(model, transform, mesh=mesh, **arguments)
            planned = plan(model, transform, ranks=shape, rank=dist.get_rank(), **arguments)
            for step in range(2):
                predicted = [stepper.plan().persistent_bytes]
                there = settled_bytes(predicted[0] + buffers) - buffers
                if not (unused and step):
                    predicted.append(planned.persistent_bytes)
                if predicted != [there] * len(predicted):
                    wrong.append((number, strategy, outer, step, there, predicted))
                with stepper.microbatch(last=True):
                    model(torch.arange(4)).float().square().mean().backward()
                stepper.step()
            stepper.close()
            del stepper, model
    return wrong


@pytest.mark.parametrize(
    ("size", "numbers"),
    [
        (2, (0, 2, 4, NAMED["mars"])),
        pytest.param(2, (1, 3, 5), marks=pytest.mark.exhaustive),
        pytest.param(2, tuple(NAMED.values()), marks=pytest.mark.exhaustive),
        *(pytest.param(size, tuple(range(len(KEPT))), marks=pytest.mark.exhaustive) for size in (1, 3)),
    ],
)
def test_what_is_there_is_what_is_planned_on_every_rank(size: int, numbers: tuple[int, ...]) -> None:
    """The union of the address ranges of all live storages: on ranks that have nothing of a group, and with counters, to the byte."""
    strategies = ("no_shard" if size == 1 else "optim", "optim_grads_params")
    for wrong in run(size, kept, None, strategies, "no_shard", False, numbers):
        assert not wrong


@pytest.mark.exhaustive  # test_in_two_dimensions compares the same bytes, counted in another way
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_what_is_there_is_what_is_planned_in_two_dimensions(outer: OuterStrategy) -> None:
    strategies = STRATEGIES if outer == "no_shard" else ("optim_grads_params",)
    for wrong in run(4, on_a_mesh, kept_on, 2, 2, strategies, outer):
        assert not wrong


def kept_on(strategies: tuple[Strategy, ...], outer: OuterStrategy, mesh: Any) -> list[tuple[Any, ...]]:
    return kept(mesh, strategies, outer)


@pytest.mark.parametrize("numbers", [(1, 4), pytest.param((0, 2, 3, 5), marks=pytest.mark.exhaustive)])
def test_counters_of_what_is_stepped_apart_are_in_a_steppers_own_plan(numbers: tuple[int, ...]) -> None:
    """A parameter that no rank uses is stepped when it is, so it counts for itself: which model does that nobody can know beforehand."""
    for wrong in run(2, kept_without_use, numbers):
        assert not wrong


def kept_without_use(numbers: tuple[int, ...]) -> list[tuple[Any, ...]]:
    return kept(strategies=("no_shard", "optim_grads_params"), unused=True, numbers=numbers)


def compiled(traced: bool) -> tuple[list[int], int, int]:
    """Live bytes before and after a compiled, measured step, and the plan's; as the fixture ``traced`` has it, without code."""
    with (
        counting_live() as start_counting,
        mock.patch.object(compiler, "compile_graph", lambda graph, inputs: graph) if traced else nullcontext(),
    ):
        start_counting()
        model = nn.Linear(5, 3)
        transform = eb.chain(eb.clip_by_global_norm(1.0), eb.sgd(1e-3, momentum=0.9))
        stepper = FlatStepper(model, transform, strategy="optim", compile=True, metrics=True)
        there = [live_bytes()]
        for _ in range(2):
            with stepper.microbatch(last=True):
                model(torch.ones(2, 5)).sum().backward()
            stepper.step()
            there.append(live_bytes())
        planned = plan(model, transform, strategy="optim", compile=True, metrics=True).persistent_bytes
        return there, stepper.plan().persistent_bytes, planned


def test_what_a_compiled_and_measured_step_keeps_is_planned(request: pytest.FixtureRequest) -> None:
    traced = request.config.getoption("markexpr") == "not exhaustive"
    for (before, *after), stepper, planned in run(1, compiled, traced):
        assert stepper == planned
        assert after == [planned, planned]
        assert before == planned - 5 * 8  # what a step measured: five numbers


def test_any_rank_can_be_asked_for() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3, bias=False)  # 9 elements in 4 shards of 3: the last has only padding
    found = [
        plan(model, eb.adamw(1e-3), strategy="optim_grads_params", ranks=(2, 2), outer="optim", rank=rank)
        for rank in range(4)
    ]
    assert [one.persistent["momentum"] for one in found] == [12, 12, 12, 0]
    assert [(one.ranks.outer_rank, one.ranks.inner_rank) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found[3] == plan(
        model, eb.adamw(1e-3), strategy="optim_grads_params", ranks=(2, 2), outer="optim", rank=(1, 1)
    )
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
    assert (
        per_rank
        <= found.persistent_bytes - found.persistent["counters"] - found.persistent["bookkeeping"]
        < per_rank + 81 * 18
    )
    block = sum(p.numel() for p in next(m for m in model.modules() if isinstance(m, LlamaBlock)).parameters())
    own = found.parameters - 80 * block
    # Of the model's own unit (embedding, last norm, logits) and two blocks: what is gathered in a forward pass.
    assert found.transient["forward"] == pytest.approx(2 * (own + 2 * block), abs=2 * 3 * 1024)
    # k (c + 2 w) (n - 1) / n, without a second gathering of the model's own.
    sent = (4 * found.parameters + 2 * 2 * found.parameters - 2 * own) * 1023 / 1024
    assert found.wire_bytes == pytest.approx(sent, rel=1e-5)
    assert took < 60  # no measurement: a plan that allocates, or loops over elements, takes hours


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "parts", "idle"),
    [
        # 70B has seven matrices in each of 80 blocks.
        ("llama-3-70b", 70_553_706_496, 560, 560, 464),
        # https://huggingface.co/mistralai/Mixtral-8x22B-v0.1, https://huggingface.co/deepseek-ai/DeepSeek-V2: 141B, 236B
        pytest.param("mixtral-8x22b", 140_630_071_296, 1624, 1624, 0, marks=pytest.mark.exhaustive),
        # 59 blocks have three batches of 160 experts, and heads in two matrices are cut in all 60.
        pytest.param(
            "deepseek-v2", 235_741_434_880, 716, 716 + 59 * 3 * 159 + 60 * 2 * 127, 0, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_muon_on_1024_ranks_in_seconds(name: str, parameters: int, tensors: int, parts: int, idle: int) -> None:
    from everybit_torch.sharded.shapes import BLOCKS, SHAPES

    start = time.monotonic()
    model = SHAPES[name].build("bfloat16")
    views = {"experts": eb.batched(), "q_b_proj|kv_b_proj": eb.heads(128)} if name == "deepseek-v2" else None
    units = [kind for kind in BLOCKS if any(isinstance(module, kind) for module in model.modules())]
    transform = eb.muon(1e-3, views=views, others=eb.adamw)
    found = plan(model, transform, policy=KAHAN, strategy="optim_grads_params", ranks=1024, units=units)
    assert found.parameters == parameters
    assert found.padding < 2e-4 * parameters
    even = found.whole_tensors
    assert even is not None
    assert (even.tensors, even.parts, even.ranks, even.idle) == (tensors, parts, 1024, idle)
    largest = max(
        p.numel() for n, p in model.named_parameters() if "embed" not in n and "head" not in n and p.ndim == 2
    )
    assert even.most_elements <= max(1.25 * even.mean_elements, even.mean_elements + largest)
    assert even.work >= even.mean_work  # the first rank has a tensor that costs most
    assert time.monotonic() - start < 60


def test_of_ranks_with_different_numbers_of_whole_tensors_the_one_with_the_most_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False))
    options: dict[str, Any] = {"strategy": "optim_grads_params", "outer": "optim", "ranks": (2, 2)}
    found = [plan(model, eb.novograd(1e-3), rank=rank, **options) for rank in range(4)]
    first = found[0].whole_tensors
    assert first is not None
    assert (first.tensors, first.ranks, first.idle) == (3, 4, 1)
    assert [one.whole_tensors.elements for one in found if one.whole_tensors] == [64, 32, 0, 8]
    assert [one.persistent["momentum"] for one in found] == [4 * 64, 4 * 32, 0, 4 * 8]
    assert first.without == (2,)
    assert (first.fullest, first.most_elements, first.imbalance) == (0, 64, 64 / 26)
    assert str(found[0]).splitlines()[-1] == (
        "  3 whole tensors on 4 ranks, 1 of which have none (2); of the mean, the busiest rank has 2.46 times the work and the fullest 2.46"
        " times the elements"
    )
    assert plan(model, eb.novograd(1e-3), ranks=4, strategy="no_shard").whole_tensors is None
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
    assert text.splitlines()[0] == "optim, 2 ranks: 64 parameters, 12.500 bytes each on this rank"
    assert "momentum" in text
    assert "reduce_scatter" in text


def no_second_gradient(strategy: Strategy) -> tuple[int, int]:
    """Peak bytes of float32 gradients: in place, and as gathered in a list and concatenated."""
    torch.manual_seed(0)
    model = Model().bfloat16()
    policy = dataclasses.replace(KAHAN, grads=eb.Grads(main="float32"))
    stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, strategy=strategy)
    gradients = sum(buffer.main.nbytes for buffer in stepper.gradients)
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
