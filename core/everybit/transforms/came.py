"""CAME's direction: Adafactor's, averaged, and made smaller where the average is not to be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, require, tree
from everybit.linalg import factored, factored_dimensions
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class CameState(Generic[P]):
    """The mean of directions, the squares of gradients, and those of the differences between directions and their mean.

    Of a matrix both squares are means of rows and of columns. Of anything else there are no squares of differences.
    """

    momentum: Slot[P]
    variance: Slot[P]
    instability: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByCame(WholeTensors):
    r"""Average directions of Adafactor, and divide by the root of how far they are from their average.

    .. math::
        V_t = \beta_2 V_{t-1} + (1-\beta_2) (G_t^2 + \epsilon_1) \qquad
        U_t = \frac{G_t}{\sqrt{V_t}} \qquad
        \hat U_t = \frac{U_t}{\max(1, \operatorname{rms}(U_t) / d)}
    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) \hat U_t \qquad
        S_t = \beta_3 S_{t-1} + (1-\beta_3) ((\hat U_t - m_t)^2 + \epsilon_2) \qquad
        u_t = \frac{m_t}{\sqrt{S_t}}

    for each matrix in a tensor of two dimensions or more, where V and S are kept and used as means of rows and columns; see
    :class:`everybit.scale_by_factored_rms`. There is no bias correction. Of anything else V is whole and :math:`u_t = m_t`.

    Args:
        b1: Decay rate of the mean of directions, in [0, 1).
        b2: Decay rate of the squares, in [0, 1).
        b3: Decay rate of the instability, in [0, 1).
        eps1: :math:`\epsilon_1`, added to the squares; unit of the gradient squared.
        eps2: :math:`\epsilon_2`, added to the squared differences.
        clip_threshold: :math:`d`, above zero: the root mean square to which a direction is limited.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Luo et al. 2023, https://arxiv.org/abs/2307.02047, Algorithm 2.
    """

    reads_weights: ClassVar[bool] = False
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    b3: Hyperparameter = 0.9999
    eps1: Hyperparameter = 1e-30
    eps2: Hyperparameter = 1e-16
    clip_threshold: Hyperparameter = 1.0

    def __post_init__(self) -> None:
        for name in ("b1", "b2", "b3"):
            require(name, getattr(self, name), 0.0, 1.0, open_high=True)
        for name in ("eps1", "eps2", "clip_threshold"):
            require(name, getattr(self, name), 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``, ``instability`` with ``b3``."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("instability", self.b3, squares=True),
        )

    def init(self, params: P) -> CameState[P]:
        """Return means of zero for all parameters."""
        variance = tree.map(lambda p: factored.zeros(p, factored_dimensions(p)), params)
        instability = tree.map(_factors_only, params)
        return CameState(tree.zeros_like(params), variance, instability)

    def update(self, updates: P, state: CameState[Any], params: P, ctx: Context = ALONE) -> tuple[P, CameState[P]]:
        """Update all means, and weigh the mean of directions."""
        b1, b2, b3 = (at(getattr(self, name), ctx.step, name=name) for name in ("b1", "b2", "b3"))
        eps1, eps2 = at(self.eps1, ctx.step, name="eps1"), at(self.eps2, ctx.step, name="eps2")
        limit = at(self.clip_threshold, ctx.step, name="clip_threshold")

        def square(g: Tensor, v: Any) -> Any:
            return factored.moved(v, factored.raised(g * g, eps1), 1 - b2, factored_dimensions(g))

        def direction(g: Tensor, v: Any) -> Tensor:
            return factored.clipped_by_rms(factored.over_root(g, v, factored_dimensions(g)), limit)

        def apart(u: Tensor, m: Tensor, s: Any) -> Any:
            dimensions = factored_dimensions(u)
            if dimensions is None:
                return {name: x.clone() for name, x in s.items()}
            return factored.moved(s, factored.raised((u - m) * (u - m), eps2), 1 - b3, dimensions)

        def trusted(m: Tensor, s: Any) -> Tensor:
            dimensions = factored_dimensions(m)
            return m.clone() if dimensions is None else factored.over_root(m, s, dimensions)

        variance = tree.map(square, updates, state.variance)
        directions = tree.map(direction, updates, variance)
        momentum = tree.elementwise(lambda u, m: b1 * m + (1 - b1) * u, directions, state.momentum)
        instability = tree.map(apart, directions, momentum, state.instability)
        return tree.map(trusted, momentum, instability), CameState(momentum, variance, instability)


def _factors_only(p: Tensor) -> Any:
    """Zeros of the shapes of rows and columns, without elements for a parameter that is not factored."""
    dimensions = factored_dimensions(p)
    if dimensions is not None:
        return factored.zeros(p, dimensions)
    return {name: torch.zeros_like(p.reshape(-1)[:0]) for name in ("rows", "columns")}


scale_by_came = ScaleByCame
