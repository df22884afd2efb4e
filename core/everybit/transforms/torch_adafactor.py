"""Adafactor as torch has it: second moments of rows and columns, steps relative to the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Scalar,
    Slot,
    at,
    materialize,
    mean,
    require,
    require_step,
    sqrt,
    sum_of_squares,
    tree,
)
from everybit.linalg import factored_dimensions
from everybit.linalg.factored import moved, zeros
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class TorchAdafactorState(Generic[P]):
    """``variance``: of a matrix the means of the squares of its rows and of its columns, of anything else the squares of its elements."""

    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByTorchAdafactor(WholeTensors):
    r"""Adafactor in the flavour of ``torch.optim.Adafactor``, learning rate and weight decay included.

    Of a tensor of two dimensions or more, over the last two of which it is factored, for each matrix :math:`G` with weights :math:`p`:

    .. math::
        r_t = r_{t-1} + t^{c} (\operatorname{mean}_\text{row} G^2 - r_{t-1}) \qquad
        c_t = c_{t-1} + t^{c} (\operatorname{mean}_\text{column} G^2 - c_{t-1}) \qquad
        V_t = \frac{r_t c_t^\top}{\max(\operatorname{mean} r_t, \epsilon_1)}
    .. math::
        U_t = \frac{G_t}{\sqrt{\max(V_t, \epsilon_1^2)}} \qquad
        u_t = -\frac{\max(\epsilon_2, \operatorname{rms}\, p) \min(\gamma, 1/\sqrt t)}{\max(1, \operatorname{rms}(U_t) / d)} \, U_t
            - \gamma \lambda p

    Of a vector :math:`V_t` is the running mean of the squares themselves. The updates are those of the parameters, so that no learning rate
    comes after it. The paper adds :math:`\epsilon_1` to the squares before means are taken; torch takes maxima after it.

    Args:
        learning_rate: :math:`\gamma`, at least zero: the limit of the relative step.
        beta2_decay: :math:`c`, at most zero: :math:`t^c` is the share of the newest squares.
        eps1: :math:`\epsilon_1`, at least zero; None: the spacing of the compute dtype at 1, which is torch's default for a float32 or
            float64 model. torch takes that of the model's dtype.
        eps2: :math:`\epsilon_2`, at least zero: the least root mean square of weights that a step is relative to.
        d: The root mean square above which an update is scaled down; at least 1.
        weight_decay: :math:`\lambda`, at least zero.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235, as in ``torch.optim.Adafactor``.
    """

    learning_rate: Hyperparameter = 1e-2
    beta2_decay: Hyperparameter = -0.8
    eps1: Hyperparameter | None = None
    eps2: Hyperparameter = 1e-3
    d: Hyperparameter = 1.0
    weight_decay: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, 0.0)
        require("beta2_decay", self.beta2_decay, high=0.0)
        if self.eps1 is not None:
            require("eps1", self.eps1, 0.0)
        require("eps2", self.eps2, 0.0)
        require("d", self.d, 1.0)
        require("weight_decay", self.weight_decay, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``variance`` moves more slowly the longer it is kept."""
        return (SlotDecay("variance", 1.0, squares=True),)

    def init(self, params: P) -> TorchAdafactorState[P]:
        """Return means of zero for all parameters."""
        return TorchAdafactorState(tree.map(lambda p: zeros(p, factored_dimensions(p)), params))

    def update(
        self, updates: P, state: TorchAdafactorState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, TorchAdafactorState[P]]:
        """Update the means of squares, divide by their roots, and scale to the weights."""
        step = require_step(ctx.step, "scale_by_torch_adafactor")
        rate, decay = (
            at(self.learning_rate, step, name="learning_rate"),
            at(self.weight_decay, step, name="weight_decay"),
        )
        eps1 = None if self.eps1 is None else at(self.eps1, step, name="eps1")
        eps2, limit = at(self.eps2, step, name="eps2"), at(self.d, step, name="d")
        number = step.double()
        # A power of two tensors: torch has roots of its own for powers by some numbers.
        share = materialize(number ** (torch.zeros_like(number) + at(self.beta2_decay, step, name="beta2_decay")))
        longest = 1 / sqrt(number)
        relative = torch.where(longest > rate, rate, longest)

        def means(g: Tensor, v: Any) -> Any:
            return moved(v, g * g, share, factored_dimensions(g))

        def descent(g: Tensor, v: Any, p: Tensor) -> Tensor:
            least = torch.finfo(g.dtype).eps if eps1 is None else eps1
            if isinstance(v, dict):
                v = v["rows"] * v["columns"] / at_least(least, mean(v["rows"], -2).unsqueeze(-2))
            direction = g.reshape(-1) / sqrt(at_least(least * least, v.reshape(-1)))
            size = at_least(eps2, rms(p)) * relative / at_least(1.0, rms(direction) / limit)
            size = materialize(size)
            return (-size * direction - rate * (decay * p.reshape(-1))).reshape(p.shape)

        variance = tree.map(means, updates, state.variance)
        return tree.map(descent, updates, variance, params), TorchAdafactorState(variance)


def at_least(low: Scalar, x: Tensor) -> Tensor:
    """The greater of each element and ``low``; a NaN keeps its bits, which ``clamp`` changes if its limit is a tensor."""
    return torch.where(x < low, torch.zeros_like(x) + low, x)


def rms(x: Tensor) -> Tensor:
    """The root mean square of all elements: 0-d, float64; zero of a tensor without any."""
    return sqrt(sum_of_squares(x) / max(x.numel(), 1))


scale_by_torch_adafactor = ScaleByTorchAdafactor
