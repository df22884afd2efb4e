"""Ranks go through a model's units as they like: leave some out, run them in another order, use a part of them, or stop early.

What a rank computes with is gathered from all, and what it contributes is summed over all, so that no way of one rank may keep another
waiting. All gradients here are whole numbers, so that sums are the same in every order: a case is right if the weights after its steps
are those of ``no_shard``, bit for bit.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.allocations import counting
from tests.support.programs import on_a_mesh, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights


@dataclass(frozen=True)
class Step:
    """What is done with one unit."""

    unit: int
    number: int
    second: bool  # whether the unit's second parameter is used
    inner: tuple[int, ...]  # of the units that lie in it, in this order
    recompute: Literal["no", "saved tensors", "reentrant"]
    with_next: bool = False  # whether one checkpoint covers the next step as well


@dataclass(frozen=True)
class Way:
    """A rank's way through the units in one microbatch."""

    steps: tuple[Step, ...]
    loss_after: int | None  # the loss is what there is after so many steps; None: all
    backward: bool


class Part(nn.Module):
    """A unit: adds whole multiples of its parameters' sums."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor, number: int, second: bool) -> Tensor:
        x = x + (self.first * number).sum()
        return x + (self.second * (number + 1)).sum() if second else x


class Whole(nn.Module):
    """A unit with units inside, and parameters before and after them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(3))
        self.inner = nn.ModuleList([Part(size + 1), Part(size), Part(2)])

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + (self.before * step.number).sum()
        for one in step.inner:
            x = self.inner[one](x, step.number + one, step.second)
        return x + (self.after * (step.number + 2)).sum()


class Maze(nn.Module):
    """Units in a row, one of them frozen, and a parameter of its own."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(5))
        kinds: list[tuple[type[Part | Whole], int]] = [
            (Part, 3),
            (Whole, 4),
            (Part, 7),
            (Part, 1),
            (Whole, 2),
            (Part, 6),
        ]
        self.parts = nn.ModuleList([kind(scale * size) for kind, size in kinds])
        self.parts[2].requires_grad_(False)

    def forward(self, way: Way) -> list[Tensor]:
        x = (self.own * 3).sum()
        seen, covered = [x], []
        for number, step in enumerate(way.steps):
            covered.append(step)
            if step.with_next and number + 1 < len(way.steps):
                continue
            first = covered[0].recompute
            x = (
                checkpoint(self.run, x, covered, use_reentrant=first == "reentrant")
                if first != "no"
                else self.run(x, covered)
            )
            seen.append(x)
            covered = []
        return seen

    def run(self, x: Tensor, steps: list[Step]) -> Tensor:
        for step in steps:
            part = self.parts[step.unit]
            x = part(x, step) if isinstance(part, Whole) else part(x, step.number, step.second)
        return x


Kind = Literal["skips", "orders", "recomputed", "losses"]


def draw(kind: Kind, seed: str, rank: int) -> Way:
    """A way at random; of kind "losses" all ranks go alike, in any order, and only what their losses are differs."""
    chance = random.Random(seed if kind == "losses" else f"{seed} {rank}")
    units = [unit for unit in range(6) if chance.random() < 0.7]
    if kind in ("orders", "losses"):
        chance.shuffle(units)
    steps = []
    for unit in units:
        inner = [one for one in range(3) if chance.random() < 0.7]
        if kind in ("orders", "losses"):
            chance.shuffle(inner)
        again = kind in ("recomputed", "losses")
        recompute: Any = chance.choice(["no", "saved tensors", "reentrant"]) if again else "no"
        with_next = recompute != "no" and chance.random() < 0.4
        steps.append(Step(unit, chance.randrange(1, 9), chance.random() < 0.8, tuple(inner), recompute, with_next))
    chance = random.Random(f"{seed} {rank}")
    loss_after = chance.randrange(len(steps) + 1) if chance.random() < (0.7 if kind == "losses" else 0.2) else None
    return Way(tuple(steps), loss_after, chance.random() < 0.9)


def walk(
    strategy: Strategy, kind: Kind, case: int, alike: bool, reshard: bool, context: str, mesh: Any = None
) -> Weights:
    """Two steps of two microbatches."""
    model = Maze()
    stepper = FlatStepper(
        model,
        eb.sgd(1.0),
        strategy=strategy,
        units=[Part, Whole],
        divisor=1.0,
        reshard_after_forward=reshard,
        mesh=mesh,
    )
    rank = 0 if alike else dist.get_rank()
    for step in range(2):
        for number in range(2):
            way = draw(kind, f"{kind} {case} {step} {number}", rank)
            within: Any = contextlib.nullcontext()
            if context == "microbatch":
                within = stepper.microbatch(last=number == 1)
            elif context == "no_sync":
                within = stepper.sync() if number else stepper.no_sync()
            with within:
                seen = model(way)
                if way.backward or context != "microbatch":
                    seen[-1 if way.loss_after is None else min(way.loss_after, len(seen) - 1)].backward()
        stepper.step()
    weights = weights_of(stepper)
    stepper.close()
    return weights


def differences(kind: Kind, cases: range, mesh: Any = None) -> list[str]:
    """The cases that do not agree with ``no_shard``."""
    wrong = []
    for case in cases:
        chance = random.Random(case)
        alike, reshard = chance.random() < 0.2, chance.random() < 0.7
        context = chance.choice(["microbatch", "microbatch", "no_sync", "neither"])
        expected = walk("no_shard", kind, case, alike, reshard, context, mesh)
        got = walk("optim_grads_params", kind, case, alike, reshard, context, mesh)
        if not all(torch.equal(got[name], expected[name]) for name in expected):
            wrong.append(f"{kind} {case} alike={alike} reshard={reshard} {context}")
    return wrong


@pytest.mark.parametrize("kind", ["skips", "orders", "recomputed", "losses"])
@pytest.mark.parametrize(
    ("size", "cases"), [(2, 6), *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((3, 4), (4, 2)))]
)
def test_random_ways_that_differ_from_rank_to_rank(size: int, cases: int, kind: Kind) -> None:
    for wrong in run(size, differences, kind, range(100 * size, 100 * size + cases), timeout=30):
        assert not wrong


# -- what all ranks have to do alike -----------------------------------------------------------------------------------------------------


class Repeating(nn.Module):
    """Runs its units in any order, and as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(5))
        self.parts = nn.ModuleList([Part(4), Part(4), Part(4)])

    def forward(self, units: tuple[int, ...]) -> Tensor:
        x = (self.own * 3).sum()
        for number, unit in enumerate(units):
            x = self.parts[unit](x, number + 1, True)
        return x


def repeating(programs: list[list[tuple[int, ...]]], strategy: Strategy = "optim_grads_params") -> tuple[str, Weights]:
    """What is said of a pass in which each rank runs its own list of forward passes; and the weights after a step that follows."""
    model = Repeating()
    stepper = FlatStepper(model, eb.sgd(1.0), strategy=strategy, units=[Part], divisor=1.0)
    said = "nothing"
    try:
        with stepper.microbatch(last=True):
            losses = [model(units) for units in programs[dist.get_rank() % len(programs)]]
            sum(losses, torch.zeros(())).backward()
        stepper.step()
    except RuntimeError as error:
        said = str(error)
        stepper.zero_grad()
    with stepper.microbatch(last=True):
        model((0, 1, 2)).backward()
    stepper.step()
    weights = weights_of(stepper)
    stepper.close()
    return said, weights


UNALIKE: dict[str, list[list[tuple[int, ...]]]] = {
    "one unit once more": [[(0, 1, 2, 0)], [(0, 1, 2)]],
    "one unit once more, others": [[(0, 1, 1, 0, 2)], [(2, 1)]],
    "another unit once more": [[(0, 1, 2, 0)], [(0, 1, 2, 1)]],
    "two forward passes": [[(0, 1, 2), (0, 2)], [(0, 1, 2)]],
}


@pytest.mark.parametrize("case", UNALIKE)
def test_units_and_passes_that_only_some_ranks_repeat_are_refused_by_name(case: str) -> None:
    """A gathering for each would pair with another unit's on other ranks: an abort, or, where sizes agree, that unit's weights."""
    (_, expected), _ = run(2, repeating, [[(0, 1, 2)]], "no_shard")
    once = {name: value / 2 for name, value in expected.items()}  # one step of two alike
    for said, weights in run(2, repeating, UNALIKE[case], timeout=20):
        assert "optim_grads_params: this rank " in said
        assert (
            "same number of forward passes, and use a unit equally often in each; accepted next is zero_grad()" in said
        )
        assert all(torch.equal(weights[name], once[name]) for name in once)


@pytest.mark.parametrize(
    "programs",
    [
        [[(0, 1, 2, 0, 1, 2)]],
        [[(2, 1, 0)]],
        [[(0, 1, 2), (0, 1, 2)]],
        [[(0, 2), (2, 1, 1)]],
        [[(1, 0, 2), (0, 2)], [(2, 1), (1,)]],
    ],
)
def test_units_and_passes_that_all_ranks_repeat_are_gathered_again(programs: list[list[tuple[int, ...]]]) -> None:
    (_, expected), *_ = run(2, repeating, programs, "no_shard")
    for said, weights in run(2, repeating, programs, timeout=20):
        assert said == "nothing"
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def peak(kind: str) -> int:
    """The most bytes that the stepper allocates on top of what persists, in a backward pass."""
    torch.manual_seed(0)
    model, rank, found = Maze(1000), dist.get_rank(), 0
    order = {
        "alike": (0, 1, 3, 4, 5),
        "skips": (0, 1, 3, 4, 5)[: 5 - rank],
        "orders": ((0, 1, 3, 4, 5), (5, 4, 3, 1, 0))[rank],
    }
    way = Way(tuple(Step(unit, 1, True, (0, 1, 2), "no") for unit in order[kind]), None, True)
    with counting() as counter:
        stepper = FlatStepper(model, eb.sgd(1.0), strategy="optim_grads_params", units=[Part, Whole], divisor=1.0)
        for number in range(2):
            with stepper.microbatch(last=number == 1):
                before = counter.live
                counter.peak = counter.live
                model(way)[-1].backward()
                found = counter.peak - before
    return found


def test_a_way_that_leaves_units_out_costs_no_memory_and_one_in_another_order_does() -> None:
    """A rank that skips the last unit sends zeros for it as soon as its backward pass is past it, so that nobody holds anything longer."""
    alike, skips, orders = (run(2, peak, kind) for kind in ("alike", "skips", "orders"))
    assert skips[0] <= alike[0]
    assert skips[1] <= alike[1]
    assert orders[0] > alike[0]


@pytest.mark.parametrize("kind", ["orders", "losses"])
def test_random_ways_on_a_mesh(kind: Kind) -> None:
    for wrong in run(4, on_a_mesh, differences, 2, 2, kind, range(3), timeout=30):
        assert not wrong
