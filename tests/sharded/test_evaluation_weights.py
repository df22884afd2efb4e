"""Weights for evaluation of a sharded model are those of one process, bit for bit, and training goes on as if there had been none."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import everybit as eb
from everybit_torch import FlatStepper, TorchOptimizer, evaluation_weights
from everybit_torch.checkpoint.sharded import load_sharded, save_sharded
from everybit_torch.sharded.strategies import STRATEGIES
from tests.support.exact_models import weights_of
from tests.support.programs import Block, data, network
from tests.support.ranks import run

STEPS = 3


def averaged(learning_rate: Any = 1e-2) -> eb.Transform[Any]:
    return eb.chain(eb.adamw(learning_rate), eb.average_weights(0.5))


def loss(model: nn.Module, step: int) -> Tensor:
    """The same on every rank, so that the mean of two ranks' gradients is each of them."""
    found: Tensor = model(data(step, 0, 0, torch.bfloat16)).float().square().mean()
    return found


def whole() -> list[list[Tensor]]:
    """The model's outputs and weights for evaluation after each step, and its own weights after the last."""
    model = network(torch.bfloat16)
    optimizer = TorchOptimizer(model.parameters(), averaged, policy=eb.policies.LEAN_BF16, lr=1e-2, compile=False)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad(), evaluation_weights(optimizer):
            found.append([loss(model, step), *(p.detach().clone() for p in model.parameters())])
    return [*found, [p.detach().clone() for p in model.parameters()]]


def sharded(folder: str) -> list[str]:
    """What differs from one process, under every strategy."""
    expected, said = whole(), []
    for strategy in STRATEGIES:
        model = network(torch.bfloat16)
        stepper = FlatStepper(model, averaged(), policy=eb.policies.LEAN_BF16, strategy=strategy, units=[Block])
        where = strategy

        def weights(model: nn.Module = model) -> list[Tensor]:
            return list(weights_of(model).values())

        for step in range(STEPS):
            stepper.zero_grad()
            with stepper.microbatch(last=True):
                loss(model, step).backward()  # type: ignore[no-untyped-call]
            stepper.step()
            with torch.no_grad(), evaluation_weights(stepper):
                found = [loss(model, step), *weights()]
                for refused, words in (
                    (stepper.step, "inside evaluation_weights() the model has other weights; accepted is outside"),
                    (lambda: save_sharded(stepper, folder), "inside evaluation_weights() the model has other weights"),  # noqa: B023
                    (lambda: load_sharded(stepper, folder), "load_sharded: the model has its weights for evaluation"),  # noqa: B023
                ):
                    try:
                        refused()
                        said.append(f"{where}: nothing was refused")
                    except RuntimeError as error:
                        if words not in str(error):
                            said.append(f"{where}: {error}")
            if not all(torch.equal(a, b) for a, b in zip(found, expected[step], strict=True)):
                said.append(f"{where}: other weights for evaluation at step {step}")
        if not all(torch.equal(a, b) for a, b in zip(weights(), expected[STEPS], strict=True)):
            said.append(f"{where}: training went on otherwise")
        with suppress(KeyError), evaluation_weights(stepper):
            raise KeyError
        if not all(torch.equal(a, b) for a, b in zip(weights(), expected[STEPS], strict=True)):
            said.append(f"{where}: an error inside left other weights")
        with stepper.microbatch(last=True):
            loss(model, 0).backward()  # type: ignore[no-untyped-call]
            try:
                with evaluation_weights(stepper):
                    said.append(f"{where}: a cycle that is not over")
            except RuntimeError as error:
                if "accepted is after" not in str(error):
                    said.append(f"{where}: {error}")
        stepper.step()
        stepper.close()
    return said


def test_weights_for_evaluation_are_those_of_one_process(tmp_path: Path) -> None:
    assert run(2, sharded, str(tmp_path)) == [[], []]
