"""The preconditioner of NAdam: Adam with Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, bias_correction, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class NadamState(Generic[P]):
    r"""Adam's moments, and the product of all momentum coefficients so far, :math:`\prod_{s \le t} \mu_s`: 0-d, float64."""

    momentum: Slot[P]
    variance: Slot[P]
    mu_product: Tensor


@dataclass(frozen=True, slots=True)
class ScaleByNadam(Elementwise):
    r"""Adam's direction, with the momentum after the next step in the place of that before it.

    .. math::
        \mu_t = \beta_1 (1 - \tfrac12 \, 0.96^{t \psi}) \qquad
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2
    .. math::
        u_t = \left( \frac{\mu_{t+1} m_t}{1 - \prod_{s=1}^{t+1} \mu_s} + \frac{(1 - \mu_t) g_t}{1 - \prod_{s=1}^{t} \mu_s} \right)
        \bigg/ \left( \sqrt{v_t / (1-\beta_2^t)} + \epsilon \right)

    Args:
        b1: :math:`\beta_1`, decay rate of the mean, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient.
        momentum_decay: :math:`\psi`, at least zero: how fast :math:`\mu_t` rises from about :math:`\beta_1/2` to :math:`\beta_1`. A large
            one, such as 1e6, makes it :math:`\beta_1` from the first step on, as in optax.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ, as in ``torch.optim.NAdam``.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-8
    momentum_decay: Hyperparameter = 4e-3

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("momentum_decay", self.momentum_decay, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> NadamState[P]:
        """Return moments of zero for all parameters, and an empty product."""
        leaves = tree.leaves(params)
        one = torch.ones((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        return NadamState(tree.zeros_like(params), tree.zeros_like(params), one)

    def update(self, updates: P, state: NadamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, NadamState[P]]:
        """Update the moments, look ahead, and precondition."""
        step = require_step(ctx.step, "scale_by_nadam")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, psi = at(self.eps, step, name="eps"), at(self.momentum_decay, step, name="momentum_decay")
        mu, mu_next = (b1 * (1 - 0.5 * 0.96 ** (number.double() * psi)) for number in (step, step + 1))
        product = state.mu_product * mu
        unbias_square = materialize(1 / bias_correction(b2, step))
        of_momentum = materialize(mu_next / (1 - product * mu_next))
        of_gradient = materialize((1 - mu) / (1 - product))

        momentum = tree.elementwise(lambda g, m: b1 * m + (1 - b1) * g, updates, state.momentum)
        variance = tree.elementwise(lambda g, v: b2 * v + (1 - b2) * (g * g), updates, state.variance)

        def direction(g: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return (of_momentum * m + of_gradient * g) / (sqrt(v * unbias_square) + eps)

        return tree.elementwise(direction, updates, momentum, variance), NadamState(momentum, variance, product)


scale_by_nadam = ScaleByNadam
