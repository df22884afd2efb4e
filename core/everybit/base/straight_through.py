"""The derivative of rounding: that of the identity.

Almost everywhere the true derivative of rounding is zero, which is no use to anybody who differentiates through a training step: a
hypergradient would vanish without a word. The straight-through estimator (Bengio et al. 2013, https://arxiv.org/abs/1308.3432) takes the
rounded number forward and the derivative of the exact one back, which is also what is right on average under stochastic rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def straight_through(rounded: Tensor, x: Tensor) -> Tensor:
    """``rounded``, with the derivative of ``x``: a tensor of the same shape, of any floating dtype.

    Where nothing is differentiated this is ``rounded`` itself.
    """
    return _apply(rounded, x) if torch.is_grad_enabled() else rounded


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(rounded: Tensor, x: Tensor) -> Tensor:  # noqa: ARG004 (autograd differentiates by it)
        return rounded.view_as(rounded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        rounded, x = inputs
        ctx.rounded, ctx.exact = rounded.dtype, x.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, gradient.to(ctx.exact)

    @staticmethod
    def jvp(ctx: Any, rounded_tangent: Tensor | None, tangent: Tensor) -> Tensor:  # noqa: ARG004 # pyright: ignore[reportIncompatibleMethodOverride]
        return tangent.to(ctx.rounded)


def _apply(rounded: Tensor, x: Tensor) -> Tensor:
    made: Tensor = _StraightThrough.apply(rounded, x)  # type: ignore[no-untyped-call]
    return made
