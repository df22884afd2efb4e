"""Averaged stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from everybit import tree
from everybit.barriers import materialize
from everybit.context import ALONE, Context
from everybit.scalars import Hyperparameter, at, require, require_step
from everybit.transform import Elementwise, SlotDecay
from everybit.transforms.averages import AverageState

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AveragedDescent(Elementwise):
    r"""Gradient descent with a falling learning rate, and the mean of the weights it passes, which is evaluated.

    .. math::
        \eta_t = \frac{\gamma}{(1 + \lambda \gamma (t-1))^\alpha} \qquad
        u_t = -\eta_t (g_t + \lambda p_{t-1}) \qquad
        a_t = a_{t-1} + \frac{p_t - a_{t-1}}{\max(1, t - 1 - t_0)}

    The updates are those of the parameters, so that no learning rate comes after it; the last transform of a chain. As in
    ``torch.optim.ASGD``, the average is the weights themselves until step :math:`t_0 + 2`. torch computes the learning rate of a step
    at the end of the one before; where a scheduler changes :math:`\gamma`, it follows one step later there.

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

    def init(self, params: P) -> AverageState[P]:
        """Return the initial weights."""
        return AverageState(tree.map(torch.clone, params))

    def update(
        self, updates: P, state: AverageState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AverageState[P]]:
        """Descend, and bring the average nearer to the weights after it."""
        step = require_step(ctx.step, "averaged_descent")
        rate, lambd = at(self.learning_rate, step, name="learning_rate"), at(self.lambd, step, name="lambd")
        alpha, start = at(self.alpha, step, name="alpha"), at(self.t0, step, name="t0")
        done = step.double() - 1
        eta = materialize(rate / (1 + lambd * rate * done) ** alpha)
        share = materialize(1 / (done - start).clamp(min=1.0))

        def averaged(a: Tensor, p: Tensor, u: Tensor) -> Tensor:
            return a + share * ((p + u) - a)

        descent = tree.elementwise(lambda g, p: -eta * (g + lambd * p), updates, params)
        return descent, AverageState(tree.elementwise(averaged, state.average, params, descent))

    def eval_params(self, params: P, state: AverageState[P]) -> P:
        """Return the average."""
        return state.average


averaged_descent = AveragedDescent
