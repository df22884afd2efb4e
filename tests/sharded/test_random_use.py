"""Parameters that are used at random have counts of steps of their own, through checkpoints as well."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import TorchOptimizer
from everybit_torch.checkpoint.sharded import load_sharded, save_sharded
from everybit_torch.sharded.stepper import FlatStepper

EXPERTS, FIRING = 64, 8


class Mixture(nn.Module):
    """Experts between two layers; each has two parameters."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.entry = nn.Linear(2, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(experts))
        self.exit = nn.Linear(3, 1)

    def forward(self, x: Tensor, firing: list[int]) -> Tensor:
        x = self.entry(x)
        x = x + sum(torch.tanh(self.experts[number](x)) for number in firing)
        out: Tensor = self.exit(x)
        return out


def train(stepper: FlatStepper, model: Mixture, firing: list[int], step: int) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
    with stepper.microbatch(last=True):
        model(x, firing).square().mean().backward()
    stepper.step()


POLICIES: dict[str, tuple[eb.Policy | None, torch.dtype]] = {
    "FP32": (None, torch.float32),
    "LEAN_BF16": (eb.policies.LEAN_BF16, torch.bfloat16),
    "EXACT_BF16": (eb.policies.EXACT_BF16, torch.bfloat16),
}
TRANSFORMS: dict[str, Any] = {
    "adamw": lambda learning_rate: eb.adamw(learning_rate, weight_decay=0.1),
    "accumulated": lambda learning_rate: eb.accumulate(eb.adamw(learning_rate), every=2),
    "guarded": lambda learning_rate: eb.apply_if_finite(eb.lion(learning_rate)),
    "sgd": lambda learning_rate: eb.sgd(learning_rate),
}


# Each transform and each policy.
SAMPLED = [("LEAN_BF16", "adamw"), ("LEAN_BF16", "accumulated"), ("EXACT_BF16", "guarded"), ("FP32", "sgd")]


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *SAMPLED,
        *(
            pytest.param(name, transform, marks=pytest.mark.exhaustive)
            for name in POLICIES
            for transform in TRANSFORMS
            if (name, transform) not in SAMPLED
        ),
    ],
)
@pytest.mark.sampled(4)
def test_joined_and_cut_the_weights_are_those_of_tensors_stepped_one_by_one(
    name: str, transform: str, tmp_path: Any
) -> None:
    """Bit for bit, also after a checkpoint is loaded in the middle."""
    policy, dtype = POLICIES[name]
    torch.manual_seed(1)
    mine, theirs = Mixture(7).to(dtype), Mixture(7).to(dtype)
    theirs.load_state_dict(mine.state_dict())
    stepper = FlatStepper(mine, TRANSFORMS[transform](1e-2), policy=policy)
    reference = TorchOptimizer(theirs.parameters(), TRANSFORMS[transform], lr=1e-2, policy=policy, compile=False)
    chosen = random.Random(2)
    for step in range(40):
        firing = list(range(7)) if step % 5 == 4 else sorted(chosen.sample(range(7), 1 + step % 5))
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step)).to(dtype)
        reference.zero_grad()
        with stepper.microbatch(last=True):
            mine(x, firing).float().square().mean().backward()
        theirs(x, firing).float().square().mean().backward()
        stepper.step()
        reference.step()
        if step == 20:
            save_sharded(stepper, tmp_path)
            load_sharded(stepper, tmp_path)
        for (key, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), (step, key)
