"""Transforms that see each parameter as matrices, and the factors of a matrix's update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import Scalar, materialize, require_each, tree
from everybit.linalg import MatrixView, view_for
from everybit.protocol import ALONE, Context, WholeTensors
from everybit.transforms.updates import Empty

P = TypeVar("P")


ScaleName = Literal["original", "match_rms_adamw", "spectral_unclamped"]
"""Published factors of an orthogonal update, by torch's names."""

MatrixScale = ScaleName | Scalar | Callable[[int, int], float]
"""The factor of an orthogonal update: a published one, a number, or a function of rows and columns."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


def require_scale(scale: object) -> None:
    """Refuse a name of no published factor.

    Raises:
        ValueError: It is one.
    """
    if isinstance(scale, str) and scale not in SCALES:
        raise ValueError(
            f"scale: got {scale!r}; accepted are {', '.join(map(repr, SCALES))}, a number, or a function of rows and columns."
        )


def scaled(batch: Tensor, scale: MatrixScale, shape: Sequence[int]) -> Tensor:
    """A batch of updates times the factor of their rows and columns, the last two of a shape."""
    rows, columns = shape[-2:]
    if isinstance(scale, str):
        return batch * from_shape(SCALES[scale](rows, columns), batch)
    return batch * (from_shape(scale(rows, columns), batch) if callable(scale) else scale)


def from_shape(number: float, like: Tensor) -> Scalar:
    """A number that follows from a shape, for expressions with tensors on a device.

    Compiled code, which is made for many shapes, would multiply by it in its own precision; as a 0-d tensor it is rounded as in eager code.
    """
    if not torch.compiler.is_compiling():
        return float(number)
    return materialize(torch.full((), number, dtype=torch.float64, device=like.device))


@dataclass(frozen=True, slots=True)
class MatrixWise(WholeTensors):
    """What transforms of matrices have in common.

    Args:
        view: The view of a parameter as matrices, such as :func:`everybit.heads`. None: two dimensions are a matrix, and four or
            five, a convolution, is flattened to ``(first, all others)``.

    Raises:
        TypeError: ``view`` is not a view.
    """

    view: MatrixView | None = None

    def matrices(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the shapes (..., rows, columns) of the batches of matrices that a parameter of this shape is.

        Raises:
            ValueError: It cannot be seen so.
        """
        return self.view_of(shape).shapes(shape)

    def view_of(self, shape: Sequence[int]) -> MatrixView:
        """Return the view of a parameter of this shape.

        Raises:
            ValueError: It is not seen as matrices without a view.
        """
        view = self.view or view_for(shape)
        if view is None:
            raise ValueError(
                f"got shape {tuple(shape)}; accepted are matrices, convolutions (four or five dimensions), and parameters for which a"
                " view is named. Give others to another transform: everybit.muon(..., others=everybit.adamw), or everybit.partition."
            )
        return view

    def require_shapes(self, params: object) -> None:
        """Refuse parameters that cannot be seen as matrices.

        Raises:
            ValueError: One cannot; the message has its name.
        """
        require_each(params, lambda p: self.matrices(p.shape) if p.numel() else ())

    def of_batches(self, function: Callable[[Tensor], Tensor], updates: P) -> P:
        """Apply a function to each batch (..., rows, columns) of each parameter."""

        def whole(leaf: Tensor) -> Tensor:
            if not leaf.numel():
                return leaf
            view = self.view_of(leaf.shape)
            return view.joined([function(batch) for batch in view.split(leaf)], leaf.shape)

        return tree.map(whole, updates)


@dataclass(frozen=True, slots=True)
class Stateless(MatrixWise):
    """What transforms of matrices without memory have in common.

    Args:
        view: How a parameter becomes matrices.

    Raises:
        TypeError: ``view`` is not a view.
    """

    reads_weights = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory, after a look at all shapes."""
        self.require_shapes(params)
        return Empty()


@dataclass(frozen=True, slots=True)
class ScaleByShape(Stateless):
    r"""Multiply each matrix of the updates by a factor of its rows r and columns c.

    Args:
        view: How a parameter becomes matrices; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`.
        scale: ``"original"``: :math:`\sqrt{\max(1, r/c)}`; ``"match_rms_adamw"``: :math:`0.2\sqrt{\max(r, c)}`;
            ``"spectral_unclamped"``: :math:`\sqrt{r/c}`; a number; a function of both.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A name of no factor; from ``init``, a parameter that cannot be seen so.
    """

    scale: MatrixScale = "original"

    def __post_init__(self) -> None:
        MatrixWise.__post_init__(self)
        require_scale(self.scale)

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates times their factors."""
        return self.of_batches(lambda batch: scaled(batch, self.scale, batch.shape), updates), state


def alone(function: Callable[..., Tensor], *batches: Tensor) -> Tensor:
    """Apply a function of a matrix and its state to each matrix of a batch, so that no bits depend on the others."""
    first = batches[0]
    if first.ndim == 2:
        return function(*batches)
    lead = first.shape[:-2]
    rows = zip(*(x.reshape(-1, *x.shape[-2:]) for x in batches), strict=True)
    found = [function(*one) for one in rows]
    return torch.stack(found).reshape(*lead, *found[0].shape)


scale_by_shape = ScaleByShape
