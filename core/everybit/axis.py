"""Reductions over everything that shares one optimizer step."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

P = TypeVar("P")


class Axis(Protocol):
    """Reductions over everything that shares one optimizer step: one process, or all shards of a model."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the axis; same shape and dtype."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """Return the maximum of ``value`` over the axis, element by element."""
        ...

    def owned(self, tree: P) -> P:
        """Return ``tree`` with every element that another process counts, or that is padding, set to zero."""
        ...


class Local:
    """The axis of a single process, over which a reduction returns its argument.

    The class itself is the axis, there are no instances: compilers trace a default that is a class, not one that is an object.
    """

    @staticmethod
    def sum(value: Tensor) -> Tensor:
        """Return ``value``: there is no other process."""
        return value

    @staticmethod
    def max(value: Tensor) -> Tensor:
        """Return ``value``: there is no other process."""
        return value

    @staticmethod
    def owned(tree: P) -> P:
        """Return ``tree``: this process counts all elements."""
        return tree
