"""Costs of steps, for distributing parameters over processes. A transform that declares no cost costs its elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from everybit.protocol import transforms_in


@runtime_checkable
class HasStepCost(Protocol):
    """A transform with a step that costs more than a few operations for each element."""

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step on a parameter of this shape."""
        ...


def step_cost(transform: object, shape: Sequence[int]) -> float:
    """Return the cost of a step on a parameter of this shape: 1 for each element, and the multiply-adds that transforms inside declare."""
    declared = [part for part in transforms_in(transform) if isinstance(part, HasStepCost)]
    return math.prod(shape) + sum(part.step_cost(shape) for part in declared)
