"""How a parameter becomes matrices: values that a matrix optimizer is given for parameters by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import Options

T = TypeVar("T")

ViewKind = Literal["matrix", "flattened", "batched", "transposed", "heads", "interleaved", "row_blocks"]
"""The kinds of views, each with a function that makes one."""

LEAST: Mapping[str, int] = MappingProxyType({"flattened": 2, "batched": 3})
"""The least number of dimensions of a parameter; parameters of other kinds have two."""


@dataclass(frozen=True, slots=True)
class MatrixView(Options):
    """How a parameter becomes matrices, as data; the function of each kind makes one, such as :func:`heads`.

    Attributes:
        kind: Which of these.
        sizes: The sizes of row blocks, or one number: of heads, or of interleaved matrices.
        rows: The rows of each part of a head; empty: a head is one matrix.
        inside: How the matrices that it makes are seen: one view for all, or one for each size of row blocks or part of heads; empty: as
            they are.

    Raises:
        ValueError: Sizes below 1, or that the kind does not have; views inside for another number of matrices, or that have more dimensions
            than a matrix.
    """

    kind: ViewKind
    sizes: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    inside: tuple[MatrixView, ...] = ()

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.kind in ("heads", "interleaved"):
            _require_counts(f"{self.kind}: count", self.sizes, only=True)
        elif self.kind == "row_blocks":
            _require_counts("row_blocks: sizes", self.sizes)
        elif self.sizes:
            raise ValueError(f"{self.kind}: sizes: got {self.sizes}; accepted with it are none.")
        if self.rows:
            if self.kind != "heads":
                raise ValueError(f"{self.kind}: rows: got {self.rows}; accepted are those of heads.")
            _require_counts("heads: rows", self.rows)
        if self.inside and len(self.inside) not in (1, self._count):
            raise ValueError(
                f"{self}: inside: got {len(self.inside)} views; accepted are one for all matrices, or {self._count}."
            )
        for one in self.inside:
            if one.kind in LEAST:
                raise ValueError(f"inside: got {one}; accepted are views of matrices, of any kind but this.")

    @property
    def _count(self) -> int:
        """The number of batches of matrices of different shapes, before they are seen by other views."""
        return len(self.sizes) if self.kind == "row_blocks" else max(len(self.rows), 1)

    @classmethod
    def example(cls) -> str:
        """One of them, as it is written."""
        return "everybit.heads(8)"

    def __str__(self) -> str:
        if self.kind == "row_blocks":
            return f"row_blocks{self.sizes}"
        given = [str(size) for size in self.sizes] + ([f"rows={self.rows}"] if self.rows else [])
        return self.kind + (f"({', '.join(given)})" if given else "")

    def fits(self, dimensions: int) -> bool:
        """Whether parameters of so many dimensions can be seen so, if their sizes fit."""
        return dimensions >= LEAST[self.kind] if self.kind in LEAST else dimensions == 2

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes (..., rows, columns) of the batches of matrices that a parameter of this shape is.

        Raises:
            ValueError: It cannot be seen so.
        """
        self._require_dimensions(shape)
        return self._shapes_inside(shape)

    def split(self, x: Tensor) -> list[Tensor]:
        """The batches of matrices that a tensor is, as views where its memory allows it."""
        self._require_dimensions(x.shape)
        return self._split_inside(x)

    def joined(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The tensor of this shape that batches of matrices, as :meth:`split` gives them, are."""
        return self._joined_inside(iter(parts), shape).contiguous()

    # -- a view, and those inside of it -------------------------------------------------------------------------------------------

    def _shapes_inside(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        own = self._own_shapes(shape)
        return [one for view, seen in self._with_views(own) for one in (view._shapes_inside(seen) if view else [seen])]

    def _split_inside(self, x: Tensor) -> list[Tensor]:
        own = self._own_parts(x)
        return [one for view, part in self._with_views(own) for one in (view._split_inside(part) if view else [part])]

    def _joined_inside(self, parts: Iterator[Tensor], shape: Sequence[int]) -> Tensor:
        own = [
            view._joined_inside(parts, seen) if view else next(parts)
            for view, seen in self._with_views(self._own_shapes(shape))
        ]
        whole = own[0] if len(own) == 1 else torch.cat(own, dim=-2)
        if self.kind == "interleaved":
            whole = whole.transpose(-3, -2)
        return whole.mT if self.kind == "transposed" else whole.reshape(tuple(shape))

    def _with_views(self, own: Sequence[T]) -> Iterator[tuple[MatrixView | None, T]]:
        views = self.inside if len(self.inside) == len(own) else self.inside * len(own)
        return zip(views or (None,) * len(own), own, strict=True)

    # -- a view alone -------------------------------------------------------------------------------------------------------------

    def _own_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the batches that this view alone makes of matrices (..., rows, columns), or of a parameter."""
        if self.kind == "flattened":
            return [(shape[0], math.prod(shape[1:]))]
        *lead, rows, columns = shape
        if self.kind == "transposed":
            return [(*lead, columns, rows)]
        if self.kind == "row_blocks":
            if sum(self.sizes) != rows:
                raise ValueError(f"{self}: got {tuple(shape)}; accepted are parameters of {sum(self.sizes)} rows.")
            return [(*lead, size, columns) for size in self.sizes]
        if self.kind in ("heads", "interleaved"):
            (count,) = self.sizes
            if self.rows and count * sum(self.rows) != rows:
                raise ValueError(
                    f"{self}: got {tuple(shape)}; accepted are parameters of {count * sum(self.rows)} rows."
                )
            if rows % count:
                raise ValueError(f"{self}: got {tuple(shape)}; accepted are parameters whose rows {count} divides.")
            return [(*lead, count, one, columns) for one in self.rows or (rows // count,)]
        return [tuple(shape)]

    def _own_parts(self, x: Tensor) -> list[Tensor]:
        shapes = self._own_shapes(x.shape)
        if self.kind == "flattened":
            return [x.reshape(shapes[0])]
        if self.kind == "row_blocks":
            return list(torch.split(x, list(self.sizes), dim=-2))
        if self.kind == "transposed":
            return [x.mT.contiguous()]
        if self.kind == "heads":
            each = x.reshape(*x.shape[:-2], self.sizes[0], -1, x.shape[-1])
            return list(torch.split(each, list(self.rows), dim=-2)) if self.rows else [each]
        if self.kind == "interleaved":
            return [x.reshape(*x.shape[:-2], -1, self.sizes[0], x.shape[-1]).transpose(-3, -2).contiguous()]
        return [x]

    def _require_dimensions(self, shape: Sequence[int]) -> None:
        if not self.fits(len(shape)):
            accepted = {3: "three dimensions or more", 2: "two dimensions or more"}.get(
                LEAST.get(self.kind, 0), "two dimensions"
            )
            raise ValueError(f"{self}: got a parameter of shape {tuple(shape)}; accepted are parameters of {accepted}.")


def matrix() -> MatrixView:
    """A parameter of two dimensions, as it is."""
    return MatrixView("matrix")


def flattened() -> MatrixView:
    """A parameter of two dimensions or more, all but the first in one: a convolution's ``(out, in, height, width)``."""
    return MatrixView("flattened")


def heads(
    count: int, *, rows: Sequence[int] = (), inside: MatrixView | Sequence[MatrixView] | None = None
) -> MatrixView:
    """Rows in as many matrices of equal size, as a projection to the heads of an attention has them.

    Args:
        count: The number of heads.
        rows: The rows of the parts of each head, of which each is a matrix: ``rows=(128, 64)`` for 128 rows without and 64 with
            positions. Empty: each head is one matrix.
        inside: How each is seen in turn: one view, or one for each part.

    Raises:
        ValueError: A number below 1, or another number of views than of parts.
    """
    return MatrixView("heads", (count,), tuple(rows), _views(inside))


def interleaved(count: int, *, inside: MatrixView | None = None) -> MatrixView:
    """Rows that belong to so many matrices in turn: with ``interleaved(2)`` rows 0, 2, 4 and rows 1, 3, 5.

    Args:
        count: The number of matrices.
        inside: How each is seen in turn.

    Raises:
        ValueError: ``count`` below 1.
    """
    return MatrixView("interleaved", (count,), (), _views(inside))


def row_blocks(*sizes: int, inside: MatrixView | Sequence[MatrixView] | None = None) -> MatrixView:
    """Rows in matrices of these sizes: a projection to queries, keys and values in one.

    Args:
        sizes: The numbers of rows.
        inside: How each is seen in turn: one view, or one for each size, such as ``(heads(32), heads(8), heads(8))``.

    Raises:
        ValueError: No size, or one below 1; another number of views than of sizes.
    """
    return MatrixView("row_blocks", sizes, (), _views(inside))


def batched(inside: MatrixView | None = None) -> MatrixView:
    """A parameter of three dimensions or more as matrices in the last two: the experts of a mixture.

    Args:
        inside: How each is seen in turn, such as ``heads(8)`` for each expert's heads.
    """
    return MatrixView("batched", (), (), _views(inside))


def transposed(inside: MatrixView | None = None) -> MatrixView:
    """A matrix with its columns as rows, for weights of shape ``(in, out)``, of which the outputs are heads, blocks or interleaved.

    The factor of an update is that of ``out`` rows then.

    Args:
        inside: How it is seen in turn.
    """
    return MatrixView("transposed", (), (), _views(inside))


def view_for(shape: Sequence[int]) -> MatrixView | None:
    """Return the default view of a parameter of this shape: a matrix, or a flattened convolution of four or five dimensions."""
    return matrix() if len(shape) == 2 else flattened() if len(shape) in (4, 5) else None


def _views(inside: MatrixView | Sequence[MatrixView] | None) -> tuple[MatrixView, ...]:
    return () if inside is None else (inside,) if isinstance(inside, MatrixView) else tuple(inside)


def _require_counts(name: str, counts: Sequence[object], *, only: bool = False) -> None:
    is_whole = counts and not any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in counts)
    if not is_whole or (only and len(counts) != 1):
        raise ValueError(f"{name}: got {counts!r}; accepted are whole numbers, at least 1.")
