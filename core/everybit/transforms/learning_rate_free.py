"""Steps that estimate their own size: Prodigy."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    AtLeastOne,
    FixedAboveZero,
    NonNegative,
    Rate,
    Slot,
    at,
    barriers,
    bias_correction,
    is_zero,
    materialize,
    require_step,
    sqrt,
    square_root,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay, Sum

P = TypeVar("P")


@tree.state
class ProdigyState(Generic[P]):
    """Adam's moments; the weighted sum of gradients and the first weights; the estimate, its greatest value and its numerator."""

    momentum: Slot[P]
    variance: Slot[P]
    weighted_sum: Slot[P]
    start: Slot[P]
    estimate: Tensor
    greatest: Tensor
    numerator: Tensor


@dataclass(frozen=True, slots=True)
class Prodigy(Elementwise):
    r"""Adam with a step size :math:`d_t \eta`, where d is a lower bound of the distance to the solution; the last transform of a chain.

    .. math::
        r_t = \beta_3 r_{t-1} + \tfrac{d_t}{d_0} d_t \eta \langle g_t, p_0 - p_t\rangle \qquad
        s_t = \beta_3 s_{t-1} + \tfrac{d_t}{d_0} d_t \eta\, g_t \qquad
        \hat d_{t+1} = c\, r_t / \lVert s_t \rVert_1

        m_t = \beta_1 m_{t-1} + (1-\beta_1) d_t g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) d_t^2 g_t^2 \qquad
        u_t = -d_t \eta \left(\frac{m_t}{\sqrt{v_t} + d_{t+1}\epsilon} + \lambda p_t\right)

    with :math:`d_{t+1}` the greatest estimate so far, but at most ``growth_rate`` times :math:`d_t`. The two sums are over all parameters
    that have a gradient, on all ranks, in float64. All parameters of an optimizer share d, also one whose gradients come later, and param
    groups of different rates are refused, as by ``prodigyopt``. In a ``partition``, each part has an estimate of its own.

    A parameter at a learning rate of zero does not count in the sums, and its slots are unchanged. While all gradients are zero no weight
    moves.

    Args:
        learning_rate: :math:`\eta`, a factor of the estimate, at least zero; 1, or a schedule that ends at 0.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        b3: Decay rate of the sums, in [0, 1); None: the root of ``b2``.
        eps: Added to the root; same unit as the gradient.
        weight_decay: :math:`\lambda`, decoupled, at least zero. For an L2 penalty put ``add_decayed_weights`` before.
        d0: The first estimate, above zero.
        d_coef: :math:`c`, a factor of all later estimates, at least zero.
        growth_rate: The most that the estimate is multiplied by in an update, at least 1; None: no limit.
        bias_correction: Multiply the step by :math:`\sqrt{1-\beta_2^t} / (1-\beta_1^t)`.
        safeguard_warmup: Leave :math:`\eta` out of s, so that a warm-up of the learning rate does not raise the estimate.

    Raises:
        TypeError: A schedule for ``d0``.
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Mishchenko & Defazio 2023, https://arxiv.org/abs/2306.06101, Algorithm 4, as in ``prodigyopt``.
    """

    reduces = True
    common = ("estimate", "greatest", "numerator")
    common_by = ("learning_rate", "b2", "b3", "d0", "d_coef", "growth_rate", "bias_correction", "safeguard_warmup")
    learning_rate: NonNegative = 1.0
    _: KW_ONLY
    b1: Rate = 0.9
    b2: Rate = 0.999
    b3: Rate | None = None
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    d0: FixedAboveZero = 1e-6
    d_coef: NonNegative = 1.0
    growth_rate: AtLeastOne | None = None
    bias_correction: bool = False
    safeguard_warmup: bool = False

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``, ``weighted_sum`` with ``b3``; ``start`` has to keep its values."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("weighted_sum", self.b2 if self.b3 is None else self.b3),
            SlotDecay("start", 1.0),
        )

    def init(self, params: P) -> ProdigyState[P]:
        """Return moments of zero, the first weights and the first estimate."""
        leaves = tree.leaves(params)
        nothing = torch.zeros((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        first = nothing + at(self.d0, None, name="d0")
        momentum, variance, weighted = (tree.zeros_like(params) for _ in range(3))
        start = tree.map(torch.clone, params)
        return ProdigyState(momentum, variance, weighted, start, first, first.clone(), nothing)

    def update(
        self, updates: P, state: ProdigyState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, ProdigyState[P]]:
        """Update moments and estimate, and take a step with the estimate before."""
        step = require_step(ctx.step, "prodigy")
        d = state.estimate
        b1, b2 = self.at(step, "b1", "b2")
        b3 = square_root(b2) if self.b3 is None else at(self.b3, step, name="b3")
        eps, decay = self.at(step, "eps", "weight_decay")
        rate = at(self.learning_rate, step, name="learning_rate") * torch.ones_like(d)
        moves = rate > 0
        size = d * rate
        if self.bias_correction:
            size = size * bias_correction(b2, step).sqrt() / bias_correction(b1, step)
        relative = d / at(self.d0, None, name="d0")
        size, gain = materialize(size), materialize(relative * (d if self.safeguard_warmup else size))
        b1_share, b2_share = materialize(d * (1 - b1)), materialize(d * d * (1 - b2))

        weighted = tree.elementwise(lambda g, s: b3 * s + gain * g, updates, state.weighted_sum)
        owned = tree.leaves(ctx.owned(updates))
        ways = [_inner(g, p0, p) for g, p0, p in zip(owned, tree.leaves(state.start), tree.leaves(params), strict=True)]
        lengths = [barriers.sum(s.double().abs()) for s in tree.leaves(ctx.owned(weighted))]

        def stepped(sums: Tensor) -> tuple[P, ProdigyState[P]]:
            momentum = tree.elementwise(lambda g, m: b1 * m + b1_share * g, updates, state.momentum)
            variance = tree.elementwise(lambda g, v: b2 * v + b2_share * (g * g), updates, state.variance)
            numerator = b3 * state.numerator + sums[0]
            known = sums[1] > 0

            found = at(self.d_coef, step, name="d_coef") * numerator / torch.where(known, sums[1], 1.0)
            greatest = torch.maximum(state.greatest, found)
            begun = torch.where(d == at(self.d0, None, name="d0"), torch.maximum(d, found), d)
            # Without a limit the estimate is the greatest one.
            grown = greatest if self.growth_rate is None else begun * at(self.growth_rate, step, name="growth_rate")
            estimate = torch.where(known, torch.minimum(greatest, grown), d)
            least, shrink, steps = materialize(estimate * eps), materialize(size * decay), known & moves

            def moved(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
                u = -size * (m / (sqrt(v) + least))
                return torch.where(steps, u if is_zero(decay) else torch.where(shrink == 0, u, u - shrink * p), 0.0)

            return tree.elementwise(moved, momentum, variance, params), ProdigyState(
                tree.where(moves, momentum, state.momentum),
                tree.where(moves, variance, state.variance),
                tree.where(moves, weighted, state.weighted_sum),
                tree.map(torch.clone, state.start),
                estimate,
                torch.where(known, greatest, state.greatest),
                torch.where(known, numerator, state.numerator),
            )

        # Weighted here, so that the numerator is the same for parameters of other counts of steps, and without those at a rate of zero.
        way, length = relative * size * barriers.total(ways, d), moves * barriers.total(lengths, d)
        return ctx.request(Sum(torch.stack([way, length])), stepped)


def _inner(g: Tensor, start: Tensor, p: Tensor) -> Tensor:
    """The inner product of the gradient and the way back to the first weights: float64, 0-d."""
    return barriers.sum(g.double() * (start.double() - p.double()))


prodigy = Prodigy
