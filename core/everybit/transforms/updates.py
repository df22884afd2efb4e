"""Transforms of updates without memory: scaling, signs, limits, and gradients cleaned before anything else sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Finite,
    Hyperparameter,
    NonNegative,
    at,
    clamp,
    materialize,
    mean,
    require,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SumOfSquares, WholeTensors

P = TypeVar("P")


@tree.state
class Empty:
    """The empty state of a transform."""


class Memoryless:
    """Base class of transforms without memory, beside the class that says how they may be cut."""

    __slots__ = ()

    def init(self, params: object) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()


@dataclass(frozen=True, slots=True)
class Identity(Memoryless, Elementwise):
    """Pass updates on as they are."""

    reads_weights = False

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates as they are given."""
        return updates, state


@dataclass(frozen=True, slots=True)
class SetToZero(Memoryless, Elementwise):
    """Replace updates by zero, for frozen parameters, which are not decayed either."""

    reads_weights = False

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return zeros in place of the updates."""
        return tree.zeros_like(updates), state


@dataclass(frozen=True, slots=True)
class ScaleBySign(Memoryless, Elementwise):
    """Keep only the sign: -1, 0 or 1 (signSGD, Bernstein et al. 2018, https://arxiv.org/abs/1802.04434)."""

    reads_weights = False

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the signs of the updates."""
        return tree.elementwise(torch.sign, updates), state


@dataclass(frozen=True, slots=True)
class Scale(Memoryless, Elementwise):
    """Multiply by a number.

    Args:
        factor: The number; any sign.
    """

    reads_weights = False
    factor: Finite = 1.0

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates, ``factor * updates``."""
        factor = at(self.factor, ctx.step, name="factor")
        return tree.elementwise(lambda u: factor * u, updates), state


@dataclass(frozen=True, slots=True)
class ScaleByLearningRate(Memoryless, Elementwise):
    """Multiply by minus the learning rate: from a direction of ascent to a step of descent.

    Args:
        learning_rate: Non-negative. Zero is safe: it is not a divisor.
    """

    reads_weights = False
    learning_rate: NonNegative = 1e-3

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates, ``-learning_rate * updates``."""
        learning_rate = at(self.learning_rate, ctx.step, name="learning_rate")
        return tree.elementwise(lambda u: -learning_rate * u, updates), state


@dataclass(frozen=True, slots=True)
class Clip(Memoryless, Elementwise):
    """Limit every element to [-limit, limit].

    Args:
        limit: Non-negative; same unit as the updates.
    """

    reads_weights = False
    limit: NonNegative = 1.0

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the clipped updates; NaN stays NaN."""
        limit = at(self.limit, ctx.step, name="limit")
        return tree.elementwise(lambda u: clamp(u, -limit, limit), updates), state


@dataclass(frozen=True, slots=True)
class ClipByGlobalNorm(Memoryless, Elementwise):
    """Scale all updates by one factor so that their joint Euclidean norm is at most ``limit``.

    The norm is taken over everything that shares the step: on one process and on shards it is the same number.
    As ``torch.nn.utils.clip_grad_norm_``, without its 1e-6 in the denominator.

    Args:
        limit: Non-negative; same unit as the updates.
    """

    reduces = True
    reads_weights = False
    limit: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        # Infinity is torch's and optax's way to measure and not clip.
        if not (isinstance(self.limit, float) and self.limit == math.inf):
            require("limit", self.limit, 0.0)

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates; a norm that is not finite makes them NaN or zero, which ``apply_if_finite`` catches."""
        limit = at(self.limit, ctx.step, name="limit")

        def clipped(square: Tensor) -> tuple[P, Empty]:
            # In float64: with a limit that is a float64 tensor a float32 norm would be compared and divided otherwise.
            norm = sqrt(square)
            # Compared rather than divided first, since the norm may be zero.
            factor = materialize(torch.where(norm > limit, limit / norm, 1.0))
            return tree.elementwise(lambda u: u * factor, updates), state

        return ctx.request(SumOfSquares(updates), clipped)


identity = Identity
set_to_zero = SetToZero
scale_by_sign = ScaleBySign
scale = Scale
scale_by_learning_rate = ScaleByLearningRate
clip = Clip
clip_by_global_norm = ClipByGlobalNorm


@dataclass(frozen=True, slots=True)
class ZeroNans(Memoryless, Elementwise):
    """Replace elements that are NaN by zero.

    Infinite elements stay, as in optax; see ``infinite``. To leave a whole step out use :func:`everybit.apply_if_finite`.

    Args:
        infinite: Replace infinite elements, too.
    """

    reads_weights = False
    infinite: bool = False

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates with zeros in the place of NaN and infinities."""

        def cleaned(u: Tensor) -> Tensor:
            return torch.where(torch.isfinite(u) if self.infinite else ~torch.isnan(u), u, 0.0)

        return tree.elementwise(cleaned, updates), state


@dataclass(frozen=True, slots=True)
class Centralize(Memoryless, WholeTensors):
    """Subtract from each row of an update the row's mean: gradient centralization.

    A row is what belongs to one index of the first dimension, an output unit of ``nn.Linear`` and ``nn.Conv2d``; vectors and numbers pass
    unchanged. Rows must be whole: parameters are not cut.

    Reference:
        Yong et al. 2020, https://arxiv.org/abs/2004.01461; optax's ``centralize`` is the same.
    """

    reads_weights = False

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the centred updates."""

        def centred(u: Tensor) -> Tensor:
            if u.ndim < 2 or not u.numel():
                return u
            rows = u.reshape(len(u), -1)
            return (rows - mean(rows, -1)[:, None]).reshape(u.shape)

        return tree.map(centred, updates), state


@dataclass(frozen=True, slots=True)
class NormalizeByGlobalNorm(Memoryless, Elementwise):
    """Divide all updates by their joint Euclidean norm, over everything that shares the step: optax's ``normalize_by_update_norm``.

    Args:
        scale: Norm of the result; above zero.
        eps: Added to the norm, at least zero. Updates that are all zero stay zero if it is above zero.

    Raises:
        ValueError: A hyperparameter out of range.
    """

    reduces = True
    reads_weights = False
    scale: NonNegative = 1.0
    eps: NonNegative = 1e-6

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates."""
        scale, eps = self.at(ctx.step, "scale", "eps")

        def scaled(square: Tensor) -> tuple[P, Empty]:
            factor = materialize(scale / (sqrt(square) + eps))
            return tree.elementwise(lambda u: u * factor, updates), state

        return ctx.request(SumOfSquares(updates), scaled)


zero_nans = ZeroNans
centralize = Centralize
normalize_by_global_norm = NormalizeByGlobalNorm
