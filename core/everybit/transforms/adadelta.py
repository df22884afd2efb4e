"""The preconditioner of Adadelta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, require, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class AdadeltaState(Generic[P]):
    """Running squares of the gradient and of the updates, which torch calls ``square_avg`` and ``acc_delta``."""

    variance: Slot[P]
    update_variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdadelta(Elementwise):
    r"""Divide the gradient by the root of its running square, and multiply it by that of the updates.

    .. math::
        v_t = \rho v_{t-1} + (1-\rho) g_t^2 \qquad
        u_t = \frac{\sqrt{d_{t-1} + \epsilon}}{\sqrt{v_t + \epsilon}} \, g_t \qquad
        d_t = \rho d_{t-1} + (1-\rho) u_t^2

    Args:
        rho: :math:`\rho`, decay rate of both squares, in [0, 1].
        eps: Added inside both roots, so in units of the gradient squared and of the weights squared.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Zeiler 2012, https://arxiv.org/abs/1212.5701, Algorithm 1, as in ``torch.optim.Adadelta``.
    """

    reads_weights: ClassVar[bool] = False
    rho: Hyperparameter = 0.9
    eps: Hyperparameter = 1e-6

    def __post_init__(self) -> None:
        require("rho", self.rho, 0.0, 1.0)
        require("eps", self.eps, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that both decay with ``rho``."""
        return tuple(SlotDecay(name, self.rho, squares=True) for name in ("variance", "update_variance"))

    def init(self, params: P) -> AdadeltaState[P]:
        """Return squares of zero for all parameters."""
        return AdadeltaState(tree.zeros_like(params), tree.zeros_like(params))

    def update(
        self, updates: P, state: AdadeltaState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdadeltaState[P]]:
        """Update the squares of the gradients, precondition, and update those of the updates."""
        rho, eps = at(self.rho, ctx.step, name="rho"), at(self.eps, ctx.step, name="eps")

        def running(x: Tensor, square: Tensor) -> Tensor:
            return rho * square + (1 - rho) * (x * x)

        variance = tree.elementwise(running, updates, state.variance)
        direction = tree.elementwise(
            lambda g, v, d: sqrt(d + eps) / sqrt(v + eps) * g, updates, variance, state.update_variance
        )
        return direction, AdadeltaState(variance, tree.elementwise(running, direction, state.update_variance))


scale_by_adadelta = ScaleByAdadelta
