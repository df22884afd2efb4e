"""Division by roots of sums and means of squares: Adagrad, Adadelta, RMSprop."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from everybit.base import (
    FixedNonNegative,
    NonNegative,
    Rate,
    Share,
    Slot,
    is_zero,
    materialize,
    require_step,
    sqrt,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
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

    reads_weights = False
    initial_accumulator_value: FixedNonNegative = 0.0
    eps: NonNegative = 1e-10
    lr_decay: NonNegative = 0.0
    eps_inside_root: bool = False

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
        eps, lr_decay = self.at(ctx.step, "eps", "lr_decay")
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


@tree.state
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

    reads_weights = False
    rho: Share = 0.9
    eps: NonNegative = 1e-6

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
        rho, eps = self.at(ctx.step, "rho", "eps")

        def running(x: Tensor, square: Tensor) -> Tensor:
            return rho * square + (1 - rho) * (x * x)

        variance = tree.elementwise(running, updates, state.variance)
        direction = tree.elementwise(
            lambda g, v, d: sqrt(d + eps) / sqrt(v + eps) * g, updates, variance, state.update_variance
        )
        return direction, AdadeltaState(variance, tree.elementwise(running, direction, state.update_variance))


scale_by_adadelta = ScaleByAdadelta


@tree.state
class RmsState(Generic[P]):
    """The running square of the gradient."""

    variance: Slot[P]


@tree.state
class CenteredRmsState(Generic[P]):
    """The running square of the gradient, and its running mean."""

    variance: Slot[P]
    mean: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByRms(Elementwise):
    r"""Divide the gradient by the root of its running square, or of its running variance if centred.

    .. math::
        v_t = \alpha v_{t-1} + (1-\alpha) g_t^2 \qquad
        u_t = \frac{g_t}{\sqrt{v_t - \bar g_t^2} + \epsilon} \qquad
        \bar g_t = \begin{cases} \alpha \bar g_{t-1} + (1-\alpha) g_t & \text{centred} \\ 0 & \text{else} \end{cases}

    Args:
        decay: :math:`\alpha`, in [0, 1).
        eps: Same unit as the gradient if outside the root, else its square.
        centered: Subtract the square of the mean (Graves 2013).
        eps_inside_root: Add ``eps`` inside the root, as optax does; torch adds it outside.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Hinton 2012, lecture 6e; Graves 2013, https://arxiv.org/abs/1308.0850, eq. 38-45; ``torch.optim.RMSprop``.
    """

    reads_weights = False
    decay: Rate = 0.99
    eps: NonNegative = 1e-8
    _: KW_ONLY
    centered: bool = False
    eps_inside_root: bool = False

    def decays(self) -> tuple[SlotDecay, ...]:
        """``variance`` decays with ``decay``, and so does ``mean``, if there is one."""
        variance = SlotDecay("variance", self.decay, squares=True)
        return (variance, SlotDecay("mean", self.decay)) if self.centered else (variance,)

    def init(self, params: P) -> RmsState[P] | CenteredRmsState[P]:
        """Return moments of zero for all parameters."""
        if self.centered:
            return CenteredRmsState(tree.zeros_like(params), tree.zeros_like(params))
        return RmsState(tree.zeros_like(params))

    def update(
        self, updates: P, state: RmsState[Any] | CenteredRmsState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, RmsState[P] | CenteredRmsState[P]]:
        """Update the moments, and divide by them."""
        decay, eps = self.at(ctx.step, "decay", "eps")
        variance = tree.elementwise(lambda g, v: decay * v + (1 - decay) * (g * g), updates, state.variance)

        def over_root(g: Tensor, square: Tensor) -> Tensor:
            return g / sqrt(square + eps) if self.eps_inside_root else g / (sqrt(square) + eps)

        if not isinstance(state, CenteredRmsState):
            return tree.elementwise(over_root, updates, variance), RmsState(variance)
        mean = tree.elementwise(lambda g, a: decay * a + (1 - decay) * g, updates, state.mean)
        # The difference of two nearly equal numbers, each rounded: it may fall below zero, where there is no root.
        centred = tree.elementwise(lambda v, a: (v - a * a).clamp(min=0.0), variance, mean)
        return tree.elementwise(over_root, updates, centred), CenteredRmsState(variance, mean)


scale_by_rms = ScaleByRms
