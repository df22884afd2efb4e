"""The drop-ins do what ``torch.optim`` does, in the precision of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import Adafactor, AdamW, TorchOptimizer
from tests.support.closed_optim import BY_NAME, CLOSED, PAIRS, lacks_gradient, wide_numbers
from tests.support.small_models import Awkward, give_gradients, same_bits, train, values


def skip_sometimes(step: int, name: str) -> bool:
    """No gradient for some parameters in some steps, and never one for ``other``'s first ten."""
    return (name == "vector" and step % 3 == 1) or (name == "other" and step < 10)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), [*PAIRS, *BY_NAME])
@pytest.mark.sampled(4)
def test_float64_follows_torch_for_200_steps(
    ours: Callable[..., TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    def without(step: int, name: str) -> bool:
        return lacks_gradient(ours, name) or skip_sometimes(step, name)

    mine, reference = Awkward(torch.float64), Awkward(torch.float64)
    optimizer = ours(mine.parameters(), **arguments)
    got = train(mine, optimizer, 200, without=without)
    with wide_numbers():
        expected = train(reference, theirs(reference.parameters(), **arguments), 200, without=without)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        pytest.param(*pair, marks=pytest.mark.exhaustive if pair in [*CLOSED, *BY_NAME] else ())
        for pair in [*PAIRS, *BY_NAME]
    ],
)
def test_float32_follows_torch_and_float64_to_a_few_units_in_the_last_place(
    ours: Callable[..., TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    def run(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> list[torch.Tensor]:
        model = Awkward(dtype)
        optimizer = kind(model.parameters(), **arguments)
        for step in range(200):
            give_gradients(model, 1000 + step, without=lambda name: lacks_gradient(ours, name))
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad.float().to(dtype)
            optimizer.step()
        return [value.double() for value in values(model)]

    got, torchs, exact = run(ours, torch.float32), run(theirs, torch.float32), run(theirs, torch.float64)
    # In each of 200 steps the update and the sum are rounded, by half an ulp at most: a random walk whose steps
    # have the uniform distribution's standard deviation 1 / sqrt(12): six sigma are 6 * sqrt(200 * 2 / 12) = 35 ulps of the largest value.
    walk = 35 * 2.0**-23
    # torch multiplies by float32(1 - lr * wd), whose error is the same in every step.
    factor = 1 - arguments["lr"] * arguments.get("weight_decay", 0.0)
    decoupled = ours in (AdamW, Adafactor) or arguments.get("decoupled_weight_decay", False)
    drift = 200 * abs(float(torch.tensor(factor)) - factor) if decoupled else 0.0
    # Of ASGD the factor 1 - lambd * eta is another one in each step, rounded by half an ulp of 1/2 at most.
    drift += 200 * 2.0**-25 if theirs is torch.optim.ASGD else 0.0
    for a, b, c in zip(got, torchs, exact, strict=True):
        if a.numel():
            largest = c.abs().max().clamp(min=1.0)
            assert (a - c).abs().max() <= walk * largest
            assert (a - b).abs().max() <= (walk + drift) * largest


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=40),  # also moves betas
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.0 if step == 0 else 1.0),  # lr = 0 first
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5),
}


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("scheduler", "compile"),
    [
        *((name, False) for name in SCHEDULERS),
        ("OneCycleLR", True),
        *(pytest.param(name, True, marks=pytest.mark.exhaustive) for name in SCHEDULERS if name != "OneCycleLR"),
    ],
)
@pytest.mark.sampled(2)
def test_lr_schedulers_drive_it_as_they_drive_torch(scheduler: str, compile: bool) -> None:
    mine, reference = Awkward(torch.float64), Awkward(torch.float64)
    a = AdamW(mine.parameters(), lr=1e-2, compile=compile)
    b = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    schedule_a, schedule_b = SCHEDULERS[scheduler](a), SCHEDULERS[scheduler](b)
    for step in range(20):
        train(mine, a, 1, start=step)
        train(reference, b, 1, start=step)
        schedule_a.step()
        schedule_b.step()
    for x, y in zip(values(mine), values(reference), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("traced")
@pytest.mark.slow
def test_a_schedule_recompiles_nothing() -> None:
    torch._dynamo.reset()
    model = Awkward()
    optimizer = AdamW(model.parameters(), lr=1e-2, compile=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    train(model, optimizer, 1)
    schedule.step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(1, 99):
            train(model, optimizer, 1, start=step)
            schedule.step()
    assert optimizer.param_groups[0]["lr"] != 1e-2


def test_param_groups_have_their_own_hyperparameters_and_policies() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(
        [
            {"params": [model.matrix, model.other], "lr": 1e-2, "policy": eb.policies.EXACT_BF16},
            {"params": [model.vector, model.scalar, model.empty], "weight_decay": 0.0},
        ],
        lr=1e-3,
        policy=eb.policies.KAHAN_BF16,
    )
    alone = Awkward(torch.bfloat16)
    first = AdamW([alone.matrix, alone.other], lr=1e-2, policy=eb.policies.EXACT_BF16)
    train(model, optimizer, 5)
    for step in range(5):
        # The stream is drawn in the order of named_parameters, so each group alone sees the same gradients.
        give_gradients(alone, 1000 + step)
        first.step()
    assert torch.equal(model.matrix, alone.matrix)
    assert torch.equal(model.other, alone.other)
    assert {name: x.dtype for name, x in optimizer.state[model.matrix].items()}["variance"] is torch.float32
    assert {name: x.dtype for name, x in optimizer.state[model.vector].items()}["variance"] is torch.bfloat16


def test_a_closure_runs_once_with_gradients_and_its_loss_comes_back() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return float(loss.item())

    before = closure()
    loss = optimizer.step(closure)
    assert loss == before
    assert calls == [True, True]
    assert closure() < before


def test_zero_grad_works_both_ways() -> None:
    model = Awkward()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_left_as_they_were() -> None:
    model = Awkward(torch.bfloat16)
    optimizer = AdamW(model.parameters(), policy=eb.policies.LEAN_BF16)
    train(model, optimizer, 1)
    before = [p.grad for p in model.parameters()]
    give_gradients(model, 1000)
    assert same_bits([p.grad for p in model.parameters() if p.grad is not None], [g for g in before if g is not None])


def test_a_clipped_chain_is_an_optimizer_too() -> None:
    def clipped(learning_rate: float, weight_decay: float) -> eb.Transform[Any]:
        return eb.chain(eb.clip_by_global_norm(1.0), eb.adamw(learning_rate, weight_decay=weight_decay))

    model, reference = Awkward(torch.float64), Awkward(torch.float64)
    mine = TorchOptimizer(model.parameters(), clipped, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        give_gradients(model, step, without=lambda name: name == "vector")
        give_gradients(reference, step, without=lambda name: name == "vector")
        grads = [p.grad for p in reference.parameters() if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_(torch.clamp(1.0 / norm, max=1.0))
        mine.step()
        theirs.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
