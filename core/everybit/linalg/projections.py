"""Projections of gradients to a few dimensions: which parameters are projected, in which bases, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from everybit.base import Count, Key, Options, Updates, first_of_whole, mean, normal, require_each, require_step, tree
from everybit.linalg.operations import eigenvectors, product
from everybit.linalg.views import MatrixView, view_for
from everybit.protocol import Context

P = TypeVar("P")

Shape = tuple[int, ...]
Low = Tensor | dict[str, Tensor]
"""What a parameter has in a projected tree: matrices of low rank by name, or, if it is not projected, a tensor of its shape."""

Basis = Literal["singular", "random"]
"""Whose vectors a gradient is projected to: the first singular vectors of a gradient, or normal random ones."""

ProjectedSide = Literal["smaller", "larger", "rows", "columns"]
"""Which dimension of a matrix is replaced by one of the rank's length."""

EIGEN_COST = 10.0
"""Multiply-adds of an eigendecomposition of n rows, over ``n**3``, about."""


class Part(NamedTuple):
    """One batch of matrices of a projected parameter.

    Attributes:
        name: The name of its factors.
        batch: The leading dimensions.
        rank: The length of the projected dimension after the projection.
        size: Length of the projected dimension.
        other: Length of the other one.
        is_transposed: Whether the projected dimension is that of the columns.
        start: Index of its first element in the parameter.
    """

    name: str
    batch: Shape
    rank: int
    size: int
    other: int
    is_transposed: bool
    start: int


@dataclass(frozen=True, slots=True)
class Projection(Options):
    r"""Project gradients to a basis of low rank: :math:`U^\top G`, for each matrix on one of its sides.

    Vectors, and matrices with a side of at most ``rank``, are not projected.

    Attributes:
        rank: Number of vectors of a basis, at least 1.
        period: Updates between two choices of a basis, at least 1.
        basis: ``"singular"``: the first singular vectors of the gradient at the last choice, each with the sign that brings it nearer to
            the preceding vector. ``"random"``: normal numbers of variance 1/rank, which are not stored: they are drawn at each
            update from the optimizer's seed, the update of the last choice and the place in the model.
        side: The dimension that is reduced to ``rank``. If both are equal, ``"smaller"`` is the columns, and ``"larger"`` the rows.
        view: How a parameter becomes matrices, such as :func:`everybit.heads`; None: those of two dimensions as they are, convolutions of
            four or five flattened. Others are not projected.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A count below 1; an unknown basis or side.
    """

    rank: Count = 128
    period: Updates = 200
    basis: Basis = "singular"
    side: ProjectedSide = "smaller"
    view: MatrixView | None = None

    @property
    def draws(self) -> bool:
        """Whether bases are random."""
        return self.basis == "random"

    @property
    def periods(self) -> Shape:
        """The period of the bases, if these are computed from gradients."""
        return () if self.draws else (self.period,)

    def require(self, params: object) -> None:
        """Refuse parameters that the view does not fit.

        Raises:
            ValueError: The message names the parameter.
        """
        require_each(params, lambda p: self.parts(p.shape))

    def parts(self, shape: Sequence[int]) -> list[Part]:
        """Return the batches of matrices of a parameter of this shape; an empty list if it is not projected.

        Raises:
            ValueError: The view does not fit the shape.
        """
        if len(shape) < 2 or not math.prod(shape):
            return []
        view = self.view or view_for(shape)
        if view is None:
            return []
        shapes = view.shapes(shape)
        if all(min(one[-2:]) <= self.rank for one in shapes):
            return []
        found, start = [], 0
        for index, (*batch, rows, columns) in enumerate(shapes):
            is_transposed = {
                "smaller": columns <= rows,
                "larger": columns > rows,
                "rows": False,
                "columns": True,
            }[self.side]
            size, other = (columns, rows) if is_transposed else (rows, columns)
            name = "projected" if len(shapes) == 1 else f"block{index}_projected"
            # A block of a projected parameter may have fewer rows than the rank.
            rank = min(self.rank, rows, columns)
            found.append(Part(name, tuple(batch), rank, size, other, is_transposed, start))
            start += math.prod((*batch, rows, columns))
        return found

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step on a parameter of this shape, for :mod:`everybit.combinators.whole_tensors`."""
        total = 0.0
        for part in self.parts(shape):
            numel = math.prod((*part.batch, part.size, part.other))
            total += 2.0 * part.rank * numel
            if not self.draws:
                refresh = part.size * numel + EIGEN_COST * math.prod((*part.batch, part.size**3))
                total += refresh / self.period
        return total

    def zeros(self, p: Tensor) -> Low:
        """Zeros of the shapes of what :meth:`down` makes; the parameter itself, if it is not projected."""
        found = {one.name: p.new_zeros((*one.batch, one.rank, one.other)) for one in self.parts(p.shape)}
        return found or p

    def first_bases(self, p: Tensor) -> dict[str, Tensor]:
        """Return the first unit vectors; empty tensors where no basis is stored."""

        def units(part: Part) -> Tensor:
            unit = torch.eye(part.size, part.rank, dtype=p.dtype, device=p.device)
            return unit.expand(*part.batch, part.size, part.rank).clone()

        parts = [] if self.draws else self.parts(p.shape)
        return {one.name: units(one) for one in parts} or nothing(p)

    def bases(self, ctx: Context, updates: P, stored: Any) -> tuple[Any, Any]:
        """The bases of an update, and those to store, both as trees of matrices by name.

        Args:
            ctx: The update's context.
            updates: Gradients.
            stored: The result of :meth:`first_bases` or of the update before.
        """
        if not self.draws:
            chosen = ctx.every(self.period, lambda: tree.map(self._singular_vectors, updates, stored), lambda: stored)
            return chosen, chosen
        update = require_step(ctx.step if ctx.updates is None else ctx.updates, "a random projection")
        # Each update of a period draws the bits of its first one.
        first = replace(ctx, updates=update - (update - 1) % self.period)
        keys = (first.keys(name, updates) for name in ("basis radius", "basis angle"))
        return tree.map(self._drawn, updates, *keys), tree.map(nothing, updates)

    def down(self, g: Tensor, bases: dict[str, Tensor]) -> Low:
        """A tensor of a parameter's shape in its bases; the tensor itself, if it is not projected."""
        parts = self.parts(g.shape)
        if not parts:
            return g
        return {part.name: product(bases[part.name].mT, one) for part, one in zip(parts, self.split(g), strict=True)}

    def up(self, low: Low, bases: dict[str, Tensor], like: Tensor) -> Tensor:
        r"""What :meth:`down` made, back in the shape of a parameter: :math:`U (U^\top G)`."""
        if isinstance(low, Tensor):
            return low
        return self.joined([product(bases[name], one) for name, one in low.items()], like.shape)

    def split(self, g: Tensor) -> list[Tensor]:
        """The matrices of a projected parameter, with the projected dimension in the rows."""
        view = self._view(g.shape)
        parts = zip(self.parts(g.shape), view.split(g), strict=True)
        return [one.mT if part.is_transposed else one for part, one in parts]

    def joined(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The tensor of this shape that matrices, as :meth:`split` gives them, are."""
        parts = zip(self.parts(shape), matrices, strict=True)
        return self._view(shape).joined([one.mT if part.is_transposed else one for part, one in parts], shape)

    def _view(self, shape: Sequence[int]) -> MatrixView:
        view = self.view or view_for(shape)
        assert view is not None
        return view

    def _singular_vectors(self, g: Tensor, old: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = self.parts(g.shape)
        if not parts:
            return nothing(g)
        return {
            part.name: _along(eigenvectors(product(one, one.mT))[1][..., : part.rank], old[part.name])
            for part, one in zip(parts, self.split(g), strict=True)
        }

    def _drawn(self, g: Tensor, radius: Key, angle: Key) -> dict[str, Tensor]:
        """Normal numbers by the places of a part's first elements: a basis has no more numbers than its matrices have elements."""
        found = {}
        for part in self.parts(g.shape):
            like = g.new_empty((*part.batch, part.size, part.rank))
            keys = (replace(key, first=first_of_whole(key.first) + part.start) for key in (radius, angle))
            found[part.name] = (normal(like, *keys) / math.sqrt(part.rank)).to(g.dtype)
        return found or nothing(g)


def nothing(p: Tensor) -> dict[str, Tensor]:
    """Return factors without elements, for a parameter that is not projected."""
    return {"none": p.new_zeros(0)}


def _along(new: Tensor, old: Tensor) -> Tensor:
    """Return a basis with the signs that bring each vector nearer to the vector before it."""
    return new * torch.where(mean(new * old, -2) < 0, -1.0, 1.0).to(new.dtype).unsqueeze(-2)
