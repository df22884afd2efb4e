"""Products and decompositions of matrices, each matrix by itself: the same bits eager, compiled, mapped over and in any batch.

A library chooses its kernel by shapes, strides and the number of matrices, and another kernel adds up in another order. Eigenvectors of
eigenvalues that are equal, or nearly so, turn by a right angle for a difference in the last bit. So every matrix goes to the library alone
and contiguous, inside an operator that compilers do not look into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from everybit.base import Scalar, beside


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices (..., n, k) and (..., k, m) with equal leading dimensions."""
    return _apply(_product, _products, a, b)  # type: ignore[no-any-return]


def eigenvectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of symmetric matrices in descending order, and the eigenvectors as columns; NaN for matrices not finite.

    They are computed in float64: those of small eigenvalues would be rounding in float32. On a GPU the library makes the host wait.

    Args:
        x: Of shape (..., n, n).

    Returns:
        Of shapes (..., n) and (..., n, n), in the dtype of ``x``.
    """
    return _apply(_eigen, _eigens, x)  # type: ignore[no-any-return]


def inverse_roots(x: Tensor, exponent: Scalar, ridge: Scalar) -> Tensor:
    r"""Powers of symmetric matrices, :math:`V \operatorname{diag}(\max(\lambda, 0) + \epsilon)^{-e} V^\top`; 0 for a sum that is zero.

    Results are those of :func:`eigenvectors` in float64.

    Args:
        x: Of shape (..., n, n).
        exponent: :math:`e`.
        ridge: :math:`\epsilon`, at least zero.
    """
    numbers = [beside(one, x) for one in (exponent, ridge)]
    if _is_differentiated(x):
        return _root(x, *numbers)
    found: Tensor = _roots(x, *numbers)
    return found


def orthonormal(x: Tensor) -> Tensor:
    """The first factor of the QR decomposition of matrices (..., n, k), of as many columns as the lesser of n and k."""
    return _apply(_qr, _qrs, x)  # type: ignore[no-any-return]


def over_triangle(x: Tensor, upper: Tensor) -> Tensor:
    """Return ``x @ inverse(upper)`` for matrices (..., n, k) and upper triangular matrices (..., k, k)."""
    return _apply(_solved, _solutions, x, upper)  # type: ignore[no-any-return]


def _apply(plain: Callable[..., Any], operator: Callable[..., Any], *matrices: Tensor) -> Any:
    """One of the functions below on any leading dimensions. Of custom operators torch.func takes no derivatives."""
    lead = matrices[0].shape[:-2]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in matrices]
    found = (plain if any(map(_is_differentiated, flat)) else operator)(*flat)
    if isinstance(found, tuple):
        return tuple(x.reshape(*lead, *x.shape[1:]) for x in found)
    return found.reshape(*lead, *found.shape[1:])


def _is_differentiated(x: Tensor) -> bool:
    if torch.is_grad_enabled() and x.requires_grad:
        return True
    tangent = forward_ad.unpack_dual(x).tangent  # type: ignore[no-untyped-call]
    return tangent is not None


def _product(a: Tensor, b: Tensor) -> Tensor:
    if not len(a):
        return a.new_zeros(0, a.shape[1], b.shape[2])
    return torch.stack([x.contiguous() @ y.contiguous() for x, y in zip(a, b, strict=True)])


def _eigen(x: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = [], []
    for one in x:
        wide = one.double().contiguous()
        # The library raises an error for numbers that are not finite, at the cost of the run; a NaN can be skipped.
        finite = torch.isfinite(wide).all()
        value, vector = torch.linalg.eigh(
            torch.where(finite, wide, torch.eye(len(wide), dtype=wide.dtype, device=wide.device))
        )
        values.append(torch.where(finite, value.flip(0), torch.nan))
        vectors.append(torch.where(finite, vector.flip(1), torch.nan))
    if not values:
        return x.new_zeros(x.shape[:2]), torch.zeros_like(x)
    return torch.stack(values).to(x.dtype), torch.stack(vectors).to(x.dtype)


def _root(x: Tensor, exponent: Tensor, ridge: Tensor) -> Tensor:
    found = []
    for one in x.reshape(-1, *x.shape[-2:]):
        values, vectors = (part[0] for part in _eigen(one[None].double()))
        moved = values.clamp(min=0.0) + ridge
        # No power of zero, which is not finite and has no derivative.
        known = moved > 0
        powers = torch.where(known, torch.where(known, moved, 1.0) ** -exponent, torch.where(moved.isnan(), moved, 0.0))
        found.append((vectors * powers) @ vectors.mT)
    return torch.stack(found).reshape(x.shape).to(x.dtype) if found else torch.zeros_like(x)


def _qr(x: Tensor) -> Tensor:
    if not len(x):
        return x.new_zeros(0, x.shape[1], min(x.shape[1:]))
    return torch.stack([torch.linalg.qr(one.contiguous())[0] for one in x])


def _solved(x: Tensor, upper: Tensor) -> Tensor:
    if not len(x):
        return torch.zeros_like(x)
    pairs = zip(upper, x, strict=True)
    return torch.stack(
        [torch.linalg.solve_triangular(a.contiguous(), y.contiguous(), upper=True, left=False) for a, y in pairs]
    )


@torch.library.custom_op("everybit::matrix_products", mutates_args=())
def _products(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b).contiguous()


@torch.library.custom_op("everybit::eigenvectors", mutates_args=())
def _eigens(x: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = _eigen(x)
    return values.contiguous(), vectors.contiguous()


@torch.library.custom_op("everybit::inverse_roots", mutates_args=())
def _roots(x: Tensor, exponent: Tensor, ridge: Tensor) -> Tensor:
    return _root(x, exponent, ridge).contiguous()


@torch.library.custom_op("everybit::orthonormal", mutates_args=())
def _qrs(x: Tensor) -> Tensor:
    return _qr(x).contiguous()


@torch.library.custom_op("everybit::over_triangle", mutates_args=())
def _solutions(x: Tensor, upper: Tensor) -> Tensor:
    return _solved(x, upper).contiguous()


INSIDE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "everybit::matrix_products": _product,
        "everybit::eigenvectors": _eigen,
        "everybit::inverse_roots": _root,
        "everybit::orthonormal": _qr,
        "everybit::over_triangle": _solved,
    }
)
"""What the operators do, in operators of torch: for who counts what they allocate."""


def _register(operator: Any, shapes: Callable[..., Any]) -> None:
    """Tell an operator to compilers, and to vmap, for which members are one more leading dimension."""

    def batched(info: Any, in_dims: tuple[int | None, ...], *matrices: Tensor) -> Any:
        size = info.batch_size
        alike = [
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(matrices, in_dims, strict=True)
        ]
        found = operator(*(x.reshape(-1, *x.shape[2:]) for x in alike))
        if isinstance(found, tuple):
            return tuple(x.reshape(size, -1, *x.shape[1:]) for x in found), (0,) * len(found)
        return found.reshape(size, -1, *found.shape[1:]), 0

    operator.register_fake(shapes)
    operator.register_vmap(batched)


def _roots_of_members(info: Any, in_dims: tuple[int | None, ...], *given: Tensor) -> tuple[Tensor, int]:
    alike = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(given, in_dims, strict=True)
    ]
    return torch.stack([_roots(*member) for member in zip(*alike, strict=True)]), 0


_roots.register_fake(lambda x, exponent, ridge: torch.empty_like(x, memory_format=torch.contiguous_format))  # noqa: ARG005
_roots.register_vmap(_roots_of_members)
_register(_products, lambda a, b: a.new_empty(len(a), a.shape[1], b.shape[2]))
_register(_eigens, lambda x: (x.new_empty(x.shape[:2]), x.new_empty(x.shape)))
_register(_qrs, lambda x: x.new_empty(len(x), x.shape[1], min(x.shape[1:])))
_register(_solutions, lambda x, upper: x.new_empty(x.shape))  # noqa: ARG005
