"""What transforms say to those who distribute parameters over processes: what a step costs, and into which parts a parameter may be cut.

Both are optional. Of a transform that says nothing a step costs what its elements cost, and one whose cut is ``"tensor"`` needs each
parameter in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.parts import map_parts, transforms_in
from everybit.transform import any_per_tensor


@runtime_checkable
class HasStepCost(Protocol):
    """A transform whose step costs more than a number of operations for each element."""

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step on a parameter of this shape."""
        ...


@runtime_checkable
class HasAtoms(Protocol):
    """A transform whose cut is ``"tensor"``, and which needs no whole parameter, but whole parts of it: heads, or experts.

    It has no state, or one number for each element.
    """

    def atoms(self, shape: Sequence[int]) -> int:
        """Return the number of equal parts, one after the other, that a parameter of this shape may be cut into; 1: it may not be cut."""
        ...

    def of_atoms(self) -> Any:
        """Return the transform that does to a tensor of shape ``(count, *part)`` what this one does to so many parts."""
        ...


def step_cost(transform: object, shape: Sequence[int]) -> float:
    """Return what a step on a parameter of this shape costs: one for each element, and the multiply-adds that transforms inside declare."""
    declared = [part for part in transforms_in(transform) if isinstance(part, HasStepCost)]
    return math.prod(shape) + sum(part.step_cost(shape) for part in declared)


def atoms(transform: object, shape: Sequence[int]) -> int:
    """Return the number of equal parts that a parameter of this shape may be cut into, for a transform and all inside it.

    Raises:
        ValueError: A transform cannot see a parameter of this shape as it is told to.
    """
    parts = _parts_with_a_cut(transform)
    if not parts or not shape or any_per_tensor([transform]) or not all(isinstance(part, HasAtoms) for part in parts):
        return 1
    # Cuts that all of them allow.
    return math.gcd(*(part.atoms(shape) for part in parts))


def of_atoms(transform: Any) -> Any:
    """Return the transform that does to tensors of shape ``(count, *part)`` what this one does to so many parts of a parameter."""
    changed = map_parts(of_atoms, transform)
    return changed.of_atoms() if isinstance(changed, HasAtoms) else changed


def _parts_with_a_cut(transform: object) -> list[Any]:
    combinators = (Chain, NamedChain, Masked, Partition)
    return [part for part in transforms_in(transform) if part.cut == "tensor" and not isinstance(part, combinators)]
