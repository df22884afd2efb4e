"""The main law of the torch optimizer: in a random life it is torch's, and what carries it about changes no bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import everybit as eb
from everybit_torch import SGD, Adafactor, Adagrad, TorchOptimizer
from everybit_torch.segments import segment, short
from tests.support.closed_optim import PAIRS, wide_numbers
from tests.support.random_lives import Life, lives, maker

TOGETHER = 40
"""Lives of one test."""

GROUPS = 25
"""Of these `make test` has the first, and `make exhaustive` all."""

every_group = pytest.mark.parametrize(
    "group", [pytest.param(group, marks=() if group == 0 else pytest.mark.exhaustive) for group in range(GROUPS)]
)

# torch's Adafactor divides by the number of elements, which may be 0. Its Adagrad has sums before the first step; what is written to them
# counts where they do not begin with 0.
KINDS = [one for one in PAIRS if one[0] is not Adafactor and "initial_accumulator_value" not in one[2]]


def takes_later_parameters() -> bool:
    """Whether torch's Adagrad steps a parameter that is added to it; that of torch 2.11 has no state for it."""
    x, y = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adagrad([x])
    optimizer.add_param_group({"params": [y]})
    y.grad = torch.ones(2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


@every_group
@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient any more")
def test_it_is_torchs(group: int) -> None:
    """In float64, where a life of 20 steps differs by rounding."""
    kinds = [one for one in KINDS if one[0] is not Adagrad or takes_later_parameters()]
    with wide_numbers():
        for seed in range(group * TOGETHER, (group + 1) * TOGETHER):
            is_torchs(seed, *random.Random(seed).choice(kinds))


def is_torchs(
    seed: int, kind: type[TorchOptimizer], torchs: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    """Compare an optimizer with torch's, in the life of a seed."""

    def theirs(groups: Any) -> torch.optim.Optimizer:
        return torchs(groups, **arguments)

    def ours(groups: Any) -> TorchOptimizer:
        return kind(groups, **arguments, compile=False)

    for number, (life, other, happened) in enumerate(lives(seed, theirs, ours, torch.float64)):
        for a, b in zip(life.model, other.model, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9), (seed, kind, happened)
        # torch's SGD without momentum keeps nothing that says how many steps there were.
        if number % 7 == 6 and (kind is not SGD or "momentum" in arguments):
            other.optimizer = other.again()
            other.optimizer.load_torch_state_dict(life.optimizer.state_dict())


POLICIES: tuple[eb.PolicyName, ...] = (
    "FP32", "LEAN_BF16", "KAHAN_BF16", "EXACT_BF16", "FLOOR_BF16", "TIGHT_BF16", "MIXED_BF16", "LEAN_8BIT",
)  # fmt: skip


@every_group
@pytest.mark.filterwarnings("ignore:.*no parameter has a gradient any more")
def test_what_carries_it_about_changes_no_bit(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it matter which parameters are stepped together, nor in which pieces."""
    steps = 0
    for seed in range(group * TOGETHER, (group + 1) * TOGETHER):
        draw = random.Random(seed)
        name, policy, clips = draw.choice([*eb.optimizers()]), draw.choice(POLICIES), draw.random() < 0.25
        dtype = torch.float32 if policy == "FP32" else torch.bfloat16
        make, (together, piece) = (
            maker(name, policy, clips),
            (draw.choice([0, 10, 1 << 16]), draw.choice([32, 1 << 18])),
        )
        if is_refused(seed, make, dtype):
            continue

        def carried(groups: Any, make: Any = make, together: int = together) -> TorchOptimizer:
            monkeypatch.setattr(short, "SHORT", together)
            return make(groups)  # type: ignore[no-any-return]

        monkeypatch.setattr(segment, "PIECE", piece)
        reduces = eb.optimizers()[name].reductions != "none" or clips
        for life, other, happened in lives(seed, make, carried, dtype, pickles=not clips, releases=not reduces):
            steps += 1
            for a, b in zip(life.model, other.model, strict=True):
                assert torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()), (seed, name, policy, happened)
    assert steps > 5 * TOGETHER  # few lives are refused


def is_refused(seed: int, make: Any, dtype: torch.dtype) -> bool:
    """Whether an optimizer cannot step such a model: it has no matrix, or the policy cannot store it."""
    try:
        model = Life.begin(seed, lambda groups: groups, dtype).model
        make([{"params": [*model.named_parameters()]}]).prepare()
    except (TypeError, ValueError):
        return True
    return False
