"""The preconditioner of Adagrad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from everybit.base import Hyperparameter, Scalar, Slot, at, is_zero, materialize, require, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
class AdagradState(Generic[P]):
    """The sum of the squares of all gradients, which torch calls ``sum``."""

    sum_of_squares: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdagrad(Elementwise):
    r"""Divide the gradient by the root of the sum of the squares of all gradients so far.

    .. math::
        s_0 = \sigma \qquad s_t = s_{t-1} + g_t^2 \qquad
        u_t = \frac{1}{1 + (t-1) \lambda} \, \frac{g_t}{\sqrt{s_t} + \epsilon}

    Args:
        initial_accumulator_value: :math:`\sigma`, at least zero; unit of the gradient squared. torch's default is 0, optax's 0.1.
        eps: Same unit as the gradient if outside the root, else its square.
        lr_decay: :math:`\lambda`, at least zero: how fast the learning rate falls with the number of the step.
        eps_inside_root: Add ``eps`` inside the root, as optax does; torch adds it outside.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html, as in ``torch.optim.Adagrad``.
    """

    reads_weights: ClassVar[bool] = False
    initial_accumulator_value: Scalar = 0.0
    eps: Hyperparameter = 1e-10
    lr_decay: Hyperparameter = 0.0
    eps_inside_root: bool = False

    def __post_init__(self) -> None:
        require("initial_accumulator_value", self.initial_accumulator_value, 0.0, schedule=False)
        require("eps", self.eps, 0.0)
        require("lr_decay", self.lr_decay, 0.0)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``sum_of_squares`` is a sum, which does not decay."""
        return (SlotDecay("sum_of_squares", 1.0, squares=True),)

    def init(self, params: P) -> AdagradState[P]:
        """Return the initial sum for all parameters."""
        zeros, initial = tree.zeros_like(params), self.initial_accumulator_value
        return AdagradState(zeros if is_zero(initial) else tree.elementwise(lambda zero: zero + initial, zeros))

    def update(
        self, updates: P, state: AdagradState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdagradState[P]]:
        """Add the squares to the sum, and divide by its root."""
        eps, lr_decay = at(self.eps, ctx.step, name="eps"), at(self.lr_decay, ctx.step, name="lr_decay")
        total = tree.elementwise(lambda g, s: s + g * g, updates, state.sum_of_squares)

        def over_root(g: Tensor, s: Tensor) -> Tensor:
            return g / sqrt(s + eps) if self.eps_inside_root else g / (sqrt(s) + eps)

        direction = tree.elementwise(over_root, updates, total)
        if not is_zero(lr_decay):
            done = require_step(ctx.step, "scale_by_adagrad with lr_decay").double() - 1
            rate = materialize(1 / (1 + done * lr_decay))
            direction = tree.elementwise(lambda u: rate * u, direction)
        return direction, AdagradState(total)


scale_by_adagrad = ScaleByAdagrad
