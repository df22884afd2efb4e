"""Whether a transform needs whole tensors, and what a step on one costs: by it parameters are distributed over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.protocol import transforms_in


def needs_whole_tensors(transform: object) -> bool:
    """Whether a transform, or one inside it, says that it must see whole tensors.

    Masks and labels do not count: a front end that decides them before cutting may cut as the transforms inside may be.
    """
    return any(
        node.cut == "tensor"
        for node in transforms_in(transform)
        if not isinstance(node, (Chain, NamedChain, Masked, Partition))
    )


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
