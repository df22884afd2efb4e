"""After an error, wherever it was, ``zero_grad()`` on every rank begins a cycle that is bit for bit as if there had been none.

What cannot be undone, because weights had been stepped already, is refused until a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import everybit as eb
from everybit_torch.checkpoint.sharded import load_sharded, save_sharded
from everybit_torch.flat.buffers import Reduced
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import FLAT, Block, data, network, weights_of
from tests.support.ranks import run

CONTEXTS = ["microbatch", "no_sync", "neither"]


class BoomError(Exception):
    """What is raised in the middle of things."""


def pass_of(stepper: FlatStepper, context: str, last: bool) -> Any:
    if context == "microbatch":
        return stepper.microbatch(last=last)
    if context == "no_sync":
        return stepper.sync() if last else stepper.no_sync()
    return contextlib.nullcontext()


def cycle(model: nn.Module, stepper: FlatStepper, context: str, dtype: torch.dtype = torch.float32) -> None:
    """Two microbatches."""
    for number in range(2):
        with pass_of(stepper, context, number == 1):
            model(data(0, dist.get_rank(), number, dtype)).float().square().mean().backward()


def gradients(model: nn.Module, stepper: FlatStepper, context: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """This rank's parts of the gradient of a cycle, which is forgotten then."""
    cycle(model, stepper, context, dtype)
    stepper.finish_gradients()
    groups = stepper.as_optimizer().param_groups
    found = [p.grad.detach().clone() for group in groups for p in group["params"]]
    stepper.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- at every point -----------------------------------------------------------------------------------------------------------------------


Point = tuple[str, int]

WATCHED = re.compile(r"everybit_torch/(flat|sharded|collectives|segments)/")


@contextlib.contextmanager
def watched(point: Point | None = None, error: type[BaseException] = BoomError) -> Iterator[list[Point]]:
    """The calls of the stepper's functions, in order, each with its number among those of its name; at one of them, raise."""
    calls: Counter[str] = Counter()
    made: list[Point] = []

    def trace(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # An error at the entry of a generator would leave it without its own handlers, as no error in it could.
        if not WATCHED.search(code.co_filename) or code.co_flags & inspect.CO_GENERATOR:
            return
        name = code.co_qualname
        calls[name] += 1
        made.append((name, calls[name]))
        if point == made[-1]:
            raise error(f"{name}, call {calls[name]}")

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield made
    finally:
        sys.settrace(before)


def points(model: nn.Module, stepper: FlatStepper, context: str) -> list[Point]:
    """Where to raise in a cycle and its step: at the first, a middle and the last call of every function that ranks call equally often.

    In the order of the first rank's calls, so that each twelfth of them has some from the beginning and some from the end.
    """
    cycle(model, stepper, context)
    stepper.step()  # what is found once is known from here on
    with watched() as made:
        cycle(model, stepper, context)
        stepper.step()
    calls = Counter(name for name, _ in made)
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, (calls, made))
    alike = {name: count for name, count in calls.items() if all(one[name] == count for one, _ in everybodys)}
    wanted = {(name, n) for name, count in alike.items() for n in (1, (count + 1) // 2, count)}
    return [point for point in everybodys[0][1] if point in wanted]


def raising_everywhere(
    path: Path, strategy: Strategy, context: str, part: int, parts: int
) -> tuple[int, int, list[str]]:
    """How many points were tried, how many of them came after the first weights had changed, and what went wrong."""
    # Which sums are there already depends on time, by which ranks would raise in different places.
    with mock.patch.object(Reduced, "settle", return_value=None):
        return raised_everywhere(path, strategy, context, part, parts)


def raised_everywhere(
    path: Path, strategy: Strategy, context: str, part: int, parts: int
) -> tuple[int, int, list[str]]:
    model = network()
    stepper = FlatStepper(
        model, eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2)), strategy=strategy, units=[Block], nan="param"
    )
    save_sharded(stepper, path)
    before = gradients(model, stepper, context), weights_of(stepper)
    wanted = points(model, stepper, context)[part::parts]
    load_sharded(stepper, path)
    cycle(model, stepper, context)
    stepper.step()
    after = gradients(model, stepper, context), weights_of(stepper)
    load_sharded(stepper, path)
    late, wrong = 0, []
    for number, point in enumerate(wanted):
        try:
            with watched(point, BoomError if number % 2 else KeyboardInterrupt):
                cycle(model, stepper, context)
                stepper.step()
            wrong.append(f"{point}: not reached")
        except (BoomError, KeyboardInterrupt):
            stepper.zero_grad()
        try:
            found = gradients(model, stepper, context), weights_of(stepper)
        except RuntimeError as error:
            # Told, and by name: weights had changed.
            if "a step ended in an error after weights had been changed; accepted is load_sharded" not in str(error):
                wrong.append(f"{point}: {error}")
            late += 1
            load_sharded(stepper, path)
            found = gradients(model, stepper, context), weights_of(stepper)
        if agree(found, after):
            load_sharded(stepper, path)  # the step was over already
        elif not agree(found, before):
            wrong.append(f"{point}: other gradients or weights")
    return len(wanted), late, wrong


def agree(one: tuple[list[Tensor], dict[str, Tensor]], other: tuple[list[Tensor], dict[str, Tensor]]) -> bool:
    return same(one[0], other[0]) and same(list(one[1].values()), list(other[1].values()))


# Each strategy, and each context with the strategies of which it changes most.
SAMPLED = [
    ("no_shard", "microbatch"), ("optim", "no_sync"), ("optim_grads", "neither"), ("optim_grads", "microbatch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "context"),
    [
        pytest.param(strategy, context, marks=() if (strategy, context) in SAMPLED else pytest.mark.exhaustive)
        for strategy in FLAT
        for context in CONTEXTS
    ],
)
@pytest.mark.sampled(4)
def test_an_error_at_any_point_leaves_nothing_behind(tmp_path: Path, strategy: Strategy, context: str) -> None:
    """Raised at the entry of functions, on all ranks; each case takes another twelfth of them."""
    part = FLAT.index(strategy) + len(FLAT) * CONTEXTS.index(context)
    for tried, late, wrong in run(2, raising_everywhere, tmp_path, strategy, context, part, 12, timeout=20):
        assert tried > 12
        assert 0 < late < tried / 2
        assert not wrong


# -- ranks that fail in different places --------------------------------------------------------------------------------------------------


def failing(model: Any, place: str, x: Tensor) -> None:
    """A backward pass that ends at one of its places."""
    handles = []

    def boom(*arguments: object) -> None:
        raise BoomError(place)

    if place == "first block":
        handles.append(model.blocks[0].register_forward_hook(boom))
    elif place == "second block's backward":
        handles.append(model.blocks[1].inner.weight.register_hook(boom))
    elif place == "entry's backward":
        handles.append(model.entry.weight.register_hook(boom))
    try:
        if place == "before":
            boom()
        loss = model(x).square().mean()
        if place == "loss":
            boom()
        loss.backward()
        boom()
    finally:
        for handle in handles:
            handle.remove()


PLACES = ["before", "first block", "loss", "second block's backward", "entry's backward", "after"]


def failing_apart(strategy: Strategy, grads: eb.Grads) -> list[str]:
    """In both microbatches of a cycle, every rank somewhere else."""
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), policy=eb.Policy(grads=grads), strategy=strategy, units=[Block])
    expected, rank, wrong = gradients(model, stepper, "microbatch"), dist.get_rank(), []
    for shift in range(len(PLACES)):
        place = PLACES[(2 * rank + shift) % len(PLACES)]
        for failed in (0, 1):
            with contextlib.suppress(BoomError):
                for number in range(2):
                    with stepper.microbatch(last=number == 1):
                        x = data(1, rank, number, torch.float32)
                        if number == failed:
                            failing(model, place, x)
                        else:
                            model(x).square().mean().backward()
            stepper.zero_grad()
            if not same(gradients(model, stepper, "microbatch"), expected):
                wrong.append(f"{place}, microbatch {failed}")
    return wrong


EXACT = eb.Grads(main="float32", comm="bfloat16", reduce="float32")
"""Whose sums are gathered after they were made: two collectives for each buffer."""


@pytest.mark.parametrize("grads", [eb.Grads(), EXACT], ids=["native", "exact"])
@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.sampled(3)
def test_ranks_may_fail_in_different_places_of_a_microbatch(strategy: Strategy, grads: eb.Grads) -> None:
    for wrong in run(3, failing_apart, strategy, grads, timeout=20):
        assert not wrong


# -- what is under way --------------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two units, whose gradients are whole numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, size, bias=False), nn.Linear(size, 1, bias=False)
        nn.init.ones_(self.one.weight)
        nn.init.ones_(self.two.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(x))
        return out


def dropped(strategy: Strategy, size: int) -> int:
    """How often a sum that an error left under way was found in the next cycle's gradient."""
    model, wrong = Wide(size), 0
    stepper = FlatStepper(model, eb.sgd(0.0), strategy=strategy, units=[nn.Linear])
    for _ in range(10):
        handle = model.one.weight.register_hook(lambda grad: 1 / 0)  # type: ignore[no-untyped-call]
        with contextlib.suppress(ZeroDivisionError), stepper.microbatch(last=True):
            model(torch.full((1, 1), 64.0)).sum().backward()
        handle.remove()
        stepper.zero_grad()
        with stepper.microbatch(last=True):
            model(torch.full((1, 1), 2.0 + dist.get_rank())).sum().backward()
        # The mean of 2 and 3, for every element of both.
        wrong += float(stepper.step().grad_norm) != pytest.approx(2.5 * (2 * size) ** 0.5)
    return wrong


@pytest.mark.parametrize("strategy", FLAT)
def test_a_sum_that_an_error_left_under_way_is_waited_for(strategy: Strategy) -> None:
    for size in (1_000, 200_000):
        assert run(2, dropped, strategy, size) == [0, 0]


def unqueued(strategy: Strategy) -> list[str]:
    """Where an error came right after a collective had been started, before anybody had it to wait for."""
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block])
    with watched() as made:
        expected = gradients(model, stepper, "microbatch")
    wrong, started = [], sum(name == "_Waited.__init__" for name, _ in made)
    for call in range(1, started + 1):
        with contextlib.suppress(BoomError), watched(("_Waited.__init__", call)):
            gradients(model, stepper, "microbatch")
            wrong.append(f"{call}: not reached")
        stepper.zero_grad()
        if not same(gradients(model, stepper, "microbatch"), expected):
            wrong.append(f"{call}: other gradients")
    return [*wrong, f"{started} calls"]


@pytest.mark.parametrize("strategy", FLAT)
def test_a_collective_that_nobody_has_to_wait_for_is_waited_for(strategy: Strategy) -> None:
    """Its memory was freed while it was under way, which ended the process."""
    for found in run(2, unqueued, strategy, timeout=20):
        assert len(found) == 1, found
        assert int(found[0].split()[0]) >= 3


# -- what cannot be undone ----------------------------------------------------------------------------------------------------------------


def half_stepped(path: Path, strategy: Strategy) -> tuple[list[str], bool]:
    """What refuses to go on after a step that failed among its weights; and whether a checkpoint makes all of it good."""
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block])
    save_sharded(stepper, path)
    expected = gradients(model, stepper, "microbatch"), weights_of(stepper)
    cycle(model, stepper, "microbatch")
    with pytest.raises(BoomError), watched(("BufferStepper._hand_out", 1)):
        stepper.step()
    stepper.zero_grad()
    refused = []

    def plainly() -> None:
        model(data(0, 0, 0, torch.float32)).sum().backward()

    attempts: dict[str, Any] = {
        "microbatch": lambda: cycle(model, stepper, "microbatch"),
        "no_sync": lambda: cycle(model, stepper, "no_sync"),
        "backward": plainly,
        "step": stepper.step,
        "finish_gradients": stepper.finish_gradients,
        "save_sharded": lambda: save_sharded(stepper, path),
    }
    for name, attempt in attempts.items():
        with pytest.raises(RuntimeError, match=f"{name}: a step ended in an error.*accepted is load_sharded"):
            attempt()
        refused.append(name)
    load_sharded(stepper, path)
    return refused, agree((gradients(model, stepper, "microbatch"), weights_of(stepper)), expected)


@pytest.mark.parametrize("strategy", FLAT)
def test_weights_that_were_stepped_in_part_are_used_no_more(tmp_path: Path, strategy: Strategy) -> None:
    for refused, good in run(2, half_stepped, tmp_path, strategy):
        assert refused == ["microbatch", "no_sync", "backward", "step", "finish_gradients", "save_sharded"]
        assert good


def on_one_rank_only(strategy: Strategy, nan: NanCheck) -> str:
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block], nan=nan)
    with stepper.microbatch(last=False):
        model(data(0, 0, 0, torch.float32)).square().mean().backward()
    if dist.get_rank() == 0:
        stepper.zero_grad()
    try:
        with stepper.microbatch(last=True):
            model(data(0, 0, 1, torch.float32)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("nan", ["off", "param"])
@pytest.mark.parametrize("strategy", ["optim_grads"])
def test_sums_that_only_some_ranks_forgot_are_told_of(strategy: Strategy, nan: NanCheck) -> None:
    """Every pass is summed over the ranks there, and a rank that forgets its part of the sums has forgotten everybody's."""
    for message in run(2, on_one_rank_only, strategy, nan):
        assert "zero_grad() was called on some of them only" in message


def going_on(strategy: Strategy) -> list[str]:
    """What is said if training goes on after an error in a backward pass, without ``zero_grad()`` and without any context."""
    model: Any = network()
    stepper = FlatStepper(model, eb.sgd(0.1), strategy=strategy, units=[Block])
    handle = model.blocks[0].inner.weight.register_hook(lambda grad: 1 / 0)
    said = []
    for attempt in range(2):
        try:
            model(data(0, dist.get_rank(), 0, torch.float32)).square().mean().backward()
            stepper.step()
        except (ZeroDivisionError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if attempt == 0:
            handle.remove()
    stepper.zero_grad()
    model(data(0, dist.get_rank(), 0, torch.float32)).square().mean().backward()
    return [*said, str(stepper.step().skipped)]


@pytest.mark.parametrize("strategy", FLAT)
def test_nobody_goes_on_from_half_a_backward_pass(strategy: Strategy) -> None:
    for first, second, skipped in run(2, going_on, strategy, timeout=20):
        assert first.startswith("ZeroDivisionError")
        assert second.startswith("RuntimeError")
        assert "zero_grad()" in second or "inside a microbatch or a backward pass" in second
        assert skipped == "False"
