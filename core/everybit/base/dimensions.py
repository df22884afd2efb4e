"""Means along a dimension of whole tensors, for moments that are kept for rows and columns; the same eager and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mean(x: Tensor, dim: int) -> Tensor:
    """The mean along one dimension, in the dtype of ``x``; in compiled code added up in eager's order.

    Args:
        x: A tensor of one dimension or more.
        dim: Counted from the end, below zero.

    Raises:
        ValueError: ``dim`` is not counted from the end.
    """
    if dim >= 0:
        raise ValueError(f"dim: got {dim}; accepted is a dimension counted from the end, such as -1.")
    return _mean(x, dim) if torch.compiler.is_compiling() else x.mean(dim)


@torch.library.custom_op("everybit::mean", mutates_args=())
def _mean(x: Tensor, dim: int) -> Tensor:
    return x.mean(dim)


def _setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:  # noqa: ARG001  # called by name
    ctx.shape, ctx.dim = inputs[0].shape, inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return (gradient / ctx.shape[ctx.dim]).unsqueeze(ctx.dim).expand(ctx.shape), None


def _batched(_info: object, in_dims: tuple[int | None, None], x: Tensor, dim: int) -> tuple[Tensor, int | None]:
    if in_dims[0] is None:
        return _mean(x, dim), None
    # Member by member, so that each sum has the order that it has alone.
    return torch.stack([_mean(member, dim) for member in x.unbind(in_dims[0])]), 0


_mean.register_fake(lambda x, dim: x.new_empty((*x.shape[:dim], *(x.shape[dim + 1 :] if dim < -1 else ()))))
_mean.register_autograd(_backward, setup_context=_setup)
_mean.register_vmap(_batched)
