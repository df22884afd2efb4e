"""Ranks that begin different phases of a cycle are told what each begins, all of them and at once, and go on after ``zero_grad()``."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import everybit as eb
from everybit_torch import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import Block, data, network, on_a_mesh, weights_of
from tests.support.ranks import run
from tests.support.weights import equal

Context = Literal["microbatch", "no_sync and sync", "none"]

STEP = "step: this rank begins step(), or finish_gradients(), and another rank begins a microbatch."
MICROBATCH = "microbatch: this rank begins a microbatch, and another rank begins step(), or finish_gradients()."
LAST = "microbatch: this rank's backward pass is the last one before a step, and another rank's is not, or the reverse."


def cycle(stepper: FlatStepper, count: int, context: Context, *, last: bool | None = None) -> None:
    for number in range(count):
        is_last = number == count - 1 if last is None else last
        within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if context == "microbatch":
            within = stepper.microbatch(last=is_last)
        elif context == "no_sync and sync":
            within = stepper.sync() if is_last else stepper.no_sync()
        with within:
            stepper.model(data(0, dist.get_rank(), number, torch.float32)).square().mean().backward()
    stepper.step()


def different(strategy: Strategy, context: Context, odd: int, mesh: Any = None) -> tuple[str, bool]:
    """What a rank is told where one has a microbatch more; and whether what comes after has the bits of an undisturbed run."""
    found, message = [], ""
    for disturbed in (True, False):
        torch.manual_seed(0)
        model = network()
        stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block], mesh=mesh)
        cycle(stepper, 2, context)
        if disturbed:
            with pytest.raises(RuntimeError) as raised:
                cycle(stepper, 1 + (dist.get_rank() == odd), context, last=False)
            message = str(raised.value)
            stepper.zero_grad()
        cycle(stepper, 2, context)
        found.append(weights_of(stepper))
        stepper.close()
    return message, equal(*found)


@pytest.mark.parametrize("context", ["microbatch", "no_sync and sync", "none"])
@pytest.mark.parametrize("strategy", ["optim_grads"])
def test_another_number_of_microbatches_is_an_error_on_every_rank(strategy: Strategy, context: Context) -> None:
    for odd in (0, 1):
        for rank, (message, goes_on) in enumerate(run(2, different, strategy, context, odd, timeout=20)):
            assert message.startswith(MICROBATCH if rank == odd else STEP)
            assert "Accepted is the same number of microbatches in a step on every rank" in message
            assert goes_on


@pytest.mark.parametrize("strategy", ["optim_grads"])
def test_so_it_is_on_a_mesh_of_two_dimensions(strategy: Strategy) -> None:
    for rank, (message, goes_on) in enumerate(
        run(4, on_a_mesh, different, 2, 2, strategy, "microbatch", 3, timeout=20)
    ):
        assert message.startswith(MICROBATCH if rank == 3 else STEP)
        assert goes_on


def unlike_last() -> tuple[str, bool]:
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy="optim_grads", units=[Block])
    with pytest.raises(RuntimeError) as raised:
        cycle(stepper, 1, "microbatch", last=dist.get_rank() == 0)
    stepper.zero_grad()
    cycle(stepper, 2, "microbatch")
    return str(raised.value), True


def test_another_last_is_an_error_on_every_rank() -> None:
    for message, goes_on in run(3, unlike_last, timeout=20):
        assert message.startswith(LAST)
        assert goes_on


def where_it_is_right(strategy: Strategy) -> bool:
    """Where gradients are not sharded, sums are made in the last microbatch alone."""
    model = network()
    stepper = FlatStepper(model, eb.adamw(1e-2), strategy=strategy, units=[Block])
    cycle(stepper, 1 + dist.get_rank(), "microbatch")
    cycle(stepper, 2 - dist.get_rank(), "microbatch")
    return True


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_where_nothing_is_sent_in_between_any_number_will_do(strategy: Strategy) -> None:
    assert run(2, where_it_is_right, strategy, timeout=20) == [True, True]
