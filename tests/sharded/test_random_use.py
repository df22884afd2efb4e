"""Parameters that are used at random: steps are cut into as many parts as counts of steps need, and into no more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.protocol import ALONE, Context, Cut
from everybit_torch import TorchOptimizer
from everybit_torch.sharded.checkpoint import load_sharded, save_sharded
from everybit_torch.sharded.stepper import FlatStepper
from tests.support.programs import on_buffers

EXPERTS, FIRING = 64, 8


@dataclass(frozen=True)
class Counting:
    """Counts how often it is run: once for each unit that is stepped."""

    calls: list[int] = field(default_factory=lambda: [0], compare=False)
    cut: ClassVar[Cut] = "element"
    reduces: ClassVar[bool] = False

    def init(self, params: Any) -> tuple[()]:
        return ()

    def update(self, updates: Any, state: tuple[()], params: Any, ctx: Context = ALONE) -> tuple[Any, tuple[()]]:
        self.calls[0] += 1
        return updates, state


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


def runs(flags: list[Any]) -> int:
    """How many runs of equal values there are."""
    return 1 + sum(int(a != b) for a, b in pairwise(flags))


def train(stepper: FlatStepper, model: Mixture, firing: list[int], step: int) -> None:
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
    with stepper.microbatch(last=True):
        model(x, firing).square().mean().backward()
    stepper.step()


@pytest.mark.parametrize("last", [300, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_a_step_of_64_experts_of_which_8_fire_has_as_many_parts_at_its_last_step_as_at_step_10(last: int) -> None:
    torch.manual_seed(0)
    counting = Counting()
    model = Mixture()
    stepper = FlatStepper(model, eb.chain(counting, eb.scale_by_adam(), eb.scale_by_learning_rate(1e-3)))
    chosen = random.Random(0)
    steps = [0] * EXPERTS
    most: dict[int, int] = {}
    for step in range(1, last + 1):
        firing = sorted(chosen.sample(range(EXPERTS), FIRING))
        counting.calls[0] = 0
        train(stepper, model, firing, step)
        steps = [count + (number in firing) for number, count in enumerate(steps)]
        most[step] = counting.calls[0]
        # Experts that fire, each by itself at most, and what comes before and after them.
        assert counting.calls[0] <= FIRING + 2
    early, late = (sum(most[step] for step in range(start, start + 10)) for start in (10, last - 9))
    assert late <= early + 10 * 2  # neighbours that fire together had one count more often at the beginning
    counting.calls[0] = 0
    train(stepper, model, list(range(EXPERTS)), last + 1)
    # Neighbours with one count are one part; the outer layers have taken part in each of the steps.
    assert counting.calls[0] == runs([last + 1, *(count + 1 for count in steps), last + 1])


def test_after_steps_in_which_the_others_fired_all_is_one_part_again() -> None:
    counting = Counting()
    model = Mixture(6)
    stepper = FlatStepper(model, eb.chain(counting, eb.scale_by_adam(), eb.scale_by_learning_rate(1e-3)))
    calls: list[int] = []
    # Each expert misses one step of two; then all have taken part equally often, but for the outer layers.
    for firing in ([0, 2, 4], [1, 3, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
        counting.calls[0] = 0
        train(stepper, model, firing, len(calls))
        calls.append(counting.calls[0])
    assert calls == [4, 5, 3, 3]
    assert [len(one) for one in on_buffers(stepper).as_optimizer().runs()] == [3]


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
