"""Rows and columns of the same length: what MuonEq does before the iteration, and Muon+ after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from torch import Tensor

from everybit.base import Hyperparameter, Scalar, at, materialize, mean, require, sqrt
from everybit.protocol import ALONE, Context
from everybit.transforms.matrix_wise import MatrixWise, Stateless, alone, from_shape
from everybit.transforms.stateless import Empty

P = TypeVar("P")

Sides = Literal["rows", "columns", "both", "rows_then_columns", "columns_then_rows"]
"""What gets the length 1: ``"both"`` at once, from the lengths before, or one after the other."""


@dataclass(frozen=True, slots=True)
class Equalize(Stateless):
    r"""Divide the rows of each matrix, its columns, or both by their lengths.

    .. math::
        X \mapsto D_r^{-1/2} X D_c^{-1/2} \qquad D_r = \operatorname{diag}\Bigl(\sum_j X_{ij}^2 + \epsilon\Bigr) \qquad
        D_c = \operatorname{diag}\Bigl(\sum_i X_{ij}^2 + \epsilon\Bigr)

    without :math:`D_c` for rows and without :math:`D_r` for columns. Before :class:`~everybit.transforms.orthogonalize.Orthogonalize`
    this is MuonEq, for which the authors take rows; after it Muon+, where columns and rows follow one another. A matrix of zeros stays
    zero.

    Args:
        view: How a parameter becomes matrices; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`.
        sides: ``"rows"``, ``"columns"``, ``"both"``, ``"rows_then_columns"`` or ``"columns_then_rows"``.
        eps: Added to the squares of lengths, at least zero; their unit. 1e-8 in MuonEq's code, 1e-7 in that of Muon+.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: An argument out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Chang et al. 2026, https://arxiv.org/abs/2603.28254 (before); Zhang et al. 2026, https://arxiv.org/abs/2602.21545 (after).
    """

    sides: Sides = "rows"
    eps: Hyperparameter = 1e-8

    def __post_init__(self) -> None:
        MatrixWise.__post_init__(self)
        require_sides("sides", self.sides)
        require("eps", self.eps, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory, after a look at all shapes."""
        self.require_shapes(params)
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates with rows and columns of their new lengths."""
        eps = at(self.eps, ctx.step, name="eps")
        first, _, second = self.sides.partition("_then_")

        def one(x: Tensor) -> Tensor:
            if first == "both":
                return x * _over_length(x, -1, eps) * _over_length(x, -2, eps)
            for side in (first, second):
                if side:
                    x = x * _over_length(x, -1 if side == "rows" else -2, eps)
            return x

        return self.of_batches(lambda batch: alone(one, batch), updates), state


def require_sides(name: str, sides: object) -> None:
    """Refuse a value that is not in :data:`Sides`.

    Raises:
        ValueError: It is not in there; the message has the argument's ``name``.
    """
    if sides not in get_args(Sides):
        raise ValueError(f"{name}: got {sides!r}; accepted are {', '.join(map(repr, get_args(Sides)))}.")


def _over_length(x: Tensor, dim: int, eps: Scalar) -> Tensor:
    square = mean(x * x, dim).unsqueeze(dim) * from_shape(x.shape[dim], x)
    # A row of zeros is divided by one where there is no eps.
    length = sqrt(square + eps)
    return materialize(1 / length.masked_fill(length == 0, 1.0))


equalize = Equalize
