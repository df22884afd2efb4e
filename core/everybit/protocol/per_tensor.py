"""Sums over each parameter: one float64 number for each leaf, and the number of its elements.

A transform that needs one number of each parameter, such as a trust ratio, may still be cut anywhere: it requests the number, computes with
numbers, and lets ``ctx.per_tensor.expand`` give each element that of its parameter. Where leaves are slices of parameters, the driver adds
up those of one parameter.

*Numbers* are a tree of the parameters' structure, with a vector of one float64 number in the place of each leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import barriers, tree
from everybit.protocol.requests import Owned, Request

P = TypeVar("P")
A = TypeVar("A")


@dataclass(frozen=True)
class Numbers(Request[A]):
    """Sums over the elements of each leaf; made by the methods of :class:`PerTensor`.

    Attributes:
        trees: Trees of the parameters' structure and shapes, which are reduced together.
        squares: Whether squares are summed.
        finish: A function from the numbers of elements and the sums of each tree, as numbers, to the result.
    """

    each: ClassVar[bool] = True
    trees: tuple[Any, ...]
    squares: bool
    finish: Callable[..., A]

    def here(self) -> A:
        """Return the result for leaves that are whole parameters."""
        sums = (tree.map(lambda x: self._sum(x).reshape(1), values) for values in self.trees)
        return self.finish(tree.map(_size, self.trees[0]), *sums)

    def partial(self, owned: Owned) -> Tensor:
        """Return the sums of each tree and the numbers of elements: float64, of shape (trees + 1, leaves)."""
        leaves = [tree.leaves(owned(values)) for values in self.trees]
        rows = [*([self._sum(x) for x in of_one] for of_one in leaves), [_size(x)[0] for x in leaves[0]]]
        return torch.stack([torch.stack(row) if row else torch.empty(0, dtype=torch.float64) for row in rows])

    def answer(self, total: Tensor) -> A:
        """Return the result, given the total over the slices of each parameter."""
        *sums, sizes = (
            tree.replace(self.trees[0], [number.reshape(1) for number in row.unbind()]) for row in total.unbind()
        )
        return self.finish(sizes, *sums)

    def _sum(self, x: Tensor) -> Tensor:
        return barriers.sum_of_squares(x) if self.squares else barriers.sum(x.double())


class PerTensor:
    """Requests for numbers of each whole parameter, for transforms with ``per_tensor = True``: ``ctx.per_tensor``.

    Sums are taken in float64, so that those of slices add up to that of the whole but for a float64's last bits. All processes that share
    the step make the same requests, in the same order.
    """

    def sum(self, values: P) -> Request[P]:
        """The sum of each parameter's elements, as numbers."""
        return Numbers((values,), False, lambda _, sums: sums)

    def sum_and_size(self, values: P) -> Request[tuple[P, P]]:
        """The sum of each parameter's elements, and how many there are, wherever they are; both as numbers."""
        return Numbers((values,), False, lambda sizes, sums: (sums, sizes))

    def sum_of_squares(self, values: P) -> Request[P]:
        """The sum of the squares of each parameter's elements, as numbers."""
        return Numbers((values,), True, lambda _, squares: squares)

    def norm(self, values: P) -> Request[P]:
        """The Euclidean norm of each parameter's elements, as numbers."""
        return Numbers((values,), True, lambda _, squares: _roots(squares))

    def norms(self, *trees: P) -> Request[tuple[P, ...]]:
        """:meth:`norm` of each of several trees of the same structure, found by one reduction of all of them."""
        return Numbers(trees, True, lambda _, *squares: tuple(map(_roots, squares)))

    def mean(self, values: P) -> Request[P]:
        """The mean of each parameter's elements, as numbers; 0 of a parameter without elements."""
        return Numbers((values,), False, lambda sizes, sums: tree.map(_divided, sums, sizes))

    def mean_of_squares(self, values: P) -> Request[P]:
        """The mean of the squares of each parameter's elements, as numbers; 0 of a parameter without elements."""
        return Numbers((values,), True, lambda sizes, squares: tree.map(_divided, squares, sizes))

    def expand(self, numbers: P, like: P) -> P:
        """Give each element its parameter's number, in the dtype of ``like``.

        Args:
            numbers: A number for each parameter, from a request or computed from such numbers.
            like: A tree of the parameters' structure and shapes.

        Returns:
            A tree of tensors that broadcast against those of ``like``.

        Raises:
            ValueError: A leaf of ``numbers`` that is not one number.
        """
        return tree.map(_broadcast, numbers, like)


def _size(x: Tensor) -> Tensor:
    return torch.full((1,), x.numel(), dtype=torch.float64, device=x.device)


def _roots(squares: P) -> P:
    return tree.map(barriers.sqrt, squares)


def _divided(total: Tensor, size: Tensor) -> Tensor:
    return total / size.clamp(min=1)


def _broadcast(numbers: Tensor, like: Tensor) -> Tensor:
    if numbers.shape != (1,):
        raise ValueError(
            f"ctx.per_tensor.expand: got numbers of shape {tuple(numbers.shape)}; accepted is one for each parameter, (1,)."
        )
    return barriers.materialize(numbers.to(like.dtype)).reshape((1,) * like.ndim)
