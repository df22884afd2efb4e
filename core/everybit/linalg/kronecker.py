r"""Preconditioners with a small matrix for each dimension of a parameter, :math:`L \otimes R` for a matrix, and the products with them.

A slot holds the small matrices of a parameter as factors by name: ``{"along0": L, "along1": R}``, without elements for a dimension that has
matrix. If a view makes several matrices of a parameter, each has its own, in ``"block0_along0"`` and so on, or in leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from everybit.base import Options, Rows, Scalar, mean, require_each, sqrt
from everybit.linalg.operations import product
from everybit.linalg.views import MatrixView

Sides = Literal["all", "smaller"]
"""Which dimensions have a matrix: all, or of each matrix the shorter side alone."""


class Block(NamedTuple):
    """One of the tensors that a parameter is seen as.

    Attributes:
        shape: The block's shape, leading dimensions of a batch first.
        batch: How many of these.
        names: The name of its matrix for each other dimension.
        has: Whether each of these dimensions has a matrix.
    """

    shape: tuple[int, ...]
    batch: int
    names: tuple[str, ...]
    has: tuple[bool, ...]

    @property
    def dimensions(self) -> Iterator[tuple[int, str]]:
        """Those that have a matrix, each with its name."""
        return ((dim, name) for dim, (name, has) in enumerate(zip(self.names, self.has, strict=True)) if has)


@dataclass(frozen=True, slots=True)
class Kronecker(Options):
    """The dimensions of parameters with a matrix in a preconditioner.

    Attributes:
        view: How parameters of two dimensions or more become matrices; None: they stay tensors, with a matrix for each dimension.
        max_dimension: The length of the longest dimension with a matrix.
        merge: Without a view, join neighbouring dimensions as long as their product is at most ``max_dimension``.
        sides: Which dimensions have a matrix otherwise.
        vectors: Whether vectors have one.
    """

    view: MatrixView | None = None
    max_dimension: Rows = 10000
    merge: bool = False
    sides: Sides = "all"
    vectors: bool = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.view is not None and self.merge:
            raise ValueError(
                "merge: got True with a view, which says what the dimensions are; accepted is one of both."
            )

    def blocks(self, shape: Sequence[int]) -> tuple[Block, ...]:
        """The tensors that a parameter of this shape is seen as.

        Raises:
            ValueError: The view does not fit the shape.
        """
        if len(shape) < 2 or not math.prod(shape):
            has = len(shape) == 1 and self.vectors and 0 < shape[0] <= self.max_dimension
            return (Block(tuple(shape), 0, _names(len(shape)), (has,) * len(shape)),)
        if self.view is None:
            return (self._block(_merged(shape, self.max_dimension) if self.merge else tuple(shape), 0, ""),)
        shapes = self.view.shapes(shape)
        prefixes = [""] if len(shapes) == 1 else [f"block{index}_" for index in range(len(shapes))]
        return tuple(self._block(one, len(one) - 2, prefix) for one, prefix in zip(shapes, prefixes, strict=True))

    def step_cost(self, shape: Sequence[int], *, products: float, cubes: float) -> float:
        """Return the multiply-adds of a step on a parameter of this shape, for :mod:`everybit.combinators.whole_tensors`.

        Args:
            shape: The parameter's shape.
            products: Products of the parameter with each of its matrices, on average in a step.
            cubes: Multiply-adds for each matrix of n rows beside that, over ``n**3``, on average in a step.

        Raises:
            ValueError: The view does not fit the shape.
        """
        total = 0.0
        for block in self.blocks(shape):
            numel, batch = math.prod(block.shape), math.prod(block.shape[: block.batch])
            for dim, _ in block.dimensions:
                rows = block.shape[block.batch + dim]
                total += products * rows * numel + cubes * batch * rows**3
        return total

    def split(self, x: Tensor) -> list[Tensor]:
        """Split a parameter, or a tensor of its shape, into the tensors of :meth:`blocks`."""
        if self.view is None or x.ndim < 2 or not x.numel():
            (block,) = self.blocks(x.shape)
            return [x.reshape(block.shape)]
        return self.view.split(x)

    def joined(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Join the parts of :meth:`split` into a tensor of this shape."""
        if self.view is None or len(shape) < 2 or not math.prod(shape):
            return parts[0].reshape(tuple(shape))
        return self.view.joined(parts, shape)

    def made(self, like: Tensor, make: Callable[[tuple[int, ...], int], Tensor]) -> dict[str, Tensor]:
        """Return factors of a parameter: ``make(batch, size)`` for each matrix, and an empty tensor for a dimension without matrix."""
        nothing = {"along0": like.new_zeros(0)}
        found: dict[str, Tensor] = {}
        for block in self.blocks(like.shape):
            batch, sizes = block.shape[: block.batch], block.shape[block.batch :]
            for name, size, has in zip(block.names, sizes, block.has, strict=True):
                found[name] = make(batch, size) if has else like.new_zeros(0)
        return found or nothing

    def zeros(self, like: Tensor) -> dict[str, Tensor]:
        """Matrices of zeros."""
        return self.made(like, lambda batch, size: like.new_zeros(*batch, size, size))

    def identities(self, like: Tensor, size: float = 1.0) -> dict[str, Tensor]:
        """Identity matrices, times a number."""

        def one(batch: tuple[int, ...], rows: int) -> Tensor:
            unit = torch.eye(rows, dtype=like.dtype, device=like.device) * size
            return unit.expand(*batch, rows, rows).clone()

        return self.made(like, one)

    def mapped(
        self, function: Callable[..., Tensor], factors: Mapping[str, Tensor], *others: Mapping[str, Tensor]
    ) -> Any:
        """Apply ``function`` to the matrices of a parameter; empty tensors are kept as they are."""
        return {
            name: function(one, *(other[name] for other in others)) if one.numel() else one.clone()
            for name, one in factors.items()
        }

    def multiplied(self, x: Tensor, factors: Mapping[str, Tensor], *, transposed: bool = False) -> Tensor:
        r"""Multiply a parameter, or a tensor of its shape, by its matrices along each dimension that has a matrix: :math:`A G B^\top`."""
        parts = []
        for part, block in zip(self.split(x), self.blocks(x.shape), strict=True):
            for dim, name in block.dimensions:
                part = times(part, factors[name].mT if transposed else factors[name], dim, block.batch)
            parts.append(part)
        return self.joined(parts, x.shape)

    def products(
        self, x: Tensor, seen: Callable[[Tensor, Block, int], Tensor] = lambda part, _block, _dim: part
    ) -> dict[str, Tensor]:
        """The products of a parameter's slices along each dimension that has a matrix, as factors.

        Args:
            x: The parameter, or a tensor of its shape.
            seen: A function of a part, its block and a dimension to the matrix that gives the products along that dimension.
        """
        found = self.made(x, lambda _batch, _size: x.new_zeros(0))
        for part, block in zip(self.split(x), self.blocks(x.shape), strict=True):
            for dim, name in block.dimensions:
                found[name] = gram(seen(part, block, dim), dim, block.batch)
        return found

    def require(self, params: object) -> None:
        """Refuse parameters that the view does not fit.

        Raises:
            ValueError: The message names the parameter.
        """
        require_each(params, lambda p: self.blocks(p.shape))

    def _block(self, shape: tuple[int, ...], batch: int, prefix: str) -> Block:
        sizes = shape[batch:]
        has = [size <= self.max_dimension for size in sizes]
        if self.sides == "smaller":
            # Of equals the first.
            least = list(sizes).index(min(sizes))
            has = [one and dim == least for dim, one in enumerate(has)]
        return Block(shape, batch, _names(len(sizes), prefix), tuple(has))


def unfolded(x: Tensor, dim: int, batch: int) -> Tensor:
    """Return a block as matrices with one row for each index of one dimension: (..., size, all others)."""
    return x.movedim(batch + dim, batch).reshape(*x.shape[:batch], x.shape[batch + dim], -1)


def gram(x: Tensor, dim: int, batch: int) -> Tensor:
    r"""The products of a block's slices along one dimension with one another: :math:`G G^\top` along the first of a matrix."""
    rows = unfolded(x, dim, batch)
    return product(rows, rows.mT)


def times(x: Tensor, matrix: Tensor, dim: int, batch: int) -> Tensor:
    r"""A block multiplied from the left along one dimension: :math:`A G` along the first of a matrix, :math:`G A^\top` along the second."""
    moved = x.movedim(batch + dim, batch)
    found = product(matrix, unfolded(x, dim, batch)).reshape(*moved.shape[: batch + 1], *moved.shape[batch + 1 :])
    return found.movedim(batch, batch + dim).contiguous()


def moved(old: Tensor, new: Tensor, share: Scalar) -> Tensor:
    """``old``, moved by a share of the way to ``new``."""
    # A vector: a tensor without dimensions would take the dtype of the share.
    return (old.reshape(-1) + share * (new - old).reshape(-1)).reshape(old.shape)


def root_mean_square(x: Tensor, batch: int) -> Tensor:
    """Return the root mean square of each tensor of a batch, with dimensions of 1 to multiply by; 0 for zeros."""
    square = mean((x * x).reshape(*x.shape[:batch], -1), -1)
    # No root of zero, which has no derivative.
    known = square > 0
    found = torch.where(known, sqrt(torch.where(known, square, 1.0)), 0.0)
    return found.reshape(*x.shape[:batch], *(1,) * (x.ndim - batch))


def _names(count: int, prefix: str = "") -> tuple[str, ...]:
    return tuple(f"{prefix}along{dim}" for dim in range(count))


def _merged(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    found: list[int] = []
    current = 1
    for size in shape:
        if current * size <= limit:
            current *= size
        elif current > 1:
            found.append(current)
            current = size
        else:
            found.append(size)
    return (*found, current) if current > 1 or not found else tuple(found)
