"""Preconditioners that follow Adam with another second moment, or trust it later."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    FixedFinite,
    FixedNonNegative,
    Hyperparameter,
    NonNegative,
    Range,
    Rate,
    Scalar,
    UpdatesFromZero,
    at,
    bias_correction,
    clamp,
    materialize,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam import AdamState, TwoMoments
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


Threshold = Annotated[Hyperparameter, Range(4.0)]
"""Where RAdam begins to divide: at least 4."""


@dataclass(frozen=True, slots=True)
class ScaleByRadam(TwoMoments):
    r"""Adam's direction times the rectification :math:`r_t`; before it is known, the unbiased mean alone.

    .. math::
        \rho_\infty = \frac{2}{1-\beta_2} - 1 \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t} \qquad
        r_t = \sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}
    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = \frac{m_t}{1-\beta_1^t} \begin{cases}
            r_t \sqrt{1-\beta_2^t} \,/\, (\sqrt{v_t} + \epsilon) & \rho_t > \theta \\ 1 & \text{else} \end{cases}

    Args:
        b1: :math:`\beta_1`, decay rate of the mean, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the square, in [0, 1).
        eps: Added to the root before its bias is corrected, as in torch; same unit as the gradient.
        threshold: :math:`\theta`, at least 4, which is the paper's; torch's is 5.
        eps_after_correction: Add ``eps`` to :math:`\sqrt{v_t / (1-\beta_2^t)}` instead, as optax does.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Liu et al. 2020, https://arxiv.org/abs/1908.03265, Algorithm 2, as in ``torch.optim.RAdam``.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-8
    _: KW_ONLY
    threshold: Threshold = 5.0
    eps_after_correction: bool = False

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and precondition by them where the second one can be trusted."""
        step = require_step(ctx.step, "scale_by_radam")
        b1, b2, eps = self.at(step, "b1", "b2", "eps")
        correction = bias_correction(b2, step)
        is_trusted, factor = rectification(b2, step, at(self.threshold, step, name="threshold"))
        unbias_mean, root = materialize(1 / bias_correction(b1, step)), materialize(sqrt(correction))

        def moved(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
            mean = m * unbias_mean
            norm = sqrt(v) / root + eps if self.eps_after_correction else (sqrt(v) + eps) / root
            return torch.where(is_trusted, factor * mean / norm, mean), m, v

        moves, momentum, variance = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, AdamState(momentum, variance)


def rectification(b2: Scalar, step: Tensor, threshold: Scalar) -> tuple[Tensor, Tensor]:
    r"""Whether :math:`\rho_t` is above the threshold, at least 4, and :math:`r_t` if it is; else 1. 0-d, float64."""
    number = step.double()
    rate = torch.zeros_like(number) + b2  # float64, of a float32 tensor too
    longest = 2 / (1 - rate) - 1
    length = longest - 2 * number * rate**number / bias_correction(b2, step)
    is_trusted = length > threshold
    # Otherwise a root of a negative number would have a derivative of NaN although it is not used.
    length = torch.where(is_trusted, length, longest + 5.0)
    ratio = ((length - 4) * (length - 2) * longest) / ((longest - 4) * (longest - 2) * length)
    return is_trusted, materialize(sqrt(torch.where(is_trusted, ratio, 1.0)))


scale_by_radam = ScaleByRadam


@dataclass(frozen=True, slots=True)
class ScaleByBelief(TwoMoments):
    r"""Divide the gradient's running mean by the root of the running square of its distance from the mean.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        s_t = \beta_2 s_{t-1} + (1-\beta_2) (g_t - m_t)^2 + \epsilon_\text{root} \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{s_t / (1-\beta_2^t)} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        eps_root: Added to the square at every update; unit of the gradient squared.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Zhuang et al. 2020, https://arxiv.org/abs/2010.07468, Algorithm 2.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-16
    eps_root: NonNegative = 1e-16

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_belief")
        b1, b2, eps, eps_root = self.at(step, "b1", "b2", "eps", "eps_root")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))

        def moved(g: Tensor, m: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            m = b1 * m + (1 - b1) * g
            error = g - m
            s = (b2 * s + (1 - b2) * (error * error)) + eps_root
            return (m * unbias_mean) / (sqrt(s * unbias_square) + eps), m, s

        moves, momentum, variance = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, AdamState(momentum, variance)


scale_by_belief = ScaleByBelief


@dataclass(frozen=True, slots=True)
class ScaleByYogi(Elementwise):
    r"""Divide the gradient's running mean by the root of a square that follows the gradient's sign by sign.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = v_{t-1} - (1-\beta_2) \operatorname{sign}(v_{t-1} - g_t^2)\, g_t^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: One minus the share of the squared gradient by which the square moves, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        initial_mean: Value of :math:`m_0`; 0 in the paper, 1e-6 in optax.
        initial_square: Value of :math:`v_0`, at least zero.

    Raises:
        TypeError: A schedule for an initial value.
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Zaheer et al. 2018, https://papers.nips.cc/paper/8186, Algorithm 2, with Adam's bias correction as in optax.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-3
    _: KW_ONLY
    initial_mean: FixedFinite = 0.0
    initial_square: FixedNonNegative = 1e-6

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``; ``variance`` is a sum, with terms that are small beside it."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", 1.0, squares=True)

    def init(self, params: P) -> AdamState[P]:
        """Return moments of the initial values for all parameters."""
        mean, square = (at(x, None, name="initial") for x in (self.initial_mean, self.initial_square))
        return AdamState(
            tree.elementwise(lambda p: torch.zeros_like(p) + mean, params),
            tree.elementwise(lambda p: torch.zeros_like(p) + square, params),
        )

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_yogi")
        b1, b2, eps = self.at(step, "b1", "b2", "eps")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))

        def moved(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            m, square = b1 * m + (1 - b1) * g, g * g
            v = (v - (1 - b2) * torch.sign(v - square) * square).clamp(min=0.0)
            return (m * unbias_mean) / (sqrt(v * unbias_square) + eps), m, v

        moves, momentum, variance = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, AdamState(momentum, variance)


scale_by_yogi = ScaleByYogi


@dataclass(frozen=True, slots=True)
class ScaleByStableAdam(TwoMoments):
    r"""Adam's direction and decoupled decay, over the root mean square of each tensor's normalised gradients where that is above 1.

    .. math::
        R_t = \sqrt{\operatorname{mean} \frac{g_t^2}{\max(\hat v_t, \epsilon^2)}} \qquad
        u_t = \left(\frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} + \lambda p_t\right) / \max(1, R_t)

    with Adam's :math:`\hat m_t` and :math:`\hat v_t`, which hold :math:`g_t` already. The mean is over a whole tensor, wherever its pieces
    are.

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        weight_decay: :math:`\lambda`, at least zero; made smaller with the rest of the step, as in the authors' code and torch-optimi.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Wortsman et al. 2023, https://arxiv.org/abs/2304.13013, Algorithm 2.
    """

    reduces = True
    per_tensor = True
    b1: Rate = 0.9
    b2: Rate = 0.99
    eps: NonNegative = 1e-6
    weight_decay: NonNegative = 0.0

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, precondition by them, and limit each tensor's step."""
        step = require_step(ctx.step, "scale_by_stable_adam")
        b1, b2, eps, decay = self.at(step, "b1", "b2", "eps", "weight_decay")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(b, step)) for b in (b1, b2))
        least = materialize(eps * torch.ones_like(step, dtype=torch.float64))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)
        # The root of a maximum is the maximum of roots, and does not underflow as the square of eps does.
        shares = tree.elementwise(
            lambda g, v: g / torch.maximum(sqrt(v * unbias_square), least.to(v.dtype)), updates, variance
        )

        def factor(square: Tensor) -> Tensor:
            above = square > 1
            return torch.where(above, 1 / sqrt(torch.where(above, square, 1.0)), 1.0)

        def direction(m: Tensor, v: Tensor, p: Tensor, f: Tensor) -> Tensor:
            u = (m * unbias_mean) / (sqrt(v * unbias_square) + eps)
            if isinstance(decay, Tensor):
                u = torch.where(decay == 0, u, u + decay * p)
            elif decay != 0:
                u = u + decay * p
            return u * f

        def limited(squares: P) -> tuple[P, AdamState[P]]:
            expanded = ctx.per_tensor.expand(tree.map(factor, squares), updates)
            return tree.elementwise(direction, momentum, variance, params, expanded), AdamState(momentum, variance)

        return ctx.request(ctx.per_tensor.mean_of_squares(shares), limited)


scale_by_stable_adam = ScaleByStableAdam


@dataclass(frozen=True, slots=True)
class ScaleByAdopt(TwoMoments):
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

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.9999
    eps: NonNegative = 1e-6
    _: KW_ONLY
    clip_power: NonNegative | None = 0.25
    nesterov: bool = False

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Normalise by the old square, average, and update the square."""
        step = require_step(ctx.step, "scale_by_adopt")
        b1, b2 = self.at(step, "b1", "b2")
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
        return ahead, AdamState(momentum, variance)


@dataclass(frozen=True, slots=True)
class BeginAfter(Memoryless, Elementwise):
    """Replace updates by zero at the first ``steps`` updates; transforms before it see them and fill their state.

    Args:
        steps: A number of updates, at least 0.

    Raises:
        ValueError: ``steps`` is no whole number, or negative.
    """

    reads_weights = False
    steps: UpdatesFromZero = 1

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates, or zeros."""
        begun = require_step(ctx.step, "begin_after") > self.steps
        return tree.elementwise(lambda u: torch.where(begun, u, 0.0), updates), state


scale_by_adopt = ScaleByAdopt
begin_after = BeginAfter
