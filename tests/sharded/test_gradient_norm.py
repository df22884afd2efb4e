"""The norm of the gradients of all ranks: as reported, and whether it is finite."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everybit as eb
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.programs import FLAT
from tests.support.ranks import run

SMALL, LARGE = 1e-30, 3e38


@pytest.mark.parametrize(
    ("dtype", "value", "skipped"),
    [
        (torch.float32, LARGE, False),
        (torch.bfloat16, LARGE, False),
        (torch.float64, 1e200, False),  # whose square is not finite
        (torch.float32, torch.inf, True),
        (torch.bfloat16, -torch.inf, True),
        (torch.float64, torch.inf, True),
        (torch.float32, torch.nan, True),
        (torch.float64, torch.nan, True),
        (torch.float32, SMALL, False),
    ],
    ids=str,
)
def test_a_step_is_skipped_exactly_for_gradients_that_are_not_finite(
    dtype: torch.dtype, value: float, skipped: bool
) -> None:
    model = nn.Linear(3, 1, bias=False).to(dtype)
    policy = eb.policies.LEAN_BF16 if dtype is torch.bfloat16 else None
    stepper = FlatStepper(model, eb.sgd(0.0), policy=policy, nan="step")
    with stepper.microbatch(last=True):
        model(torch.tensor([1.0, value, 1.0], dtype=dtype)).sum().backward()
    assert stepper.step().skipped is skipped


def handed_out(strategy: Strategy, change: str) -> tuple[float, float]:
    """The norm that a step reports after somebody has changed the gradients, and the norm of what was stepped."""
    model = nn.Linear(70001, 3, bias=False)  # more than a chunk on each of two ranks, and some padding
    stepper = FlatStepper(model, eb.sgd(0.0), strategy=strategy)

    def cycle() -> None:
        with stepper.microbatch(last=True):
            model(torch.ones(1, 70001) * (1 + dist.get_rank())).sum().backward()

    cycle()
    parameters = [p for group in stepper.as_optimizer().param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if change == "in place":
        torch._foreach_mul_(gradients, 2.0)
    elif change == "past autograd":
        for gradient in gradients:
            gradient.data.mul_(2.0)
    elif change == "numpy":
        for gradient in gradients:
            gradient.numpy()[:] *= 2
    elif change == "kept":
        views = [gradient.numpy() for gradient in gradients]
        stepper.step()
        cycle()
        for view in views:
            view *= 2
    elif change == "clipped":
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    elif change.startswith("limit"):
        assert float(stepper.clip_grad_norm_(float(change.split()[1]))) == pytest.approx(
            1.5 * (70001 * 3) ** 0.5, rel=2.0**-20
        )
    elif change == "assigned":
        for parameter in parameters:
            parameter.grad = parameter.grad * 2 if parameter.grad is not None else None
    report = stepper.step(loss_scale=0.5 if change == "loss scale" else 1.0)
    return float(report.grad_norm), 1.5 * (70001 * 3) ** 0.5


@pytest.mark.parametrize(
    "change",
    [
        "nothing",
        "in place",
        "past autograd",
        "numpy",
        "kept",
        "clipped",
        "loss scale",
        "limit 1",
        "limit 1e4",
        "assigned",
    ],
)
def test_the_norm_is_that_of_the_gradients_as_they_are_stepped(change: str) -> None:
    """Whoever has had them in hand may have written to them, which not even autograd has to know of."""
    for strategy in FLAT:
        for norm, whole in run(2, handed_out, strategy, change):
            expected = {"nothing": whole, "limit 1e4": whole, "clipped": 1.0, "limit 1": 1.0}.get(change, 2 * whole)
            # float32 gradients are rounded once when they are scaled.
            assert norm == pytest.approx(expected, rel=2.0**-20), strategy
