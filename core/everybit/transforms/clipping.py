"""Clipping with a relative limit: to the weights, or to the tensor's own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, at, beside, materialize, mean, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, WholeTensors
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


Units = Literal["first", "last"]
"""The dimension that numbers the units of a layer."""


@dataclass(frozen=True, slots=True)
class ClipByUnitNorm(Memoryless, WholeTensors):
    r"""Adaptive gradient clipping: limit the norm of each unit's gradient to a share of the norm of the unit's weights.

    .. math::
        g_i \leftarrow g_i \, \min\left(1, \frac{\lambda \max(\|w_i\|, \epsilon)}{\|g_i\|}\right)

    A vector or number is one unit. Units must be whole: parameters are not cut.

    Args:
        limit: :math:`\lambda`, at least zero; the paper's 0.01.
        eps: :math:`\epsilon`, least norm of the weights, so that units of zeros can be trained; at least zero.
        units: ``"first"``: a unit is one index of the first dimension, an output of ``nn.Linear`` and ``nn.Conv2d``, as in the paper's
            PyTorch versions and timm. ``"last"``: of the last dimension, for weights in JAX's layout, as in optax (which takes each index
            of the last two for a tensor of three dimensions; that is not offered).

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Brock et al. 2021, https://arxiv.org/abs/2102.06171, section 4.1.
    """

    limit: NonNegative = 0.01
    eps: NonNegative = 1e-3
    units: Units = "first"

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the clipped updates."""
        limit, eps = self.at(ctx.step, "limit", "eps")

        def norms(x: Tensor) -> Tensor:
            """The norm of each unit, float64."""
            wide = x.double()
            if x.ndim < 2:
                rows = wide.reshape(1, -1)
            else:
                rows = (wide if self.units == "first" else wide.movedim(-1, 0)).reshape(
                    x.shape[0 if self.units == "first" else -1], -1
                )
            return sqrt(mean(materialize(rows * rows), -1) * rows.shape[-1])

        def clipped(u: Tensor, p: Tensor) -> Tensor:
            if not u.numel():
                return u
            found, greatest = norms(u), limit * _at_least(norms(p), eps)
            factors = materialize(torch.where(found > greatest, greatest / found, 1.0).to(u.dtype))
            places = [1] * u.ndim
            if u.ndim > 1:
                places[0 if self.units == "first" else -1] = -1
            return u * factors.reshape(places)

        return tree.map(clipped, updates, params), state


@dataclass(frozen=True, slots=True)
class ClipByRms(Memoryless, Elementwise):
    r"""Divide each parameter's update by :math:`\max(1, \text{RMS}(u) / d)`, where RMS is its root mean square.

    Args:
        limit: :math:`d`, above zero; unit of the update.

    Raises:
        ValueError: ``limit`` out of range.

    Reference:
        Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, section 6; optax's ``clip_by_block_rms``.
    """

    reduces = True
    reads_weights = False
    per_tensor = True
    limit: NonNegative = 1.0

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the clipped updates."""
        limit = at(self.limit, ctx.step, name="limit")

        def factor(square: Tensor) -> Tensor:
            # No root of zero, which has no derivative.
            above = square > limit * limit
            return torch.where(above, limit / sqrt(torch.where(above, square, 1.0)), 1.0)

        def clipped(squares: P) -> tuple[P, Empty]:
            factors = ctx.per_tensor.expand(tree.map(factor, squares), updates)
            return tree.elementwise(lambda u, f: u * f, updates, factors), state

        return ctx.request(ctx.per_tensor.mean_of_squares(updates), clipped)


def _at_least(x: Tensor, low: float | Tensor) -> Tensor:
    return torch.maximum(x, beside(low, x, x.dtype))


clip_by_unit_norm = ClipByUnitNorm
clip_by_rms = ClipByRms
