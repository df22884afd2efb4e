"""Parameters that are frozen in the middle of a sharded run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import everybit as eb
from everybit_torch import AdamW, freeze, unfreeze
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.strategies import Strategy
from tests.support.exact_models import whole_of
from tests.support.ranks import run
from tests.support.weights import Weights, equal


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.body(x)))
        return out


def weights(stepper: FlatStepper, model: Model) -> Weights:
    return {name: whole_of(p).clone() for name, p in model.named_parameters()}


def frozen_for_a_while(strategy: Strategy) -> list[Weights]:
    """The weights before, after two steps with a frozen body, and after another one; both ranks have the same data."""
    model = Model().bfloat16()
    stepper = FlatStepper(
        model, eb.adamw(0.05, weight_decay=0.5), policy="LEAN_BF16", strategy=strategy, units=[nn.Linear]
    )
    found = []
    torch.manual_seed(1)
    inputs = torch.randn(8, 5).bfloat16()

    def step() -> tuple[str, ...]:
        stepper.zero_grad()
        with stepper.microbatch(last=True):
            (model(inputs).float() - 1).square().mean().backward()
        return stepper.step().untouched

    for _ in range(2):
        assert step() == ()
    found.append(weights(stepper, model))
    names = freeze(model, "body.*")
    for _ in range(2):
        assert set(step()) == set(names) == {"body.weight", "body.bias"}
    found.append(weights(stepper, model))
    unfreeze(model)
    assert step() == ()
    found.append(weights(stepper, model))
    stepper.close()
    return found


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_frozen_parameters_keep_their_bits_on_all_ranks(strategy: Strategy) -> None:
    both = run(2, frozen_for_a_while, strategy)
    for before, during, after in both:
        for name in before:
            assert torch.equal(before[name], during[name]) == name.startswith("body"), name
            assert not torch.equal(during[name], after[name]), name
    for mine, theirs in zip(*both, strict=True):
        assert equal(mine, theirs)


def test_one_process_is_followed_bit_for_bit() -> None:
    """A sharded run that freezes has the weights of a ``TorchOptimizer`` that does."""
    model = Model().bfloat16()
    optimizer = AdamW(model.parameters(), lr=0.05, weight_decay=0.5, policy="LEAN_BF16")
    torch.manual_seed(1)
    inputs = torch.randn(8, 5).bfloat16()
    for number in range(5):
        if number == 2:
            freeze(model, "body.*")
        if number == 4:
            unfreeze(model)
        optimizer.zero_grad()
        (model(inputs).float() - 1).square().mean().backward()
        optimizer.step()
    sharded = run(2, frozen_for_a_while, "optim_grads_params")[0][-1]
    assert equal(sharded, {name: p.detach() for name, p in model.named_parameters()})
