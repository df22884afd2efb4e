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
from everybit.protocol import any_per_tensor, map_parts, transforms_in


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


@runtime_checkable
class HasRowBlocks(Protocol):
    """A transform that needs no whole matrix, but whole blocks of its rows of different sizes: queries, keys and values in one.

    It has no state, or one number for each element.
    """

    def row_blocks(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the rows of the blocks, one after the other, between which a parameter of this shape may be cut; empty: it may not be."""
        ...

    def of_row_blocks(self) -> Any:
        """Return the transform that does to a tensor of some neighbouring blocks what this one does to them in the parameter.

        Such a tensor has the shape ``(*ones, rows, *others)``, with a 1 for each block before them.
        """
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


def row_blocks(transform: object, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of the blocks between which a parameter of this shape may be cut, for a transform and all inside it.

    Returns:
        They may differ, and add up to the parameter's rows; empty if it may not be cut so.

    Raises:
        ValueError: A transform cannot see a parameter of this shape as it is told to.
    """
    parts = _parts_with_a_cut(transform)
    if not parts or not shape or any_per_tensor([transform]) or not all(isinstance(one, HasRowBlocks) for one in parts):
        return ()
    blocks: set[tuple[int, ...]] = {part.row_blocks(shape) for part in parts}
    # Blocks are told by their number: all have to mean the same.
    return blocks.pop() if len(blocks) == 1 else ()


def of_row_blocks(transform: Any) -> Any:
    """Return the transform that does to some neighbouring blocks of rows what this one does to them in the parameter."""
    changed = map_parts(of_row_blocks, transform)
    return changed.of_row_blocks() if isinstance(changed, HasRowBlocks) else changed


def of_atoms(transform: Any) -> Any:
    """Return the transform that does to tensors of shape ``(count, *part)`` what this one does to so many parts of a parameter."""
    changed = map_parts(of_atoms, transform)
    return changed.of_atoms() if isinstance(changed, HasAtoms) else changed


def _parts_with_a_cut(transform: object) -> list[Any]:
    combinators = (Chain, NamedChain, Masked, Partition)
    return [part for part in transforms_in(transform) if part.cut == "tensor" and not isinstance(part, combinators)]
