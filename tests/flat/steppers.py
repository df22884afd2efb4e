"""Steppers of the models in tests, whose gradients are sums."""

from __future__ import annotations

from typing import Any

from torch import nn

import everybit as eb
from everybit_torch import FlatStepper
from tests.support.exact_models import Cell


def flat_stepper(model: nn.Module, transform: eb.Transform[Any], **others: Any) -> FlatStepper:
    """A stepper with a unit for each cell."""
    given: dict[str, Any] = {"units": [Cell], "divisor": 1.0} | others
    return FlatStepper(model, transform, **given)
