"""Running means: of updates, and of squares to divide by; Adam taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from everybit.base import Hyperparameter, Slot, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.radam import rectification

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class RunningMeanState(Generic[P]):
    """The running mean."""

    momentum: Slot[P]


@dataclass(frozen=True, slots=True)
class RunningMean(Elementwise):
    r"""Average updates, :math:`m_t = \beta m_{t-1} + (1-\beta) u_t`.

    Args:
        decay: :math:`\beta`, in [0, 1).
        debias: Divide the result by :math:`1-\beta^t`.
        nesterov: Pass on :math:`\beta m_t + (1-\beta) u_t`, which looks a step ahead.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.
    """

    reads_weights: ClassVar[bool] = False
    decay: Hyperparameter = 0.9
    debias: bool = False
    nesterov: bool = False

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0, open_high=True)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``momentum`` decays with ``decay``."""
        return (SlotDecay("momentum", self.decay),)

    def init(self, params: P) -> RunningMeanState[P]:
        """Return a mean of zero."""
        return RunningMeanState(tree.zeros_like(params))

    def update(
        self, updates: P, state: RunningMeanState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, RunningMeanState[P]]:
        """Update the mean, and return it."""
        decay = at(self.decay, ctx.step, name="decay")
        momentum = tree.elementwise(lambda u, m: decay * m + (1 - decay) * u, updates, state.momentum)
        passed = momentum
        if self.nesterov:
            passed = tree.elementwise(lambda u, m: decay * m + (1 - decay) * u, updates, momentum)
        if self.debias:
            unbias = materialize(1 / bias_correction(decay, require_step(ctx.step, "running_mean with debias")))
            passed = tree.elementwise(lambda m: m * unbias, passed)
        return passed, RunningMeanState(momentum)


@tree.state
@dataclass(frozen=True, slots=True)
class RunningSquareState(Generic[P]):
    """The running square of the gradient."""

    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByRunningSquare(Elementwise):
    r"""Divide by the root of the running square, with Adam's bias correction: Adam with :math:`\beta_1 = 0`, without a slot for the mean.

    .. math::
        v_t = \beta v_{t-1} + (1-\beta) g_t^2 \qquad u_t = \frac{g_t}{\sqrt{v_t / (1-\beta^t)} + \epsilon}

    Args:
        decay: :math:`\beta`, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        once_trusted: Leave gradients as they are until RAdam would trust the square: until its length is above 4
            (:class:`everybit.scale_by_radam`).

    Raises:
        ValueError: A hyperparameter out of range, or not finite.
    """

    reads_weights: ClassVar[bool] = False
    decay: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8
    once_trusted: bool = False

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``variance`` decays with ``decay``."""
        return (SlotDecay("variance", self.decay, squares=True),)

    def init(self, params: P) -> RunningSquareState[P]:
        """Return a square of zero."""
        return RunningSquareState(tree.zeros_like(params))

    def update(
        self, updates: P, state: RunningSquareState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, RunningSquareState[P]]:
        """Update the square, and divide by its root."""
        step = require_step(ctx.step, "scale_by_running_square")
        decay, eps = at(self.decay, step, name="decay"), at(self.eps, step, name="eps")
        unbias = materialize(1 / bias_correction(decay, step))
        variance = tree.elementwise(lambda g, v: decay * v + (1 - decay) * (g * g), updates, state.variance)
        moved = tree.elementwise(lambda g, v: g / (sqrt(v * unbias) + eps), updates, variance)
        if self.once_trusted:
            is_trusted, _ = rectification(decay, step, 4.0)
            moved = tree.elementwise(lambda u, g: torch.where(is_trusted, u, g), moved, updates)
        return moved, RunningSquareState(variance)


running_mean = RunningMean
scale_by_running_square = ScaleByRunningSquare
