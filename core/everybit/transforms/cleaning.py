"""Transforms of gradients before anything else sees them: no NaNs, no mean, noise, a norm of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Key, at, materialize, mean, normal, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SumOfSquares, WholeTensors
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ZeroNans(Elementwise):
    """Replace elements that are NaN by zero.

    Infinite elements stay, as in optax; see ``infinite``. To leave a whole step out use :func:`everybit.apply_if_finite`.

    Args:
        infinite: Replace infinite elements, too.
    """

    reads_weights: ClassVar[bool] = False
    infinite: bool = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates with zeros in the place of NaN and infinities."""

        def cleaned(u: Tensor) -> Tensor:
            return torch.where(torch.isfinite(u) if self.infinite else ~torch.isnan(u), u, 0.0)

        return tree.elementwise(cleaned, updates), state


@dataclass(frozen=True, slots=True)
class Centralize(WholeTensors):
    """Subtract from each row of an update the row's mean: gradient centralization.

    A row is what belongs to one index of the first dimension, an output unit of ``nn.Linear`` and ``nn.Conv2d``; vectors and numbers pass
    unchanged. Rows must be whole: parameters are not cut.

    Reference:
        Yong et al. 2020, https://arxiv.org/abs/2004.01461; optax's ``centralize`` is the same.
    """

    reads_weights: ClassVar[bool] = False

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the centred updates."""

        def centred(u: Tensor) -> Tensor:
            if u.ndim < 2 or not u.numel():
                return u
            rows = u.reshape(len(u), -1)
            return (rows - mean(rows, -1)[:, None]).reshape(u.shape)

        return tree.map(centred, updates), state


@dataclass(frozen=True, slots=True)
class AddNoise(Elementwise):
    r"""Add Gaussian noise with a variance that falls with the step: :math:`\eta / t^\gamma`, where t is 1 at the first update.

    The noise of an element depends on the optimizer's seed, the update, the place in the chain and the element's index in the model: it is
    the same on one process and on shards, and after a resume. It is made in float64 and then rounded (Box and Muller 1958); its greatest
    possible magnitude is 5.9 standard deviations. optax draws other numbers of the same distribution.

    Args:
        eta: Variance at the first update, at least zero.
        gamma: Power with which the variance falls, at least zero.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Neelakantan et al. 2015, https://arxiv.org/abs/1511.06807.
    """

    draws: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = False
    eta: Hyperparameter = 0.01
    gamma: Hyperparameter = 0.55

    def __post_init__(self) -> None:
        require("eta", self.eta, 0.0)
        require("gamma", self.gamma, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates with noise added."""
        step = require_step(ctx.step, "add_noise").double()
        variance = at(self.eta, ctx.step, name="eta") * step ** -at(self.gamma, ctx.step, name="gamma")
        deviation = materialize(sqrt(materialize(variance)))

        def noisy(u: Tensor, radius: Key, angle: Key) -> Tensor:
            return u + materialize((deviation * normal(u, radius, angle)).to(u.dtype))

        return tree.elementwise(noisy, updates, ctx.keys("radius", updates), ctx.keys("angle", updates)), state


@dataclass(frozen=True, slots=True)
class NormalizeByGlobalNorm(Elementwise):
    """Divide all updates by their joint Euclidean norm, over everything that shares the step: optax's ``normalize_by_update_norm``.

    Args:
        scale: Norm of the result; above zero.
        eps: Added to the norm, at least zero. Updates that are all zero stay zero if it is above zero.

    Raises:
        ValueError: A hyperparameter out of range.
    """

    reads_weights: ClassVar[bool] = False
    scale: Hyperparameter = 1.0
    eps: Hyperparameter = 1e-6

    def __post_init__(self) -> None:
        require("scale", self.scale, 0.0)
        require("eps", self.eps, 0.0)

    @property
    def reduces(self) -> bool:
        """True: it requests the norm of all updates."""
        return True

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the scaled updates."""
        scale, eps = at(self.scale, ctx.step, name="scale"), at(self.eps, ctx.step, name="eps")

        def scaled(square: Tensor) -> tuple[P, Empty]:
            factor = materialize(scale / (sqrt(square) + eps))
            return tree.elementwise(lambda u: u * factor, updates), state

        return ctx.request(SumOfSquares(updates), scaled)


zero_nans = ZeroNans
centralize = Centralize
add_noise = AddNoise
normalize_by_global_norm = NormalizeByGlobalNorm
