"""Steppers on the flat buffers of room ``flat``, which :class:`FlatStepper` does not use yet."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import nn

import everybit as eb
from everybit_torch import FlatStepper
from everybit_torch.flat.judging import judge
from everybit_torch.flat.stepper import BufferStepper
from everybit_torch.sharded import stepper as steppers
from tests.support.exact_models import Cell


def flat_stepper(model: nn.Module, transform: eb.Transform[Any], **others: Any) -> FlatStepper:
    """The stepper that there will be."""

    def made(model: nn.Module, _: Any, judged: Any) -> BufferStepper:
        return BufferStepper(model, judged)

    given: dict[str, Any] = {"units": [Cell], "divisor": 1.0} | others
    with patch.object(steppers, "BufferStepper", made), patch.object(steppers, "judge", judge):
        return FlatStepper(model, transform, **given)
