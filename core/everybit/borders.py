"""Borders that a compiler does not cross.

Compiled code gives the bits of eager code as long as it does the same operations in the same order. Two kinds of operation it would
do otherwise, and both are made opaque here: what is outside the loop over elements stays outside, and sums keep eager's order.
In eager code these functions are the plain expressions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def settle(x: Tensor) -> Tensor:
    """``x`` itself; but in compiled code computed once, before the loop over elements, as eager code would.

    A compiler inlines a 0-d expression such as ``beta ** step`` into the loop that uses it: a power per element, from a vector
    library whose last bit differs from the scalar one.
    """
    return _settle(x) if torch.compiler.is_compiling() else x


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of the squares of all elements, 0-d, in the dtype of ``x``; in compiled code added up in eager's order."""
    return _sum_of_squares(x) if torch.compiler.is_compiling() else x.square().sum()


@torch.library.custom_op("everybit::settle", mutates_args=())
def _settle(x: Tensor) -> Tensor:
    return x.clone()


@_settle.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_settle.register_autograd(lambda ctx, gradient: gradient)


@_settle.register_vmap
def _(info: object, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return _settle(x), in_dims[0]


@torch.library.custom_op("everybit::sum_of_squares", mutates_args=())
def _sum_of_squares(x: Tensor) -> Tensor:
    return x.square().sum()


@_sum_of_squares.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


_sum_of_squares.register_autograd(
    lambda ctx, gradient: 2 * gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@_sum_of_squares.register_vmap
def _(info: object, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    if in_dims[0] is None:
        return _sum_of_squares(x), None
    return x.movedim(in_dims[0], 0).flatten(1).square().sum(dim=1), 0
