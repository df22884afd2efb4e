"""NovoGrad's direction: gradients over the root of one running square for each tensor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, barriers, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Cut, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class NovogradState(Generic[P]):
    """A decaying sum of normalised gradients, and of each tensor the running square of its gradient's norm."""

    momentum: Slot[P]
    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByNovograd:
    r"""Divide each tensor's gradient by the root of the running square of its norm, add decay, and sum up.

    .. math::
        v_1 = \lVert g_1 \rVert^2 \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) \lVert g_t \rVert^2

        u_t = m_t = \beta_1 m_{t-1} + \frac{g_t}{\sqrt{v_t} + \epsilon} + \lambda p_t

    Decay goes through the momentum, as in the paper.

    Args:
        b1: Decay rate of the sum, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root; same unit as the gradient's norm.
        weight_decay: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286, Algorithm 1.
    """

    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.25
    eps: Hyperparameter = 1e-8
    _: KW_ONLY
    weight_decay: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        require("b1", self.b1, 0.0, 1.0, open_high=True)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require("eps", self.eps, 0.0)
        require("weight_decay", self.weight_decay, 0.0)

    @property
    def cut(self) -> Cut:
        """``"tensor"``: the square has another shape than its parameter."""
        return "tensor"

    @property
    def reduces(self) -> bool:
        """False: a whole tensor's norm is known where the tensor is."""
        return False

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> NovogradState[P]:
        """Return sums of zero, and of each tensor a square of zero."""
        # A rank without elements of a tensor keeps no number for it.
        squares: Any = tree.map(lambda p: {"norm": p.new_zeros(())} if p.numel() else torch.zeros_like(p), params)
        return NovogradState(tree.zeros_like(params), squares)

    def update(
        self, updates: P, state: NovogradState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, NovogradState[P]]:
        """Update squares and sums, and return the sums."""
        step = require_step(ctx.step, "scale_by_novograd")
        b1, b2 = at(self.b1, step, name="b1"), at(self.b2, step, name="b2")
        eps, decay = at(self.eps, step, name="eps"), at(self.weight_decay, step, name="weight_decay")

        def square(g: Tensor, v: Any) -> Any:
            if isinstance(v, Tensor):
                return v.clone()
            new = barriers.sum_of_squares(g).to(v["norm"].dtype).reshape(1)
            mean = b2 * v["norm"].reshape(1) + (1 - b2) * new
            return {"norm": torch.where(step == 1, new, mean).reshape(())}

        def summed(g: Tensor, m: Tensor, p: Tensor, v: Tensor) -> Tensor:
            u = g / (sqrt(v) + eps)
            if isinstance(decay, Tensor):
                u = torch.where(decay == 0, u, u + decay * p)
            elif decay != 0:
                u = u + decay * p
            return b1 * m + u

        variance = tree.map(square, updates, state.variance)

        def shaped(g: Tensor, v: Any) -> Tensor:
            return v if isinstance(v, Tensor) else v["norm"].to(g.dtype).reshape((1,) * g.ndim)

        norms = tree.map(shaped, updates, variance)
        momentum = tree.elementwise(summed, updates, state.momentum, params, norms)
        return tree.map(torch.clone, momentum), NovogradState(momentum, variance)


scale_by_novograd = ScaleByNovograd
