"""Prodigy's and D-Adaptation's estimates are one number for all parameters of an optimizer, whichever have gradients at a step."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import everybit as eb
import everybit_torch as et
from tests.support.ranks import run

SHAPES = ((5,), (3, 2), (4,), (7,))
Presence = Sequence[Sequence[bool]]
"""For each step whether each parameter has a gradient."""


def draws(seed: int, steps: int) -> tuple[list[Tensor], list[list[Tensor]], Presence]:
    generator = torch.Generator().manual_seed(seed)
    chance = random.Random(seed)
    first = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    grads = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]
    late = [chance.randrange(0, 6) for _ in SHAPES]
    always = chance.randrange(len(late) - 1)
    has = [
        [i == always or t == begin or (t > begin and chance.random() < 0.7) for i, begin in enumerate(late)]
        for t in range(steps)
    ]
    return first, grads, has


def model(
    first: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], has: Presence, rates: Sequence[float]
) -> list[Tensor]:
    """Algorithm 4 as ``prodigyopt`` has it: one d, and sums over the parameters that have a gradient and a rate above zero."""
    p, b1, b2, b3, d0 = [x.clone() for x in first], 0.9, 0.999, 0.999**0.5, 1e-3
    d, greatest, numerator, rate = d0, d0, 0.0, max(rates)
    m, v, s = ([torch.zeros_like(x) for x in first] for _ in range(3))
    for own, present in zip(grads, has, strict=True):
        here = [i for i, there in enumerate(present) if there and rates[i] > 0]
        if not here:
            continue
        numerator *= b3
        for i in here:
            numerator += d / d0 * d * rate * float((own[i] * (first[i] - p[i])).sum())
            s[i] = b3 * s[i] + d / d0 * d * rate * own[i]
            m[i] = b1 * m[i] + (1 - b1) * d * own[i]
            v[i] = b2 * v[i] + (1 - b2) * d * d * own[i] ** 2
        guess, before = numerator / sum(float(s[i].abs().sum()) for i in here), d
        greatest = max(greatest, guess)
        d = greatest
        for i in here:
            p[i] = p[i] - before * rate * m[i] / (v[i].sqrt() + d * 1e-8)
    return p


@pytest.mark.parametrize("seed", range(6))
def test_prodigy_has_one_estimate_over_groups_late_gradients_and_groups_at_a_rate_of_zero(seed: int) -> None:
    """The bound: an update is in proportion to the estimate, a quotient of sums of 20 elements; each of 20 steps adds its rounding."""
    first, grads, has = draws(seed, 20)
    rates = (50.0, 50.0, 50.0, 0.0 if seed % 2 else 50.0)
    parameters = [nn.Parameter(x.clone()) for x in first]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2]},
        {"params": parameters[2:3]},
        {"params": parameters[3:], "lr": rates[3]},
    ]
    unfreeze = -1
    if seed % 3 == 0:  # trained later: its state begins later, too
        unfreeze = next(t for t, present in enumerate(has) if present[1])
        parameters[1].requires_grad_(False)
    optimizer = et.create("prodigy", groups, lr=50.0, d0=1e-3, policy="FP64", compile=False)
    for t, (own, present) in enumerate(zip(grads, has, strict=True)):
        if t == unfreeze:
            parameters[1].requires_grad_(True)
        for parameter, grad, there in zip(parameters, own, present, strict=True):
            parameter.grad = grad.clone() if there else None
        optimizer.step()
    for parameter, expected in zip(parameters, model(first, grads, has, rates), strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=20 * 20 * 2**-52 * 50, atol=1e-11)


@pytest.mark.parametrize("seed", range(3))
def test_all_copies_of_the_estimate_are_equal_after_each_step_a_resume_and_a_new_group(seed: int) -> None:
    first, grads, has = draws(seed, 12)

    def made(values: Sequence[Tensor]) -> tuple[list[nn.Parameter], et.TorchOptimizer]:
        parameters = [nn.Parameter(x.clone()) for x in values]
        return parameters, et.create(
            "prodigy", [{"params": parameters[:1]}, {"params": parameters[1:3]}], lr=1.0, policy="FP64"
        )

    parameters, optimizer = made(first)
    estimates: set[float] = set()
    for t, (own, present) in enumerate(zip(grads, has, strict=True)):
        if t == 4:
            values, state = [p.detach() for p in parameters], optimizer.state_dict()
            last = parameters[3:]
            parameters, optimizer = made(values)
            parameters[3:] = [nn.Parameter(p.detach().clone()) for p in last]
            optimizer.load_state_dict(state)
            optimizer.add_param_group({"params": parameters[3:]})
        for parameter, grad, there in zip(parameters, own, present, strict=True):
            parameter.grad = grad.clone() if there else None
        optimizer.step()
        estimates = {
            float(value) for p in parameters for key, value in optimizer.state[p].items() if key == "inner.estimate"
        }
        assert len(estimates) == 1, estimates
    assert estimates != {1e-6}


def test_groups_whose_estimates_would_differ_are_refused_and_labels_give_each_part_its_own() -> None:
    def made(**other: Any) -> tuple[list[nn.Parameter], et.TorchOptimizer]:
        a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        return [a, b], et.create("prodigy", [{"params": [a]}, {"params": [b], **other}], lr=1.0, policy="FP32")

    for name, value in (("lr", 0.5), ("betas", (0.9, 0.99)), ("d_coef", 2.0)):
        parameters, optimizer = made(**{name: value})
        for p in parameters:
            p.grad = torch.ones_like(p)
        shown = "betas" if name == "betas" else name
        with pytest.raises(
            ValueError, match=rf"^TorchOptimizer, param group 1: {shown}: got .*param group 0 has .*one estimate"
        ):
            optimizer.step()
        assert not any(p.count_nonzero() for p in parameters)
    parameters, optimizer = made(weight_decay=0.5)  # no part of the estimate
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()

    a, b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    labelled = et.TorchOptimizer(
        [("a", a), ("b", b)],
        lambda learning_rate: eb.partition(
            {"a": eb.prodigy(learning_rate), "b": eb.prodigy(0.5)}, lambda path, _: "a" if "a" in path else "b"
        ),
        lr=1.0, policy="FP32", compile=False,
    )  # fmt: skip
    for _ in range(500):
        a.grad, b.grad = a.detach() - 3.0, b.detach() - 3.0
        labelled.step()
    assert math.isclose(float(a.detach()[0]), 3.0, abs_tol=0.1)
    assert math.isclose(float(b.detach()[0]), 3.0, abs_tol=0.1)


class Late(nn.Module):
    """Two matrices, of which the second is used from some step on."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(5, 4, generator=generator, dtype=torch.float64))

    def forward(self, step: int) -> Tensor:
        used = [self.first] + [self.second] * (step >= 4 and step != 7)
        return sum(((p - 3) ** 2).sum() for p in used)  # type: ignore[return-value]


def stepped(model: Late, optimizer: torch.optim.Optimizer) -> None:
    for step in range(12):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def on_ranks(strategy: Any) -> list[Tensor]:
    model = Late()
    if strategy == "fully_shard":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        stepped(model, et.create("prodigy", model, lr=1.0, d0=1e-2, policy="FP64", compile=False))
    else:
        stepper = et.FlatStepper(model, eb.prodigy(1.0, d0=1e-2), policy="FP64", strategy=strategy)
        for step in range(12):
            with stepper.microbatch(last=True):
                model(step).backward()
            stepper.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params", "fully_shard"])
def test_ranks_and_steppers_share_the_estimate_too(strategy: str) -> None:
    """All ranks have the same loss, so that sums are those of one process but for their order."""
    model = Late()
    optimizer = et.create("prodigy", model, lr=1.0, d0=1e-2, policy="FP64", compile=False)
    stepped(model, optimizer)
    assert float(optimizer.state[model.second]["inner.estimate"]) > 1e-2
    for found in run(2, on_ranks, strategy):
        for x, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(x, expected.detach(), rtol=1e-11, atol=1e-11)
