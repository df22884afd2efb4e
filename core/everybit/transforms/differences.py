"""Preconditioners that look at differences of successive gradients: Adan and MARS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, Rate, Slot, at, bias_correction, materialize, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


@tree.state
class AdanState(Generic[P]):
    """Running means of the gradient, of its differences, and of the square of both; and the last gradient."""

    momentum: Slot[P]
    difference: Slot[P]
    variance: Slot[P]
    last_gradient: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdan(Elementwise):
    r"""Divide the mean of gradients, looking ahead by the mean of their differences, by the root of the running square.

    .. math::
        \Delta_1 = 0 \qquad \Delta_t = g_t - g_{t-1} \qquad
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        d_t = \beta_2 d_{t-1} + (1-\beta_2) \Delta_t

        n_t = \beta_3 n_{t-1} + (1-\beta_3)(g_t + \kappa \Delta_t)^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t) + \kappa d_t / (1-\beta_2^t)}{\sqrt{n_t / (1-\beta_3^t) + \epsilon_\text{root}} + \epsilon}

    Decay rates are those of the authors' code; the paper's :math:`\beta` are one minus them.

    Args:
        b1: Decay rate of the gradients' mean, in [0, 1).
        b2: Decay rate of the differences' mean, in [0, 1).
        b3: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        eps_root: Added inside the root; unit of the gradient squared.
        look_ahead: :math:`\kappa`, at least zero; None: ``b2``, as in the paper (:math:`1-\beta_2` of its own), the authors' code and
            timm. optax has ``1 - b2``, 0.08 in the place of 0.92.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Xie et al. 2022, https://arxiv.org/abs/2208.06677, Algorithm 1.
    """

    reads_weights = False
    b1: Rate = 0.98
    b2: Rate = 0.92
    b3: Rate = 0.99
    eps: NonNegative = 1e-8
    eps_root: NonNegative = 0.0
    look_ahead: NonNegative | None = None

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``difference`` with ``b2``, ``variance`` with ``b3``; ``last_gradient`` is replaced."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("difference", self.b2),
            SlotDecay("variance", self.b3, squares=True),
            SlotDecay("last_gradient", 0.0),
        )

    def init(self, params: P) -> AdanState[P]:
        """Return moments of zero for all parameters."""
        momentum, difference, variance, last = (tree.zeros_like(params) for _ in range(4))
        return AdanState(momentum, difference, variance, last)

    def update(self, updates: P, state: AdanState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdanState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_adan")
        b1, b2, b3 = (at(getattr(self, name), step, name=name) for name in ("b1", "b2", "b3"))
        eps, eps_root = self.at(step, "eps", "eps_root")
        ahead = b2 if self.look_ahead is None else at(self.look_ahead, step, name="look_ahead")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b3))
        unbias_difference = materialize(ahead / bias_correction(b2, step))

        change = tree.elementwise(lambda g, last: torch.where(step == 1, 0.0, g - last), updates, state.last_gradient)
        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        difference = tree.elementwise(lambda c, d: b2 * d + (1 - b2) * c, change, state.difference)

        def square(g: Tensor, c: Tensor, n: Tensor) -> Tensor:
            looked = g + ahead * c
            return b3 * n + (1 - b3) * (looked * looked)

        variance = tree.elementwise(square, updates, change, state.variance)

        def direction(m: Tensor, d: Tensor, n: Tensor) -> Tensor:
            return (m * unbias_mean + d * unbias_difference) / (sqrt(n * unbias_square + eps_root) + eps)

        moved = tree.elementwise(direction, momentum, difference, variance)
        return moved, AdanState(momentum, difference, variance, tree.map(torch.clone, updates))


@dataclass(frozen=True, slots=True)
class ProximalDecay(Memoryless, Elementwise):
    r"""Divide the moved weights by :math:`1 + \eta\lambda`: weight decay as a proximal step, after the learning rate.

    .. math::
        p \leftarrow (p + u) / (1 + \eta\lambda)

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        learning_rate: :math:`\eta`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Xie et al. 2022, https://arxiv.org/abs/2208.06677, Algorithm 1, line 7; Zhuang et al. 2022, https://arxiv.org/abs/2202.00089.
    """

    weight_decay: NonNegative = 0.0
    learning_rate: NonNegative = 1e-3

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return how far the shrunk weights are from those before."""
        step = require_step(ctx.step, "proximal_decay")
        decay = at(self.weight_decay, step, name="weight_decay") * torch.ones_like(step, dtype=torch.float64)
        decay = materialize(decay * at(self.learning_rate, step, name="learning_rate"))
        keep = materialize(1 / (1 + decay))

        def shrunk(u: Tensor, p: Tensor) -> Tensor:
            # Without decay, zero times an infinite weight would be NaN.
            return torch.where(decay == 0, u, (u - decay * p) * keep)

        return tree.elementwise(shrunk, updates, params), state


scale_by_adan = ScaleByAdan
proximal_decay = ProximalDecay


@tree.state
class VarianceReductionState(Generic[P]):
    """The last gradient."""

    last_gradient: Slot[P]


@dataclass(frozen=True, slots=True)
class ReduceVariance(Elementwise):
    r"""Correct gradients by their change since the last update, and limit each tensor's norm.

    .. math::
        c_t = g_t + \gamma \frac{\beta}{1-\beta} (g_t - g_{t-1}) \qquad
        u_t = c_t / \max(1, \lVert c_t \rVert / \rho)

    The gradient before is that of the batch before (MARS-approx). The first update has :math:`c_1 = g_1`.

    Args:
        gamma: :math:`\gamma`, at least zero.
        b1: :math:`\beta`, in [0, 1): the decay rate of the mean that follows.
        max_norm: :math:`\rho`, at least zero, the largest norm of a tensor's corrected gradient; None: no limit.
        zero_before: Take zero for the gradient before the first, as the authors' code: :math:`c_1 = (1 + \gamma\beta/(1-\beta)) g_1`.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Yuan et al. 2024, https://arxiv.org/abs/2411.10438, Algorithm 2 and eq. 2.6.
    """

    reduces = True
    reads_weights = False
    per_tensor = True
    gamma: NonNegative = 0.025
    b1: Rate = 0.95
    max_norm: NonNegative | None = 1.0
    zero_before: bool = False

    def decays(self) -> tuple[SlotDecay, ...]:
        """``last_gradient`` is replaced at every update."""
        return (SlotDecay("last_gradient", 0.0),)

    def init(self, params: P) -> VarianceReductionState[P]:
        """Return gradients of zero."""
        return VarianceReductionState(tree.zeros_like(params))

    def update(
        self, updates: P, state: VarianceReductionState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, VarianceReductionState[P]]:
        """Correct the gradient, and remember it."""
        step = require_step(ctx.step, "reduce_variance")
        b1 = at(self.b1, step, name="b1")
        gain = at(self.gamma, step, name="gamma") * (b1 / (1 - b1)) * torch.ones_like(step, dtype=torch.float64)
        gain = materialize(gain if self.zero_before else torch.where(step == 1, 0.0, gain))
        corrected = tree.elementwise(lambda g, last: g + gain * (g - last), updates, state.last_gradient)
        after = VarianceReductionState(tree.map(torch.clone, updates))
        if self.max_norm is None:
            return corrected, after
        most = at(self.max_norm, step, name="max_norm")

        def factor(square: Tensor) -> Tensor:
            above = square > most * most
            return torch.where(above, most / sqrt(torch.where(above, square, 1.0)), 1.0)

        def limited(squares: P) -> tuple[P, VarianceReductionState[P]]:
            factors = ctx.per_tensor.expand(tree.map(factor, squares), updates)
            return tree.elementwise(lambda c, f: c * f, corrected, factors), after

        return ctx.request(ctx.per_tensor.sum_of_squares(corrected), limited)


reduce_variance = ReduceVariance
