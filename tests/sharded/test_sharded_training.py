"""A sharded model trains as a whole one does, whatever is shared out and among however many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everybit as eb
from everybit_torch import AdamW, Lion, TorchOptimizer
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import STRATEGIES, Strategy
from tests.support.programs import FLAT, Block, data, network, on_buffers, train, weights_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal

CLIPPED = eb.chain(eb.clip_by_global_norm(0.5), eb.adamw(1e-2))


# -- ordinary gradients ---------------------------------------------------------------------------------------------------------------


def reference(
    size: int, steps: int, microbatches: int, limit: float, dtype: torch.dtype
) -> tuple[Weights, list[float]]:
    """torch's AdamW on the mean of all ranks' sums of gradients, in float64."""
    model = network(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            for number in range(microbatches):
                (model(data(step, rank, number, torch.float32).to(dtype)).square().mean() / size).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sampled(4)
def test_clipping_by_the_global_norm_sees_every_element_once(strategy: Strategy, size: int) -> None:
    """Against float64: one process, whole tensors, torch's own clipping."""
    expected, norms = reference(size, 3, 2, 0.5, torch.float64)
    for weights, measured in run(size, train, strategy, None, CLIPPED):
        # Norms of 80 elements of float32 gradients, each a sum of at most 64 products: relative errors of some 2**-20 at the worst.
        assert measured == pytest.approx(norms, rel=2**-18)
        for name, value in weights.items():
            # Adam's first steps divide the gradient by its own size: an element of relative error e moves by lr * e, where e is at most
            # 2**-18 here but for elements that nearly cancel; eps bounds those. Three steps, and weights rounded at 2**-24.
            torch.testing.assert_close(value.double(), expected[name], rtol=2**-22, atol=3 * 1e-2 * 2**-10)


def poisoned(strategy: Strategy) -> tuple[Weights, float]:
    model = network()
    stepper = FlatStepper(model, CLIPPED, strategy=strategy, units=[Block])
    norm = 0.0
    for step in range(2):
        for buffer in on_buffers(stepper).buffers:
            buffer.weights[buffer.buffer.places[-1].stop :] = torch.nan
            if not buffer.sharding.grads:
                buffer.main[buffer.buffer.places[-1].stop :] = torch.nan
        with stepper.microbatch(last=True):
            model(data(step, dist.get_rank(), 0, torch.float32)).square().mean().backward()
        norm = float(stepper.step().grad_norm)
    return weights_of(stepper), norm


@pytest.mark.parametrize("strategy", FLAT)
def test_what_is_in_the_padding_never_leaks(strategy: Strategy) -> None:
    for weights, norm in run(4, poisoned, strategy):
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())
        assert 0 < norm < 100


def few_elements(strategy: Strategy) -> Weights:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.fill_(1.0)
    stepper = FlatStepper(model, CLIPPED, strategy=strategy)
    for _ in range(2):
        with stepper.microbatch(last=True):
            model(torch.ones(1, 1)).square().sum().backward()
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_without_elements(strategy: Strategy) -> None:
    """Two elements over three or four ranks."""
    (expected,) = run(1, few_elements, strategy)
    for size in (3, 4):
        for weights in run(size, few_elements, strategy):
            # Powers of two, and thirds of multiples of three: but for clipping's norm all of it is exact.
            torch.testing.assert_close(weights, expected, rtol=2**-22, atol=0)


# -- frameworks ------------------------------------------------------------------------------------------------------------------------


def scheduled(strategy: Strategy, compile: bool) -> tuple[Weights, list[float]]:
    model = network()
    transform = eb.lion(1e-2, weight_decay=0.1) if compile else eb.adamw(1e-2)
    # A step of one unit is compiled for one size.
    stepper = FlatStepper(model, transform, strategy=strategy, units=None if compile else [Block], compile=compile)
    optimizer = stepper.as_optimizer()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    rates = []
    for step in range(5):
        optimizer.zero_grad()

        def closure(step: int = step) -> float:
            loss = model(data(step, 0, 0, torch.float32)).square().mean()
            loss.backward()
            return float(loss.detach())

        value = optimizer.step(closure)
        assert isinstance(value, float)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return weights_of(stepper), rates


@pytest.mark.parametrize(
    ("strategy", "compile"),
    [
        ("no_shard", False), ("optim", False), ("optim_grads_params", False),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
            ("no_shard", True), ("optim", True), ("optim_grads_params", True),
        )),
    ],
)  # fmt: skip
def test_schedulers_and_closures(strategy: Strategy, compile: bool) -> None:
    """The rate and the first beta are data of a compiled step. Lion's is compiled sooner than AdamW's."""
    model = network()
    optimizer: TorchOptimizer = (
        Lion(model.parameters(), lr=1e-2, weight_decay=0.1) if compile else AdamW(model.parameters(), lr=1e-2)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    rates = []
    for step in range(5):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.float32)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for weights, found in run(2, scheduled, strategy, compile):
        assert found == rates
        assert equal(weights, expected)
