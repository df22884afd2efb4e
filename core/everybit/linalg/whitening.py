r"""Preconditioned stochastic gradient descent's fit of a Kronecker preconditioner, by triangular and diagonal factors.

Let :math:`P = Q^\top Q` and :math:`Q = Q_1 \otimes Q_2 \otimes \dots`. Updates minimize the mean of
:math:`g^\top P g + v^\top P^{-1} v` over gradients g and standard normal v. At its minimum P whitens,
:math:`P\, \operatorname{E}[g g^\top] P = I`. A step multiplies each factor from the left by :math:`I` minus the upper triangle of the
derivative's two terms over a bound of their norm, so that no inverse is kept and no scale of the gradient has to be known
(Li 2015, https://arxiv.org/abs/1512.04202; 2024, https://arxiv.org/abs/2402.11858).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from everybit.base import Scalar, beside

TINY = torch.finfo(torch.bfloat16).tiny
"""Added to what is divided by."""


def fitted(x: Tensor, probe: Tensor, factors: Sequence[Tensor], rate: Scalar) -> list[Tensor]:
    """Factors after a step of their fit to gradients; those of gradients that are all zero stay as they are.

    Each tensor of a batch is computed by itself, and eager and compiled code give the same bits.

    Args:
        x: Of shape (batch, sizes...).
        probe: Standard normal, of the same shape.
        factors: For each size n a tensor of shape (batch, n, n), upper triangular, or (batch, n), a diagonal.
        rate: The rate of the step, in [0, 1].
    """
    number = beside(rate, x)
    if any(map(_is_differentiated, (x, *factors))):
        return _stepped(x, probe, list(factors), number)
    found: list[Tensor] = _fitted(x, probe, list(factors), number)
    return found


def _is_differentiated(x: Tensor) -> bool:
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def _stepped(x: Tensor, probe: Tensor, factors: list[Tensor], rate: Tensor) -> list[Tensor]:
    members = zip(x, probe, *factors, strict=True)
    found = [_one(g.contiguous(), v.contiguous(), q, rate.to(x.dtype)) for g, v, *q in members]
    return [torch.stack(one) for one in zip(*found, strict=True)] if found else [one.clone() for one in factors]


def _one(g: Tensor, v: Tensor, factors: list[Tensor], rate: Tensor) -> list[Tensor]:
    has = (g != 0).any()
    factors = _balanced(factors)
    grown, shrunk = g, v
    for dim, q in enumerate(factors):
        grown, shrunk = _times(grown, q, dim), _over(shrunk, q, dim)
    found = []
    for dim, q in enumerate(factors):
        if q.ndim == 1:
            first, second = (_rows(one, dim).square().sum(1) for one in (grown, shrunk))
            move = (first - second) * q / ((first + second).amax() + TINY)
        else:
            first, second = (_rows(one, dim) @ _rows(one, dim).T for one in (grown, shrunk))
            move = torch.triu(first - second) @ q / (_least_norm(first + second) + TINY)
        found.append(torch.where(has, q - rate * move, q))
    return found


def _rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0).reshape(x.shape[dim], -1)


def _times(x: Tensor, q: Tensor, dim: int) -> Tensor:
    moved = x.movedim(dim, 0)
    rows = moved.reshape(len(moved), -1)
    found = q[:, None] * rows if q.ndim == 1 else q @ rows
    return found.reshape(moved.shape).movedim(0, dim)


def _over(x: Tensor, q: Tensor, dim: int) -> Tensor:
    """``x`` times the inverse of a factor's transpose along one dimension."""
    moved = x.movedim(dim, 0)
    rows = moved.reshape(len(moved), -1)
    found = rows / q[:, None] if q.ndim == 1 else torch.linalg.solve_triangular(q.T, rows, upper=False)
    return found.reshape(moved.shape).movedim(0, dim)


def _least_norm(x: Tensor) -> Tensor:
    """A lower bound of a symmetric matrix's greatest singular value: a step of power iteration from its longest row."""
    size = x.abs().amax()
    unit = x / torch.where(size > 0, size, 1.0)
    start = unit[unit.square().sum(1).argmax()]
    once = unit @ start
    length = once.square().sum()
    known = length > 0
    once = once / torch.where(known, length, 1.0).sqrt()
    square = (unit @ once).square().sum()
    return torch.where(known, size * torch.where(known, square, 1.0).sqrt(), 0.0)


def _balanced(factors: list[Tensor]) -> list[Tensor]:
    """Factors of one size, to a power of two: their product, and each step's share of them, keep their bits."""
    if len(factors) < 2:
        return factors
    exponents = torch.stack([torch.frexp(q.detach().abs().amax())[1] for q in factors])
    wanted = (exponents.sum() // len(factors)) - exponents
    # Their product is 1.
    moves = [-wanted[1:].sum(), *wanted[1:]]
    return [q * torch.ldexp(torch.ones_like(q.reshape(-1)[0]), move) for q, move in zip(factors, moves, strict=True)]


@torch.library.custom_op("everybit::whitening_step", mutates_args=())
def _fitted(x: Tensor, probe: Tensor, factors: Sequence[Tensor], rate: Tensor) -> list[Tensor]:
    return [one.contiguous().clone() for one in _stepped(x, probe, list(factors), rate)]


INSIDE: Mapping[str, Callable[..., Any]] = MappingProxyType({"everybit::whitening_step": _stepped})
"""What the operator does, in operators of torch: for who counts what it allocates."""


def _of_members(info: Any, in_dims: Any, x: Tensor, probe: Tensor, factors: Any, rate: Tensor) -> Any:
    def each(value: Tensor, dim: int | None) -> Sequence[Tensor]:
        return [value] * info.batch_size if dim is None else value.unbind(dim)

    of_x, of_probe, of_factors, of_rate = in_dims
    lists = [each(one, dim) for one, dim in zip(factors, of_factors, strict=True)]
    members = zip(each(x, of_x), each(probe, of_probe), zip(*lists, strict=True), each(rate, of_rate), strict=True)
    found = [_fitted(g, v, list(q), r) for g, v, q, r in members]
    return [torch.stack(one) for one in zip(*found, strict=True)], [0] * len(factors)


_fitted.register_fake(lambda x, probe, factors, rate: [torch.empty_like(q) for q in factors])  # noqa: ARG005
_fitted.register_vmap(_of_members)
