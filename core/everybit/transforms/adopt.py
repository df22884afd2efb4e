"""ADOPT's direction: gradients divided by the root of the running square before them, and then averaged."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, clamp, materialize, require, require_count, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class AdoptState(Generic[P]):
    """The running mean of normalised gradients, and that of the gradient's square."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdopt(Elementwise):
    r"""Average gradients that are divided by the root of the square known before them.

    .. math::
        v_1 = g_1^2 \qquad u_1 = m_1 = 0

        n_t = \operatorname{clip}\left(\frac{g_t}{\max(\sqrt{v_{t-1}}, \epsilon)},\; (t-1)^\kappa\right) \qquad
        u_t = m_t = \beta_1 m_{t-1} + (1-\beta_1) n_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

    The first update only starts the square, and is zero. There is no bias correction.

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: The least denominator; same unit as the gradient.
        clip_power: :math:`\kappa`: normalised gradients are limited to the power of the number of updates before; None: they are not
            limited, as in the paper's Algorithm 1.
        nesterov: Look ahead: :math:`u_t = \beta_1 m_t + (1-\beta_1) n_t`, as optax's option.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Taniguchi et al. 2024, https://arxiv.org/abs/2411.02853, Algorithm 2 (with clipping).
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.9999
    eps: Hyperparameter = 1e-6
    _: KW_ONLY
    clip_power: Hyperparameter | None = 0.25
    nesterov: bool = False

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        if self.clip_power is not None:
            require("clip_power", self.clip_power, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdoptState[P]:
        """Return moments of zero for all parameters."""
        return AdoptState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdoptState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdoptState[P]]:
        """Normalise by the old square, average, and update the square."""
        step = require_step(ctx.step, "scale_by_adopt")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps = at(self.eps, step, name="eps") * torch.ones_like(step, dtype=torch.float64)
        first = step == 1
        limit = None
        if self.clip_power is not None:
            limit = materialize((step - 1).double() ** at(self.clip_power, step, name="clip_power"))

        def normalised(g: Tensor, v: Tensor) -> Tensor:
            n = g / torch.maximum(sqrt(v), eps.to(v.dtype))
            return n if limit is None else clamp(n, -limit, limit)

        def mean(n: Tensor, m: Tensor) -> Tensor:
            # Chosen, not multiplied by zero: at the first update the quotient may be infinite.
            return torch.where(first, m, b1 * m + (1 - b1) * n)

        shares = tree.elementwise(normalised, updates, state.variance)
        momentum = tree.elementwise(mean, shares, state.momentum)
        variance = tree.elementwise(
            lambda g, v: torch.where(first, g * g, b2 * v + (1 - b2) * (g * g)), updates, state.variance
        )
        ahead = tree.elementwise(mean, shares, momentum) if self.nesterov else tree.map(torch.clone, momentum)
        return ahead, AdoptState(momentum, variance)


@dataclass(frozen=True, slots=True)
class BeginAfter(Elementwise):
    """Replace updates by zero at the first ``steps`` updates; transforms before it see them and fill their state.

    Args:
        steps: A number of updates, at least 0.

    Raises:
        ValueError: ``steps`` is no whole number, or negative.
    """

    reads_weights: ClassVar[bool] = False
    steps: int = 1

    def __post_init__(self) -> None:
        require_count("steps", self.steps, "a number of updates", 0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates, or zeros."""
        begun = require_step(ctx.step, "begin_after") > self.steps
        return tree.elementwise(lambda u: torch.where(begun, u, 0.0), updates), state


scale_by_adopt = ScaleByAdopt
begin_after = BeginAfter
