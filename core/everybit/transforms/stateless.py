"""Transforms without state: scaling, signs and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, at, clamp, materialize, require, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SumOfSquares

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class Empty:
    """The empty state of a transform."""


@dataclass(frozen=True, slots=True)
class Identity(Elementwise):
    """Pass updates on as they are."""

    reads_weights: ClassVar[bool] = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates as they are given."""
        return updates, state


@dataclass(frozen=True, slots=True)
class SetToZero(Elementwise):
    """Replace updates by zero, for frozen parameters, which are not decayed either."""

    reads_weights: ClassVar[bool] = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return zeros in place of the updates."""
        return tree.zeros_like(updates), state


@dataclass(frozen=True, slots=True)
class ScaleBySign(Elementwise):
    """Keep only the sign: -1, 0 or 1 (signSGD, Bernstein et al. 2018, https://arxiv.org/abs/1802.04434)."""

    reads_weights: ClassVar[bool] = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the signs of the updates."""
        return tree.elementwise(torch.sign, updates), state


@dataclass(frozen=True, slots=True)
class Scale(Elementwise):
    """Multiply by a number.

    Args:
        factor: The number; any sign.
    """

    reads_weights: ClassVar[bool] = False
    factor: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        require("factor", self.factor)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates, ``factor * updates``."""
        factor = at(self.factor, ctx.step, name="factor")
        return tree.elementwise(lambda u: factor * u, updates), state


@dataclass(frozen=True, slots=True)
class ScaleByLearningRate(Elementwise):
    """Multiply by minus the learning rate: from a direction of ascent to a step of descent.

    Args:
        learning_rate: Non-negative. Zero is safe: it is not a divisor.
    """

    reads_weights: ClassVar[bool] = False
    learning_rate: Hyperparameter = 1e-3

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates, ``-learning_rate * updates``."""
        learning_rate = at(self.learning_rate, ctx.step, name="learning_rate")
        return tree.elementwise(lambda u: -learning_rate * u, updates), state


@dataclass(frozen=True, slots=True)
class Clip(Elementwise):
    """Limit every element to [-limit, limit].

    Args:
        limit: Non-negative; same unit as the updates.
    """

    reads_weights: ClassVar[bool] = False
    limit: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        require("limit", self.limit, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the clipped updates; NaN stays NaN."""
        limit = at(self.limit, ctx.step, name="limit")
        return tree.elementwise(lambda u: clamp(u, -limit, limit), updates), state


@dataclass(frozen=True, slots=True)
class ClipByGlobalNorm(Elementwise):
    """Scale all updates by one factor so that their joint Euclidean norm is at most ``limit``.

    The norm is taken over everything that shares the step: on one process and on shards it is the same number.
    As ``torch.nn.utils.clip_grad_norm_``, without its 1e-6 in the denominator.

    Args:
        limit: Non-negative; same unit as the updates.
    """

    reads_weights: ClassVar[bool] = False
    limit: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        # Infinity is torch's and optax's way to measure and not clip.
        if not (isinstance(self.limit, float) and self.limit == math.inf):
            require("limit", self.limit, 0.0)

    @property
    def reduces(self) -> bool:
        """True: it requests the norm of all gradients."""
        return True

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

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
