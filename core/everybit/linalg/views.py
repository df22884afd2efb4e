"""How a parameter becomes matrices: values that a matrix optimizer is given for parameters by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from everybit.base import Options


@dataclass(frozen=True, slots=True)
class MatrixView(Options):
    """How a parameter becomes matrices; :func:`matrix`, :func:`flattened`, :func:`heads`, :func:`row_blocks` and :func:`batched` make them.

    Attributes:
        kind: Which of these.
        sizes: The sizes of the row blocks, or the number of heads.
    """

    kind: Literal["matrix", "flattened", "heads", "row_blocks", "batched"]
    sizes: tuple[int, ...] = ()

    @classmethod
    def example(cls) -> str:
        """One of them, as it is written."""
        return "everybit.heads(8)"

    def fits(self, dimensions: int) -> bool:
        """Whether parameters of so many dimensions can be seen so, if their sizes fit."""
        several = {"batched": 3, "flattened": 2}
        return dimensions >= several[self.kind] if self.kind in several else dimensions == 2

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes (..., rows, columns) of the batches of matrices that a parameter of this shape is.

        Raises:
            ValueError: It cannot be seen so.
        """
        if not self.fits(len(shape)):
            accepted = {"batched": "three dimensions or more", "flattened": "two dimensions or more"}.get(
                self.kind, "two dimensions"
            )
            raise ValueError(
                f"{self.kind}: got a parameter of shape {tuple(shape)}; accepted are parameters of {accepted}."
            )
        rows, columns = shape[0], math.prod(shape[1:])
        if self.kind == "batched":
            return [tuple(shape)]
        if self.kind == "heads":
            (count,) = self.sizes
            if rows % count:
                raise ValueError(
                    f"heads({count}): got {tuple(shape)}; accepted are parameters whose rows {count} divides."
                )
            return [(count, rows // count, columns)]
        if self.kind == "row_blocks":
            if sum(self.sizes) != rows:
                raise ValueError(
                    f"row_blocks{self.sizes}: got {tuple(shape)}; accepted are parameters of {sum(self.sizes)} rows."
                )
            return [(size, columns) for size in self.sizes]
        return [(rows, columns)]

    def split(self, x: Tensor) -> list[Tensor]:
        """The batches of matrices that a tensor is, as views where its memory allows it."""
        shapes = self.shapes(x.shape)
        if self.kind != "row_blocks":
            return [x.reshape(shapes[0])]
        return list(torch.split(x.reshape(x.shape[-2:]), [rows for rows, _ in shapes]))

    def joined(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The tensor of this shape that batches of matrices, as :meth:`split` gives them, are."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole.reshape(tuple(shape))


def matrix() -> MatrixView:
    """A parameter of two dimensions, as it is."""
    return MatrixView("matrix")


def flattened() -> MatrixView:
    """A parameter of two dimensions or more, all but the first in one: a convolution's ``(out, in, height, width)``."""
    return MatrixView("flattened")


def heads(count: int) -> MatrixView:
    """Rows in as many matrices of equal size, as a projection to the heads of an attention has them.

    Raises:
        ValueError: ``count`` below 1.
    """
    _require_counts("heads: count", (count,))
    return MatrixView("heads", (count,))


def row_blocks(*sizes: int) -> MatrixView:
    """Rows in matrices of these sizes: a projection to queries, keys and values in one.

    Raises:
        ValueError: No size, or one below 1.
    """
    _require_counts("row_blocks: sizes", sizes)
    return MatrixView("row_blocks", sizes)


def batched() -> MatrixView:
    """A parameter of three dimensions or more as matrices in the last two: the experts of a mixture."""
    return MatrixView("batched")


def view_for(shape: Sequence[int]) -> MatrixView | None:
    """Return the default view of a parameter of this shape: a matrix, or a flattened convolution of four or five dimensions."""
    return matrix() if len(shape) == 2 else flattened() if len(shape) in (4, 5) else None


def _require_counts(name: str, counts: Sequence[object]) -> None:
    if not counts or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in counts):
        raise ValueError(f"{name}: got {counts!r}; accepted are whole numbers, at least 1.")
