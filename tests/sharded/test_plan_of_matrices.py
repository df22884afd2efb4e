"""What a step on whole tensors takes by the plan, against what torch allocates, compiled and not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import everybit as eb
from everybit_torch import FlatStepper
from everybit_torch.sharded.plan import plan
from tests.support.ranks import run

SIDE = 240
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "muon": lambda: eb.muon(1e-3, others=None),
    "muon together": lambda: eb.muon(1e-3, others=None, batching="together"),
    "came": lambda: eb.came(1e-3),
}


def allocated_in(step: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has given out at a time, those included that an operation gives back before it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    kineto: Any = profiled.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def steps(name: str, compile: bool) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)))
    stepper = FlatStepper(model, OPTIMIZERS[name](), strategy="optim", compile=compile)
    peak = 0
    for number in range(3):
        with stepper.microbatch(last=True):
            model(torch.randn(5, SIDE)).square().mean().backward()
        if number < 2:
            stepper.step()
        else:
            peak = allocated_in(stepper.step)
    return peak, stepper.plan().transient["step"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_torch_allocates_in_a_step_is_what_is_planned(name: str) -> None:
    """But for what operations allocate for themselves: a matrix of 16 bits in another order, in a product."""
    for peak, planned in run(1, steps, name, False):
        assert planned <= peak <= planned + 2 * SIDE**2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step_takes_no_more_than_is_planned(name: str) -> None:
    for peak, planned in run(1, steps, name, True):
        assert 0 < peak <= planned + 2 * SIDE**2


def test_of_many_matrices_together_each_takes_what_the_last_of_some_took() -> None:
    def step_of(count: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(40, 30, bias=False) for _ in range(count)))
        return plan(model, OPTIMIZERS["muon together"](), strategy="optim", ranks=1).transient["step"]

    seven, eight, twenty = step_of(7), step_of(8), step_of(20)
    assert twenty == eight + 12 * (eight - seven)
    # In 32 bits the direction, its place among all, and what is computed of it; in 16 bits the iteration's matrix, and its product with
    # itself.
    assert eight - seven >= 4 * 3 * 40 * 30 + 2 * (40 * 30 + 30 * 30)


def test_a_compiled_step_of_cut_parameters_takes_nothing_and_one_of_whole_tensors_what_it_takes_uncompiled() -> None:
    with torch.device("meta"):
        model = nn.Linear(300, 400, bias=False)

    def step_of(transform: Any, compile: bool) -> int:
        return plan(model, transform, strategy="optim", ranks=1, compile=compile).transient["step"]

    assert step_of(eb.adamw(1e-3), False) > step_of(eb.adamw(1e-3), True)  # which is that of the norm
    assert step_of(eb.muon(1e-3, others=None), True) == step_of(eb.muon(1e-3, others=None), False)
