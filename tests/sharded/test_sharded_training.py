"""A sharded model trains as a whole one does, whatever is shared out and among however many."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

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


def different_labels(strategy: Strategy) -> Weights:
    model = network()
    transforms = {"matrix": eb.adamw(1e-2, weight_decay=0.5), "other": eb.adamw(1e-3, weight_decay=0.0)}
    stepper = FlatStepper(
        model,
        transforms,
        labels=lambda name, p: "matrix" if p.ndim > 1 else "other",
        strategy=strategy,
        units=[Block],
    )
    groups = {group["label"]: (group["lr"], group["weight_decay"]) for group in stepper.as_optimizer().param_groups}
    assert groups == {"matrix, float32": (1e-2, 0.5), "other, float32": (1e-3, 0.0)}
    for step in range(3):
        with stepper.microbatch(last=True):
            model(data(step, 0, 0, torch.float32)).square().mean().backward()
        stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_labels_choose_transforms_as_param_groups_do(strategy: Strategy) -> None:
    model = network()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "lr": 1e-2, "weight_decay": 0.5},
        {"params": others, "lr": 1e-3, "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups)
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, 0, 0, torch.float32)).square().mean().backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    # Both ranks have the same data: a sum of two equal numbers, halved, is that number.
    for weights in run(2, different_labels, strategy):
        assert equal(weights, expected)


# -- odd models ------------------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Tied, frozen, empty, 0-d, of two dtypes, and used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList([Block(3), Block(3)])
        self.frozen = Block(3).requires_grad_(False)
        self.norm = nn.LayerNorm(3)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.never = nn.Parameter(torch.full((5,), 2.0))
        self.sometimes = Block(3)
        self.logits = nn.Linear(3, 7, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor, also: bool) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if also:
            x = self.sometimes(x)
        x = self.frozen(x)
        out: Tensor = self.logits(self.norm(x.float()).to(x.dtype))
        return out


def odd_model(low: bool) -> Odd:
    torch.manual_seed(1)
    model = Odd()
    if low:
        model = model.bfloat16()
        model.norm.float()
    return model


def tokens(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randint(0, 7, (6,), generator=generator)
    return x, torch.nn.functional.one_hot(x.flip(0), 7).float()


def odd_training(strategy: Strategy, low: bool) -> tuple[Weights, list[tuple[str, ...]], list[str]]:
    model = odd_model(low)
    kahan = dataclasses.replace(eb.policies.KAHAN_BF16, grads=eb.Grads(main="float32", comm="float32"))
    policy = eb.by_label(lambda path, p: str(p.dtype), {"torch.bfloat16": kahan, "torch.float32": eb.policies.FP32})
    stepper = FlatStepper(model, eb.adamw(1e-2, weight_decay=0.1), policy=policy, strategy=strategy, units=[Block])
    rank, untouched = dist.get_rank(), []
    for step in range(4):
        x, target = tokens(step, rank)
        with stepper.microbatch(last=True):
            # Only the second rank uses the block, and in the first step nobody does.
            mse_loss(model(x, also=step > 0 and rank == 1).float(), target).backward()  # type: ignore[no-untyped-call]
        untouched.append(stepper.step().untouched)
    tied = model.logits.weight is model.embedding.weight
    assert tied
    return weights_of(stepper), untouched, [str(p.dtype) for p in model.parameters()]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("strategy", FLAT)
def test_tied_frozen_unused_empty_and_mixed(strategy: Strategy, low: bool) -> None:
    model = odd_model(low)
    kahan = dataclasses.replace(eb.policies.KAHAN_BF16, grads=eb.Grads(main="float32"))
    groups: list[dict[str, Any]] = []
    for dtype, policy in ((torch.bfloat16, kahan), (torch.float32, eb.policies.FP32)):
        members = [p for p in model.parameters() if p.dtype is dtype]
        groups += [{"params": members, "policy": policy}] if members else []
    optimizer = AdamW(groups, lr=1e-2, weight_decay=0.1)
    for step in range(4):
        gradients: dict[str, Tensor] = {}
        # A model of its own: the optimizer asks autograd for float32 gradients of its parameters, and what a tied parameter's two uses
        # contribute would be added up in float32, not in bfloat16 as on the ranks.
        source = odd_model(low)
        source.load_state_dict(model.state_dict())
        for rank in (0, 1):
            source.zero_grad()
            x, target = tokens(step, rank)
            mse_loss(source(x, also=step > 0 and rank == 1).float(), target).backward()  # type: ignore[no-untyped-call]
            for name, p in source.named_parameters():
                if p.grad is not None:
                    gradients[name] = gradients.get(name, torch.zeros(p.shape)) + p.grad.float()
        for name, p in model.named_parameters():
            p.grad = gradients[name] / 2 if name in gradients else None
        optimizer.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for weights, untouched, _ in run(2, odd_training, strategy, low):
        assert equal(weights, expected)  # neither decayed nor moved, and with the count of steps that torch would have
        sometimes = tuple(name for name in expected if name.startswith("sometimes"))
        rest = ("empty", "never")
        assert set(untouched[0]) == {*rest, *sometimes}
        assert [set(names) for names in untouched[1:]] == [set(rest)] * 3


def skewed(strategy: Strategy) -> Weights:
    """A rank whose loss reaches no parameter at all takes part with zeros."""
    model = network()
    stepper = FlatStepper(model, eb.sgd(0.5), strategy=strategy, units=[Block])
    with stepper.microbatch(last=False):
        model(data(0, 0, 0, torch.float32)).square().mean().backward()
    with stepper.microbatch(last=True):
        out = model(data(0, 0, 1, torch.float32)).square().mean()
        if dist.get_rank() == 0:
            out.backward()
    stepper.step()
    return weights_of(stepper)


@pytest.mark.parametrize("strategy", FLAT)
def test_a_rank_without_a_backward_pass(strategy: Strategy) -> None:
    model = network()
    for number, times in ((0, 2), (1, 1)):
        (model(data(0, 0, number, torch.float32)).square().mean() * times / 2).backward()
    first, second = run(2, skewed, strategy)
    assert equal(first, second)
    for name, p in model.named_parameters():
        assert p.grad is not None
        # SGD is linear: gradients below 8 of at most 8 * 64 products, off by less than 2**-17; half of it reaches the weight.
        torch.testing.assert_close(first[name], p.detach() - 0.5 * p.grad, rtol=0, atol=2**-17)


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
