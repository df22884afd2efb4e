"""AdEMAMix's preconditioner: Adam with a second, slow mean of the gradient."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Scalar,
    Slot,
    at,
    bias_correction,
    materialize,
    require,
    require_count,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
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

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    b3: Hyperparameter = 0.9999
    alpha: Hyperparameter = 5.0
    eps: Hyperparameter = 1e-8
    eps_root: Hyperparameter = 0.0
    _: KW_ONLY
    alpha_warmup: int | None = None
    b3_warmup: int | None = None

    def __post_init__(self) -> None:
        for name in ("b1", "b2", "b3"):
            require(name, getattr(self, name), 0.0, 1.0, open_high=True)
        for name in ("alpha", "eps", "eps_root"):
            require(name, getattr(self, name), 0.0)
        for name in ("alpha_warmup", "b3_warmup"):
            updates = getattr(self, name)
            require_count(name, updates, "a number of updates", optional=True)

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
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, eps_root = at(self.eps, step, name="eps"), at(self.eps_root, step, name="eps_root")
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
