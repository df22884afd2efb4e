"""Momentum: traces, running means, and averages of several lengths."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    NonNegative,
    Rate,
    Scalar,
    Share,
    Slot,
    Updates,
    at,
    bias_correction,
    is_zero,
    materialize,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam_variants import rectification

P = TypeVar("P")


@tree.state
class TraceState(Generic[P]):
    """The decaying sum, which torch calls ``momentum_buffer``."""

    momentum: Slot[P]


@dataclass(frozen=True, slots=True)
class Trace(Elementwise):
    r"""Heavy-ball or Nesterov momentum, with torch's meaning of its terms.

    .. math::
        m_1 = g_1 \qquad m_t = \mu m_{t-1} + (1-\tau) g_t \qquad
        u_t = \begin{cases} g_t + \mu m_t & \text{Nesterov} \\ m_t & \text{else} \end{cases}

    Args:
        decay: :math:`\mu`, in [0, 1].
        dampening: :math:`\tau`, in [0, 1]; as in torch, not applied to the first gradient.
        nesterov: Look ahead; needs zero dampening.

    Raises:
        ValueError: A hyperparameter out of range, or Nesterov with dampening.

    Reference:
        Sutskever et al. 2013, https://proceedings.mlr.press/v28/sutskever13.html, as in ``torch.optim.SGD``.
    """

    reads_weights = False
    decay: Share = 0.9
    _: KW_ONLY
    dampening: Share = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        Elementwise.__post_init__(self)
        # A tensor's value is not looked at: it may live on a device.
        if self.nesterov and isinstance(self.dampening, (int, float)) and self.dampening != 0:
            raise ValueError(
                f"dampening: got {self.dampening!r} with nesterov=True; Nesterov momentum needs dampening=0."
            )

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``momentum`` decays with ``decay``."""
        return (SlotDecay("momentum", self.decay),)

    def init(self, params: P) -> TraceState[P]:
        """Return a momentum of zero."""
        return TraceState(tree.zeros_like(params))

    def update(self, updates: P, state: TraceState[Any], params: P, ctx: Context = ALONE) -> tuple[P, TraceState[P]]:
        """Add the gradient to the decayed sum."""
        decay, dampening = self.at(ctx.step, "decay", "dampening")
        if is_zero(dampening):
            momentum = tree.elementwise(lambda g, m: decay * m + g, updates, state.momentum)
        else:
            step = require_step(ctx.step, "trace with dampening")
            gain = materialize(
                torch.where(step == 1, 1.0, (1 - dampening) * torch.ones_like(step, dtype=torch.float64))
            )
            momentum = tree.elementwise(lambda g, m: decay * m + gain * g, updates, state.momentum)
        if self.nesterov:
            return tree.elementwise(lambda g, m: g + decay * m, updates, momentum), TraceState(momentum)
        return momentum, TraceState(momentum)


trace = Trace


@tree.state
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

    reads_weights = False
    decay: Rate = 0.9
    debias: bool = False
    nesterov: bool = False

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

    reads_weights = False
    decay: Rate = 0.999
    eps: NonNegative = 1e-8
    once_trusted: bool = False

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
        decay, eps = self.at(step, "decay", "eps")
        unbias = materialize(1 / bias_correction(decay, step))
        variance = tree.elementwise(lambda g, v: decay * v + (1 - decay) * (g * g), updates, state.variance)
        moved = tree.elementwise(lambda g, v: g / (sqrt(v * unbias) + eps), updates, variance)
        if self.once_trusted:
            is_trusted, _ = rectification(decay, step, 4.0)
            moved = tree.elementwise(lambda u, g: torch.where(is_trusted, u, g), moved, updates)
        return moved, RunningSquareState(variance)


running_mean = RunningMean
scale_by_running_square = ScaleByRunningSquare


@tree.state
class GrokfastState(Generic[P]):
    """Running mean of the gradients."""

    mean: Slot[P]


@dataclass(frozen=True, slots=True)
class AmplifySlowGradients(Elementwise):
    r"""Grokfast-EMA: add to the gradient its running mean, which begins at the first gradient.

    .. math::
        m_1 = g_1 \qquad m_t = \alpha m_{t-1} + (1-\alpha) g_t \qquad u_t = g_t + \lambda m_t

    Args:
        decay: :math:`\alpha`, in [0, 1).
        gain: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Lee et al. 2024, https://arxiv.org/abs/2405.20233, Algorithm 2.
    """

    reads_weights = False
    decay: Rate = 0.98
    gain: NonNegative = 2.0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``mean`` decays with ``decay``."""
        return (SlotDecay("mean", self.decay),)

    def init(self, params: P) -> GrokfastState[P]:
        """Return a mean of zero."""
        return GrokfastState(tree.zeros_like(params))

    def update(
        self, updates: P, state: GrokfastState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, GrokfastState[P]]:
        """Update the mean, and add it."""
        step = require_step(ctx.step, "amplify_slow_gradients")
        decay, gain = self.at(step, "decay", "gain")
        share = materialize(torch.where(step == 1, 1.0, (1 - decay) * torch.ones_like(step, dtype=torch.float64)))
        mean = tree.elementwise(lambda g, m: decay * m + share * g, updates, state.mean)
        return tree.elementwise(lambda g, m: g + gain * m, updates, mean), GrokfastState(mean)


amplify_slow_gradients = AmplifySlowGradients


@tree.state
class AdemamixState(Generic[P]):
    """A fast and a slow running mean of the gradient, and the running mean of its square."""

    momentum: Slot[P]
    slow: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdemamix(Elementwise):
    r"""Divide the sum of a fast and a slow mean of the gradient by the root of its running square.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        s_t = \beta_3^{(t)} s_{t-1} + (1-\beta_3^{(t)}) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2

        u_t = \frac{m_t / (1-\beta_1^t) + \alpha^{(t)} s_t}{\sqrt{v_t / (1-\beta_2^t) + \epsilon_\text{root}} + \epsilon}

    The slow mean has no bias correction. With a warm-up of :math:`T` updates :math:`\alpha^{(t)} = \alpha \min(t/T, 1)`, and the half-life
    of the slow mean grows linearly from that of :math:`\beta_1`:

    .. math::
        \beta_3^{(t)} = \min\left(\exp\frac{1}{(1-t/T)/\ln\beta_1 + (t/T)/\ln\beta_3},\; \beta_3\right)

    Args:
        b1: Decay rate of the fast mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        b3: Decay rate of the slow mean, in [0, 1).
        alpha: Weight of the slow mean, at least zero.
        eps: Added outside the root; same unit as the gradient.
        eps_root: Added inside the root; unit of the gradient squared.
        alpha_warmup: Number of updates until ``alpha`` is reached; None: from the first on.
        b3_warmup: Number of updates until ``b3`` is reached; None: from the first on. The paper warms both up over the whole run.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137, Algorithm 1.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    b3: Rate = 0.9999
    alpha: NonNegative = 5.0
    eps: NonNegative = 1e-8
    eps_root: NonNegative = 0.0
    _: KW_ONLY
    alpha_warmup: Updates | None = None
    b3_warmup: Updates | None = None

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``slow`` with ``b3``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("slow", self.b3), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdemamixState[P]:
        """Return moments of zero for all parameters."""
        return AdemamixState(tree.zeros_like(params), tree.zeros_like(params), tree.zeros_like(params))

    def update(
        self, updates: P, state: AdemamixState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdemamixState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_ademamix")
        b1, b2, eps, eps_root = self.at(step, "b1", "b2", "eps", "eps_root")
        b3 = _warmed_up_decay(b1, at(self.b3, step, name="b3"), _progress(step, self.b3_warmup))
        alpha = materialize(at(self.alpha, step, name="alpha") * _progress(step, self.alpha_warmup))
        unbias_mean = materialize(1 / bias_correction(b1, step))
        unbias_square = materialize(1 / bias_correction(b2, step))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        slow = tree.elementwise(lambda g, s: b3 * s + (1 - b3) * g, updates, state.slow)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)

        def direction(m: Tensor, s: Tensor, v: Tensor) -> Tensor:
            return (m * unbias_mean + alpha * s) / (sqrt(v * unbias_square + eps_root) + eps)

        return tree.elementwise(direction, momentum, slow, variance), AdemamixState(momentum, slow, variance)


def _progress(step: Tensor, warmup: int | None) -> Tensor:
    """How far a warm-up has come at this update, in (0, 1]: float64, 0-d."""
    done = step.double()
    return torch.ones_like(done) if warmup is None else (done / warmup).clamp(max=1.0)


def _warmed_up_decay(start: Scalar, end: Scalar, progress: Tensor) -> Tensor:
    """Return the decay rate with a half-life so far between those of ``start`` and ``end``, and at most ``end``: float64, 0-d."""
    low, high = start * torch.ones_like(progress), end * torch.ones_like(progress)
    between = ((1 - progress) / low.log() + progress / high.log()).reciprocal().exp()
    return materialize(torch.where(progress < 1, torch.minimum(between, high), high))


scale_by_ademamix = ScaleByAdemamix
