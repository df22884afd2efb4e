"""Clipping with a relative limit: to the weights, to the tensor's own size, or to the norms of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, Rate, Updates, at, beside, materialize, mean, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SumOfSquares, WholeTensors
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


@tree.state
class ZClipState:
    """Running mean and variance of the gradients' norms; float64, 0-d."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, slots=True)
class ClipByZScore(Elementwise):
    r"""ZClip: scale all updates down where their norm is an outlier among the norms before.

    .. math::
        z = \frac{\|g_t\| - \mu_{t-1}}{\sigma_{t-1}} \qquad
        n_t = \begin{cases} \mu_{t-1} + \frac{z_\text{max}^2}{z} \sigma_{t-1} & z > z_\text{max} \\ \|g_t\| & \text{else} \end{cases} \qquad
        g_t \leftarrow \frac{n_t}{\|g_t\|} g_t

    and then :math:`\mu_t = \alpha\mu_{t-1} + (1-\alpha) n_t` and :math:`\sigma_t^2 = \alpha\sigma_{t-1}^2 + (1-\alpha)(n_t - \mu_t)^2`.
    The first ``warmup`` updates are not clipped, and mean and variance are those of all norms so far. The norm is taken over
    everything that shares the step. One that is not finite spoils the running mean: put :func:`everybit.apply_if_finite` around.

    Args:
        decay: :math:`\alpha`, in [0, 1).
        limit: :math:`z_\text{max}`, above zero.
        warmup: Updates without clipping, at least 1.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Kumar et al. 2025, https://arxiv.org/abs/2504.02507 (there :math:`\alpha = 0.97`, :math:`z_\text{max} = 2.5`, 25 updates).
    """

    reduces = True
    reads_weights = False
    decay: Rate = 0.97
    limit: NonNegative = 2.5
    warmup: Updates = 25

    def init(self, params: P) -> ZClipState:
        """Return a mean and a variance of zero."""
        leaves = tree.leaves(params)
        zero = torch.zeros((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        return ZClipState(zero, zero.clone())

    def update(self, updates: P, state: ZClipState, params: P, ctx: Context = ALONE) -> tuple[P, ZClipState]:
        """Return the scaled updates, and the statistics with their norm."""
        step = require_step(ctx.step, "clip_by_z_score")
        decay, limit = self.at(step, "decay", "limit")

        def clipped(square: Tensor) -> tuple[P, ZClipState]:
            norm = sqrt(square)
            # Without a division by sigma, which may be zero: z > limit, and sigma / z is sigma**2 / (norm - mean).
            excess = norm - state.mean
            variance = state.variance
            outlier = (step > self.warmup) & (excess > limit * sqrt(variance)) & (variance > 0)
            kept = torch.where(outlier, state.mean + limit * limit * variance / torch.where(outlier, excess, 1.0), norm)
            warming, count = step <= self.warmup, step.double()
            # Welford's mean and variance of all norms so far.
            mean_now = torch.where(warming, state.mean + excess / count, decay * state.mean + (1 - decay) * kept)
            spread = variance + (excess * (norm - mean_now) - variance) / count
            running = decay * variance + (1 - decay) * (kept - mean_now).square()
            factor = materialize(torch.where(outlier, kept / torch.where(outlier, norm, 1.0), 1.0))
            statistics = ZClipState(materialize(mean_now), materialize(torch.where(warming, spread, running)))
            return tree.elementwise(lambda u: u * factor, updates), statistics

        return ctx.request(SumOfSquares(updates), clipped)


def _at_least(x: Tensor, low: float | Tensor) -> Tensor:
    return torch.maximum(x, beside(low, x, x.dtype))


clip_by_unit_norm = ClipByUnitNorm
clip_by_rms = ClipByRms
clip_by_z_score = ClipByZScore
