r"""Second moments of a tensor from their means along two of its dimensions, as Adafactor keeps them.

Of a matrix V with row means r and column means c, the estimate is :math:`r c^\top / \operatorname{mean} r`, which has V's row and column
means. A slot holds ``{"rows": r, "columns": c}`` of a tensor that is factored, with a dimension of 1 where a mean was taken, and V itself
of any other.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from everybit.base import Scalar, materialize, mean, sqrt, sum_of_squares

Which = Literal["last", "largest"]
"""The two dimensions over which a tensor is factored."""


def factored_dimensions(x: Tensor, which: Which = "last", least: int = 1) -> tuple[int, int] | None:
    """The two dimensions over which a tensor is factored, counted from the end; None: it is not.

    Args:
        x: The tensor; its shape counts.
        which: The last two, or the two largest; of equals, the last.
        least: The size that both must have.
    """
    if x.ndim < 2 or not x.numel():
        return None
    rows, columns = (-2, -1) if which == "last" else _largest(x)
    is_long = least <= 1 or (x.shape[rows] >= least and x.shape[columns] >= least)
    return (rows, columns) if is_long else None


def zeros(p: Tensor, dimensions: tuple[int, int] | None) -> Any:
    """Return a slot's value before the first update."""
    if dimensions is None:
        return torch.zeros_like(p)
    rows, columns = dimensions
    return {"rows": torch.zeros_like(p.narrow(columns, 0, 1)), "columns": torch.zeros_like(p.narrow(rows, 0, 1))}


def raised(square: Tensor, eps: Scalar) -> Tensor:
    """``square + eps``, in the dtype of ``square``."""
    # A vector: a tensor without dimensions would take the dtype of ``eps``.
    return (square.reshape(-1) + eps).reshape(square.shape)


def moved(old: Any, square: Tensor, share: Scalar, dimensions: tuple[int, int] | None) -> Any:
    """Return a slot's value, moved by a share of the way to new squares."""
    if dimensions is None or not isinstance(old, dict):
        return _moved(old, square, share)
    rows, columns = dimensions
    return {
        "rows": _moved(old["rows"], mean(square, columns).unsqueeze(columns), share),
        "columns": _moved(old["columns"], mean(square, rows).unsqueeze(rows), share),
    }


def over_root(x: Tensor, v: Any, dimensions: tuple[int, int] | None) -> Tensor:
    """``x`` over the root of the second moments that a slot holds."""
    if dimensions is None or not isinstance(v, dict):
        return (x.reshape(-1) / sqrt(v.reshape(-1))).reshape(x.shape)
    # Roots of the factors, since a product of small squares would underflow; once for each row and column.
    of_rows = materialize(1 / sqrt(v["rows"] / mean(v["rows"], dimensions[0]).unsqueeze(dimensions[0])))
    of_columns = materialize(1 / sqrt(v["columns"]))
    return x * of_rows * of_columns


def clipped_by_rms(x: Tensor, limit: Scalar) -> Tensor:
    """``x`` over its root mean square where that is above ``limit``, times ``limit``; of a whole tensor."""
    if not x.numel():
        return x
    square = sum_of_squares(x) / x.numel()
    # No root of zero, which has no derivative.
    above = square > limit * limit
    factor = materialize(torch.where(above, limit / sqrt(torch.where(above, square, 1.0)), 1.0))
    return (x.reshape(-1) * factor).reshape(x.shape)


def _largest(x: Tensor) -> tuple[int, int]:
    # Compared one by one: a compiler sorts no sizes that it does not know.
    second, first = (-2, -1) if x.shape[-1] >= x.shape[-2] else (-1, -2)
    for dim in range(-3, -x.ndim - 1, -1):
        if x.shape[dim] > x.shape[first]:
            second, first = first, dim
        elif x.shape[dim] > x.shape[second]:
            second = dim
    return second, first


def _moved(old: Tensor, new: Tensor, share: Scalar) -> Tensor:
    # A vector: a tensor without dimensions would take the dtype of the share.
    return (old.reshape(-1) + share * (new - old).reshape(-1)).reshape(old.shape)
