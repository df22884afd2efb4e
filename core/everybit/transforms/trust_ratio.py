"""Trust ratios: updates in proportion to the norm of the parameter that they move, as LAMB and LARS have them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, at, tree
from everybit.protocol import ALONE, Context, Elementwise
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


class _ByTensor(Memoryless, Elementwise):
    """Base class of transforms that request numbers of each whole parameter, and may be cut anywhere all the same."""

    __slots__ = ()
    reduces = True
    per_tensor = True


@dataclass(frozen=True, slots=True)
class ScaleByTrustRatio(_ByTensor):
    r"""Multiply each parameter's update by the ratio of the parameter's norm to the update's.

    .. math::
        u \leftarrow u \min\left(\frac{c \lVert p \rVert}{\lVert u \rVert + \epsilon},\; \rho\right)

    The ratio is 1 if either norm is zero. Norms are of whole parameters, in float64, wherever their pieces are.

    Args:
        coefficient: :math:`c`, at least zero.
        eps: Added to the norm of the update, in its unit; non-negative.
        max_ratio: :math:`\rho`, at least zero; 1 for LAMBC. None: no limit.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        You et al. 2020, https://arxiv.org/abs/1904.00962, Algorithm 2, with the identity for :math:`\phi`; LAMBC: Fong et al. 2020,
        https://arxiv.org/abs/2011.13584.
    """

    _: KW_ONLY
    coefficient: NonNegative = 1.0
    eps: NonNegative = 0.0
    max_ratio: NonNegative | None = None

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates."""
        coefficient, eps = self.at(ctx.step, "coefficient", "eps")
        most = None if self.max_ratio is None else at(self.max_ratio, ctx.step, name="max_ratio")

        def ratio(weight: Tensor, move: Tensor) -> Tensor:
            found = _ratio(weight, move, coefficient * weight, move + eps)
            return found if most is None else torch.minimum(found, most * torch.ones_like(found))

        def scaled(norms: tuple[P, ...]) -> tuple[P, Empty]:
            ratios = tree.map(ratio, *norms)
            return tree.elementwise(lambda u, r: u * r, updates, ctx.per_tensor.expand(ratios, updates)), state

        return ctx.request(ctx.per_tensor.norms(params, updates), scaled)


@dataclass(frozen=True, slots=True)
class ScaleByLars(_ByTensor):
    r"""Add weight decay to the gradient, and scale both by a trust ratio of the gradient alone.

    .. math::
        u = (g + \lambda p)\, \frac{c \lVert p \rVert}{\lVert g \rVert + \lambda \lVert p \rVert + \epsilon}

    The ratio is 1 if either norm is zero. It is the paper's and timm's; optax takes the norm of the sum,
    :math:`\lVert g + \lambda p \rVert`: ``chain(add_decayed_weights(...), scale_by_trust_ratio(...))``.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        coefficient: :math:`c`, at least zero.
        eps: Added to the norms, in their unit; non-negative.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        You et al. 2017, https://arxiv.org/abs/1708.03888, Algorithm 1.
    """

    weight_decay: NonNegative = 0.0
    coefficient: NonNegative = 1e-3
    eps: NonNegative = 1e-8

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return decayed and scaled gradients."""
        decay, coefficient, eps = self.at(ctx.step, "weight_decay", "coefficient", "eps")

        def decayed(w: Tensor, nothing: float) -> Tensor:
            # Zero times an infinite weight would be NaN; the zero of a compiled step is a tensor.
            if isinstance(decay, Tensor):
                return torch.where(decay == 0, nothing, decay * w)
            return torch.full_like(w, nothing) if decay == 0 else decay * w

        def ratio(weight: Tensor, move: Tensor) -> Tensor:
            return _ratio(weight, move, coefficient * weight, move + decayed(weight, 0.0) + eps)

        def scaled(g: Tensor, p: Tensor, r: Tensor) -> Tensor:
            return (g + decayed(p, -0.0)) * r

        def after(norms: tuple[P, ...]) -> tuple[P, Empty]:
            ratios = tree.map(ratio, *norms)
            return tree.elementwise(scaled, updates, params, ctx.per_tensor.expand(ratios, updates)), state

        return ctx.request(ctx.per_tensor.norms(params, updates), after)


def _ratio(weight: Tensor, move: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """``above / below`` where both norms are above zero, and 1 elsewhere."""
    counts = (weight > 0) & (move > 0)
    return torch.where(counts, above / torch.where(counts, below, 1.0), 1.0)


scale_by_trust_ratio = ScaleByTrustRatio
scale_by_lars = ScaleByLars
