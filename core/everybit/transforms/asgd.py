"""Averaged stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Slot, at, materialize, require, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class AsgdState(Generic[P]):
    """The average of the weights, which torch calls ``ax``, and the learning rate of the next step: 0-d, float64."""

    average: Slot[P]
    eta: Tensor


@dataclass(frozen=True, slots=True)
class AveragedDescent(Elementwise):
    r"""Gradient descent with a falling learning rate, and the mean of the weights it passes, which is evaluated.

    .. math::
        \eta_1 = \gamma \qquad \eta_{t+1} = \frac{\gamma}{(1 + \lambda \gamma t)^\alpha} \qquad
        u_t = -\eta_t (g_t + \lambda p_{t-1}) \qquad
        a_t = a_{t-1} + \frac{p_t - a_{t-1}}{\max(1, t - 1 - t_0)}

    The updates are those of the parameters, so that no learning rate comes after it; the last transform of a chain. As in
    ``torch.optim.ASGD``, the average is the weights themselves until step :math:`t_0 + 2`, and the learning rate of a step is computed
    at the end of the step before: it follows a schedule one step later.

    Args:
        learning_rate: :math:`\gamma`, at least zero.
        lambd: :math:`\lambda`, at least zero: weight decay, and how fast the learning rate falls.
        alpha: :math:`\alpha`, the power by which the learning rate falls.
        t0: :math:`t_0`, the number of steps before averaging begins.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Polyak & Juditsky 1992, https://doi.org/10.1137/0330046; the learning rate is Xu 2011, https://arxiv.org/abs/1107.2490.
    """

    learning_rate: Hyperparameter = 1e-2
    lambd: Hyperparameter = 1e-4
    alpha: Hyperparameter = 0.75
    t0: Hyperparameter = 1e6

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, 0.0)
        require("lambd", self.lambd, 0.0)
        require("alpha", self.alpha)
        require("t0", self.t0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``average`` moves more slowly the longer it is kept."""
        return (SlotDecay("average", 1.0),)

    def init(self, params: P) -> AsgdState[P]:
        """Return the initial weights; the first step knows its learning rate by its number."""
        leaves = tree.leaves(params)
        eta = torch.zeros((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        return AsgdState(tree.map(torch.clone, params), eta)

    def update(self, updates: P, state: AsgdState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AsgdState[P]]:
        """Descend, and bring the average nearer to the weights after it."""
        step = require_step(ctx.step, "averaged_descent")
        rate, lambd = at(self.learning_rate, step, name="learning_rate"), at(self.lambd, step, name="lambd")
        alpha, start = at(self.alpha, step, name="alpha"), at(self.t0, step, name="t0")
        number = step.double()
        eta = materialize(torch.where(step == 1, torch.zeros_like(state.eta) + rate, state.eta))
        # A power of two tensors: torch has roots of its own for powers by some numbers.
        following = rate / (1 + lambd * (number * rate)) ** (torch.zeros_like(number) + alpha)
        share = materialize(1 / (number - 1 - start).clamp(min=1.0))

        def averaged(a: Tensor, p: Tensor, u: Tensor) -> Tensor:
            return a + share * ((p + u) - a)

        descent = tree.elementwise(lambda g, p: -eta * (g + lambd * p), updates, params)
        return descent, AsgdState(tree.elementwise(averaged, state.average, params, descent), following)

    def eval_params(self, params: P, state: AsgdState[P]) -> P:
        """Return the average."""
        return state.average


averaged_descent = AveragedDescent
