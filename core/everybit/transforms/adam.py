"""The preconditioner of Adam, and those that change its momentum, its maximum or its division."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import NonNegative, Rate, Slot, atan, bias_correction, is_zero, materialize, require_step, sqrt, tree
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


Amsgrad = bool | Literal["corrected"]
"""Whether Adam divides by the greatest running square so far, and whether that is taken after the bias is corrected."""


@tree.state
class AdamState(Generic[P]):
    """Two moments: of Adam the running means of the gradient and of its square."""

    momentum: Slot[P]
    variance: Slot[P]


class TwoMoments(Elementwise):
    """Base class of transforms with Adam's two moments, which decay with ``b1`` and ``b2``."""

    __slots__ = ()

    b1: Rate
    b2: Rate

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)

    def init(self, params: P) -> AdamState[P]:
        """Return moments of zero for all parameters."""
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))


@tree.state
class AmsgradState(Generic[P]):
    """Adam's moments, and the greatest running square so far."""

    momentum: Slot[P]
    variance: Slot[P]
    max_variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdam(Elementwise):
    r"""Divide the gradient's running mean by the root of its running square.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t) + \epsilon_\text{root}} + \epsilon}

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root, as in the paper and torch; same unit as the gradient.
        eps_root: Added inside the root, as a derivative through the step needs at zero gradients; unit of the gradient squared.
        amsgrad: Divide by the root of the greatest running square so far (Reddi et al. 2018, https://openreview.net/forum?id=ryQu7f-RZ).
            True: by that of :math:`\max_{s \le t} v_s` in the place of :math:`v_t`, with its bias corrected afterwards, as in torch.
            ``"corrected"``: of :math:`\max_{s \le t} v_s / (1-\beta_2^s)`, as in optax.
        eps_before_correction: Add ``eps`` to :math:`\sqrt{v_t}` and correct the bias afterwards: the paper's :math:`\hat\epsilon`, as
            in Keras and in GaLore.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; ``eps_before_correction`` with ``amsgrad="corrected"``.

    Reference:
        Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, Algorithm 1.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-8
    eps_root: NonNegative = 0.0
    _: KW_ONLY
    amsgrad: Amsgrad = False
    eps_before_correction: bool = False

    def __post_init__(self) -> None:
        Elementwise.__post_init__(self)
        if not isinstance(self.amsgrad, bool) and self.amsgrad != "corrected":
            raise ValueError(f"amsgrad: got {self.amsgrad!r}; accepted are True, False and 'corrected'.")
        if self.eps_before_correction and self.amsgrad == "corrected":
            raise ValueError("eps_before_correction: got True with amsgrad='corrected'; accepted with it is False.")

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``variance`` with ``b2``; ``max_variance``, if there is one, is replaced by greater numbers."""
        moments = SlotDecay("momentum", self.b1), SlotDecay("variance", self.b2, squares=True)
        return (*moments, SlotDecay("max_variance", 0.0, squares=True)) if self.amsgrad else moments

    def init(self, params: P) -> AdamState[P] | AmsgradState[P]:
        """Return moments of zero for all parameters."""
        if self.amsgrad:
            return AmsgradState(tree.zeros_like(params), tree.zeros_like(params), tree.zeros_like(params))
        return AdamState(tree.zeros_like(params), tree.zeros_like(params))

    def update(
        self, updates: P, state: AdamState[Any] | AmsgradState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AdamState[P] | AmsgradState[P]]:
        """Update the moments, and precondition by them."""
        step = require_step(ctx.step, "scale_by_adam")
        b1, b2, eps, eps_root = self.at(step, "b1", "b2", "eps", "eps_root")
        unbias_mean, unbias_square = (
            materialize(1 / bias_correction(b1, step)),
            materialize(1 / bias_correction(b2, step)),
        )
        unbias_both = (
            materialize(sqrt(bias_correction(b2, step)) / bias_correction(b1, step))
            if self.eps_before_correction
            else unbias_mean
        )
        has_root = not is_zero(eps_root)

        def moved(g: Tensor, m: Tensor, v: Tensor, *greatest: Tensor) -> tuple[Tensor, ...]:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
            square = v
            if greatest:
                square = torch.maximum(v * unbias_square if self.amsgrad == "corrected" else v, *greatest)
            kept = (m, v, square) if greatest else (m, v)
            if self.amsgrad != "corrected" and not self.eps_before_correction:
                square = square * unbias_square
            norm = sqrt(square + eps_root if has_root else square) + eps
            return m / norm * unbias_both if self.eps_before_correction else (m * unbias_mean) / norm, *kept

        if isinstance(state, AmsgradState):
            moves, *kept = tree.several(moved, 4, updates, state.momentum, state.variance, state.max_variance)
            return moves, AmsgradState(*kept)
        moves, *kept = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, AdamState(*kept)


scale_by_adam = ScaleByAdam


@tree.state
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

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-8
    momentum_decay: NonNegative = 4e-3

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
        b1, b2, eps, psi = self.at(step, "b1", "b2", "eps", "momentum_decay")
        mu, mu_next = (b1 * (1 - 0.5 * 0.96 ** (number.double() * psi)) for number in (step, step + 1))
        product = state.mu_product * mu
        unbias_square = materialize(1 / bias_correction(b2, step))
        of_momentum = materialize(mu_next / (1 - product * mu_next))
        of_gradient = materialize((1 - mu) / (1 - product))

        def moved(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
            return (of_momentum * m + of_gradient * g) / (sqrt(v * unbias_square) + eps), m, v

        moves, momentum, variance = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, NadamState(momentum, variance, product)


scale_by_nadam = ScaleByNadam


@tree.state
class AdamaxState(Generic[P]):
    """The running mean of the gradient, and the decaying maximum of its magnitude, which torch calls ``exp_inf``."""

    momentum: Slot[P]
    maximum: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByAdamax(Elementwise):
    r"""Divide the gradient's running mean by the decaying maximum of its magnitude.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        n_t = \max(\beta_2 n_{t-1}, |g_t| + \epsilon) \qquad
        u_t = \frac{m_t / (1-\beta_1^t)}{n_t}

    Args:
        b1: :math:`\beta_1`, decay rate of the mean, in [0, 1).
        b2: :math:`\beta_2`, decay rate of the maximum, in [0, 1).
        eps: Added to the magnitudes, as in torch and optax; same unit as the gradient.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, Algorithm 2, as in ``torch.optim.Adamax``.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-8

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` decays with ``b1``, ``maximum`` with ``b2``."""
        return SlotDecay("momentum", self.b1), SlotDecay("maximum", self.b2)

    def init(self, params: P) -> AdamaxState[P]:
        """Return moments of zero for all parameters."""
        return AdamaxState(tree.zeros_like(params), tree.zeros_like(params))

    def update(self, updates: P, state: AdamaxState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamaxState[P]]:
        """Update both, and divide one by the other."""
        step = require_step(ctx.step, "scale_by_adamax")
        b1, b2, eps = self.at(step, "b1", "b2", "eps")
        unbias = materialize(1 / bias_correction(b1, step))

        def moved(g: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, ...]:
            m, n = b1 * m + (1 - b1) * g, torch.maximum(b2 * n, g.abs() + eps)
            return (m * unbias) / n, m, n

        moves, momentum, maximum = tree.several(moved, 3, updates, state.momentum, state.maximum)
        return moves, AdamaxState(momentum, maximum)


scale_by_adamax = ScaleByAdamax


@dataclass(frozen=True, slots=True)
class ScaleByAdamAtan2(TwoMoments):
    r"""The angle between Adam's moments, which needs no :math:`\epsilon`: the update is the same for gradients of any size.

    .. math::
        m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad
        v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = a \operatorname{atan2}\left(\frac{m_t}{1-\beta_1^t},\; b \sqrt{\frac{v_t}{1-\beta_2^t}}\right)

    Args:
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        a: A factor of the angle, non-negative; with 1.27, about :math:`4 / \pi`, a constant gradient gives 1.
        b: A factor of the root, at least zero: an update is at most :math:`a \pi / 2`, and :math:`a / b` times Adam's if that is small.

    Raises:
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Everett et al. 2024, https://arxiv.org/abs/2407.05872, section 4.3.
    """

    reads_weights = False
    b1: Rate = 0.9
    b2: Rate = 0.99
    a: NonNegative = 1.27
    b: NonNegative = 1.0

    def update(self, updates: P, state: AdamState[Any], params: P, ctx: Context = ALONE) -> tuple[P, AdamState[P]]:
        """Update the moments, and return their angles."""
        step = require_step(ctx.step, "scale_by_adam_atan2")
        b1, b2, a, b = self.at(step, "b1", "b2", "a", "b")
        unbias_mean, unbias_square = (materialize(1 / bias_correction(rate, step)) for rate in (b1, b2))

        def moved(g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
            root = b * sqrt(v * unbias_square)
            known = root > 0
            slope = (m * unbias_mean) / torch.where(known, root, 1.0)
            return a * torch.where(known, atan(materialize(slope)), torch.sign(m) * (math.pi / 2)), m, v

        moves, momentum, variance = tree.several(moved, 3, updates, state.momentum, state.variance)
        return moves, AdamState(momentum, variance)


scale_by_adam_atan2 = ScaleByAdamAtan2
