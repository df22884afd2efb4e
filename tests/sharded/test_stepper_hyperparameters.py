"""Hyperparameters by name: what a param group shows is what a step uses, whatever the fields of a transform are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest
import torch
from torch import Tensor, nn

import everybit as eb
from everybit.base import Hyperparameter
from everybit.protocol import ALONE
from everybit_torch import FlatStepper, TorchOptimizer

P = TypeVar("P")


def value_of(hyperparameter: Hyperparameter) -> float | Tensor:
    assert isinstance(hyperparameter, (float, Tensor))
    return hyperparameter


@dataclass(frozen=True, slots=True)
class Descend:
    """Steps by ``-(lr + 10 alpha + 100 decay + 1000 learning_rate)`` for each unit of the gradient; fields that nobody sets are zero."""

    lr: Hyperparameter = 0.0
    alpha: Hyperparameter = 0.0
    decay: Hyperparameter = 0.0
    learning_rate: Hyperparameter = 0.0

    @property
    def cut(self) -> Literal["element"]:
        return "element"

    @property
    def reduces(self) -> bool:
        return False

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        lr, alpha, decay, learning_rate = (value_of(x) for x in (self.lr, self.alpha, self.decay, self.learning_rate))
        rate = lr + 10 * alpha + 100 * decay + 1000 * learning_rate
        return eb.tree.map(lambda g: -rate * g, updates), state


def at_zero() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def moved(model: nn.Linear, optimizer: Any, step: Any) -> float:
    """How far a gradient of one moves the weight."""
    before = float(model.weight.detach())
    model(torch.ones(1, 1)).sum().backward()
    step()
    optimizer.zero_grad()
    return before - float(model.weight.detach())


@pytest.mark.parametrize(("name", "scale"), [("lr", 1), ("alpha", 10), ("decay", 100), ("learning_rate", 1000)])
def test_a_field_is_shown_and_set_by_its_own_name(name: str, scale: int) -> None:
    """Also one that is called what torch calls another, or that torch's name would be taken for."""
    model = at_zero()
    stepper = FlatStepper(model, Descend())
    optimizer = stepper.as_optimizer()
    (group,) = optimizer.param_groups
    assert {"lr", "alpha", "decay", "learning_rate"} <= set(group)
    group[name] = 0.5
    assert moved(model, optimizer, optimizer.step) == pytest.approx(0.5 * scale)
    group[name] = 0.25
    assert moved(model, optimizer, optimizer.step) == pytest.approx(0.25 * scale)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiplies by ``alpha``, a field that torch calls RMSprop's decay."""

    alpha: Hyperparameter

    @property
    def cut(self) -> Literal["element"]:
        return "element"

    @property
    def reduces(self) -> bool:
        return False

    def init(self, params: P) -> Any:
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        return eb.tree.map(lambda g: g * value_of(self.alpha), updates), state


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.sampled(2)
def test_torchs_name_of_another_optimizers_hyperparameter_may_be_a_fields(compile: bool) -> None:
    model = at_zero()
    stepper = FlatStepper(model, eb.chain(Scaled(2.0), eb.sgd(1.0)), compile=compile)
    optimizer = stepper.as_optimizer()
    (group,) = optimizer.param_groups
    assert (group["alpha"], group["lr"]) == (2.0, 1.0)
    assert moved(model, optimizer, optimizer.step) == 2.0
    group["alpha"], group["lr"] = 3.0, 0.5
    assert moved(model, optimizer, optimizer.step) == 1.5


def test_a_factorys_own_arguments_are_called_what_they_are() -> None:
    """``lr`` and ``alpha`` in a signature; ``lr`` and ``betas`` for a factory with the core's names."""
    model = at_zero()

    def own(lr: float, alpha: float) -> eb.Transform[Any]:
        return eb.chain(Scaled(alpha), eb.sgd(lr))

    optimizer = TorchOptimizer(model.parameters(), own, lr=1.0, alpha=2.0)
    assert moved(model, optimizer, optimizer.step) == 2.0
    optimizer.param_groups[0]["alpha"] = 3.0
    assert moved(model, optimizer, optimizer.step) == 3.0
    adam = TorchOptimizer(model.parameters(), eb.adamw, lr=0.125, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0)
    assert moved(model, adam, adam.step) == 0.125
    rms = TorchOptimizer(model.parameters(), eb.rmsprop, lr=0.125, alpha=0.0, eps=0.0)
    assert moved(model, rms, rms.step) == 0.125


def test_labels_with_other_hyperparameters_keep_them_apart() -> None:
    model = nn.Linear(1, 1)
    stepper = FlatStepper(
        model,
        {"weight": eb.chain(Scaled(2.0), eb.sgd(1.0)), "bias": eb.sgd(0.25)},
        labels=lambda name, p: name,
    )
    groups = {group["label"].split(",")[0]: group for group in stepper.as_optimizer().param_groups}
    assert groups["weight"]["alpha"] == 2.0
    assert groups["bias"]["alpha"] is None
    groups["weight"]["alpha"] = 4.0
    before = [p.detach().clone() for p in (model.weight, model.bias)]
    model(torch.ones(1, 1)).sum().backward()
    stepper.step()
    after: list[Tensor] = [model.weight.detach(), model.bias.detach()]
    assert [float((a - b).abs().max()) for a, b in zip(before, after, strict=True)] == pytest.approx(
        [4.0, 0.25], rel=1e-6
    )


def test_a_hyperparameter_that_is_taken_away_is_refused() -> None:
    """Not silently what it was."""
    model = at_zero()
    stepper = FlatStepper(model, eb.sgd(1.0))
    stepper.as_optimizer().param_groups[0]["lr"] = None
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises((TypeError, ValueError), match="lr: got None"):
        stepper.step()
