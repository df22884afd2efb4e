"""Every scheduler of torch drives our optimizers as it drives torch's, and none makes the compiled step compile again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import everybit as eb
from everybit_torch import SGD, AdamW, RMSprop, TorchOptimizer

pytestmark = [
    # Schedulers that are made of schedulers warn about themselves.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.optim.lr_scheduler"),
]

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=10),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.LinearLR(o, 0.5, 1.0, total_iters=3)]
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, total_iters=3), schedulers.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-3, anneal_epochs=4),
}


def test_no_scheduler_is_forgotten() -> None:
    known = {
        name for name, value in vars(schedulers).items()
        if isinstance(value, type) and issubclass(value, schedulers.LRScheduler) and not name.startswith("_")
    }  # fmt: skip
    assert known - {"LRScheduler"} <= set(SCHEDULERS)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def run(network: nn.Linear, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = network(torch.randn(4, 5, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    return [p.detach().clone() for p in network.parameters()]


PAIRS: list[tuple[type[TorchOptimizer], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"lr": 1e-2}),
    (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    # Without momentum, which some schedulers then bring.
    (SGD, torch.optim.SGD, {"lr": 1e-2}),
    (RMSprop, torch.optim.RMSprop, {"lr": 1e-2}),
]


COMPILED = {"AdamW": ("CyclicLR", "SequentialLR"), "SGD": ("OneCycleLR",), "RMSprop": ("SequentialLR",)}
"""Of these steps are compiled, which takes seconds: two that change momentum too, and one that changes how the rate is changed."""


@pytest.mark.parametrize("name", list(SCHEDULERS))
@pytest.mark.parametrize(("ours", "theirs", "arguments"), PAIRS)
def test_it_is_driven_as_torchs_is_and_compiled_once(
    name: str, ours: type[TorchOptimizer], theirs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiles = name in COMPILED[ours.__name__]
    graphs = int(compiles)
    mine, reference = model(), model()
    driven: Any = ours(mine.parameters(), compile=compiles, **arguments)
    scheduler = SCHEDULERS[name](driven)
    run(mine, driven, scheduler, steps=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    with torch.compiler.set_stance("fail_on_recompile"):
        got = run(mine, driven, scheduler)
    torchs = theirs(reference.parameters(), **arguments)
    torchs_scheduler = SCHEDULERS[name](torchs)
    run(reference, torchs, torchs_scheduler, steps=1)
    expected = run(reference, torchs, torchs_scheduler)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    for a, b in zip(got, expected, strict=True):
        # float64: ten steps that differ by rounding, 2**-53 relative each, leave 1e-12 four digits above what they add up to.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for key in ("lr", "betas" if ours is AdamW else "momentum"):
        assert driven.param_groups[0][key] == torchs.param_groups[0][key]
    # It did drive.
    assert driven.param_groups[0]["lr"] != 1e-2 or name in (
        "ConstantLR",
        "LinearLR",
        "ChainedScheduler",
        "CosineAnnealingWarmRestarts",
    )


def test_a_scheduler_resumes_with_the_optimizer() -> None:
    def make() -> tuple[nn.Linear, AdamW, Any]:
        network = model().float().bfloat16()
        optimizer = AdamW(network.parameters(), lr=1e-2, policy=eb.policies.LEAN_BF16)
        return network, optimizer, schedulers.OneCycleLR(optimizer, 1e-2, total_steps=12)

    def steps(network: nn.Linear, optimizer: AdamW, scheduler: Any, seeds: range) -> list[Tensor]:
        for seed in seeds:
            optimizer.zero_grad()
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()
            network(x).float().square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [p.detach().clone() for p in network.parameters()]

    network, optimizer, scheduler = make()
    steps(network, optimizer, scheduler, range(4))
    other, resumed, again = make()
    other.load_state_dict(network.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    again.load_state_dict(scheduler.state_dict())
    expected = steps(network, optimizer, scheduler, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(expected, steps(other, resumed, again, range(4, 8)), strict=True))
