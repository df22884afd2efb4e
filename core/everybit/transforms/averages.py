"""Averages of weights: exponential and plain ones, averaged descent, and training without a schedule."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Finite,
    FixedShare,
    NonNegative,
    Rate,
    Scalar,
    Share,
    Slot,
    UpdatesFromZero,
    at,
    bias_correction,
    is_zero,
    materialize,
    require_step,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.adam_variants import rectification

P = TypeVar("P")


@tree.state
class AverageState(Generic[P]):
    """The average of the weights."""

    average: Slot[P]


class _Average(Elementwise):
    r"""Keep :math:`a_t = a_{t-1} + \alpha_t (p_t - a_{t-1})`, an average in which the weights after step t have the share :math:`\alpha_t`.

    The last transform of a chain, which sees the update as it is applied. Updates pass through it.
    """

    __slots__ = ()
    start: int

    def share(self, count: Tensor, step: Tensor) -> Tensor:
        r""":math:`\alpha_t`: float64, 0-d. ``count`` is the number of weights in the average, these included; at least 1."""
        raise NotImplementedError

    def init(self, params: P) -> AverageState[P]:
        """Return the initial weights."""
        return AverageState(tree.map(torch.clone, params))

    def update(
        self, updates: P, state: AverageState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, AverageState[P]]:
        """Bring the average nearer to the weights after this update, which is returned as it is."""
        step = require_step(ctx.step, type(self).__name__)
        count = (step - self.start).clamp(min=1)
        # Until `start` the average is the weights themselves.
        share = materialize(torch.where(step > self.start, self.share(count, step), 1.0))
        average = tree.elementwise(lambda a, p, u: a + share * ((p + u) - a), state.average, params, updates)
        return updates, AverageState(average)

    def eval_params(self, params: P, state: AverageState[P]) -> P:
        """Return the average."""
        return state.average


@dataclass(frozen=True, slots=True)
class AverageWeights(_Average):
    r"""Exponential moving average of the weights (EMA), with Adam's bias correction; the last transform of a chain.

    .. math::
        a_t = \frac{1-\beta}{1-\beta^t} \sum_{s=1}^{t} \beta^{t-s} p_s

    is kept as :math:`a_t = a_{t-1} + \frac{1-\beta}{1-\beta^t} (p_t - a_{t-1})`, which are the same numbers: the first average is the first
    weights, and their share fades as that of all others does. Without ``debias`` the average begins at the first weights and gives all
    later weights the share :math:`1-\beta`, as ``torch.optim.swa_utils.AveragedModel`` does with ``get_ema_multi_avg_fn``.

    The average is a slot, ``average``, which a policy stores as it stores any other (``Policy.slots``). A 16-bit format that rounds to
    nearest is refused at a decay rate of 0.97 and more: such an average stops moving.

    Args:
        decay: :math:`\beta`, in [0, 1].
        start: Averaging begins after so many steps. Until then the average is the weights.
        debias: Correct the bias towards the first weights.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Polyak & Juditsky 1992, https://doi.org/10.1137/0330046; the correction is Kingma & Ba 2015, https://arxiv.org/abs/1412.6980.

    Examples:
        >>> import torch, everybit as eb
        >>> tx = eb.chain(eb.sgd(1.0), eb.average_weights(0.5))
        >>> opt = eb.with_policy(tx, eb.policies.FP32)
        >>> params, state = torch.tensor([8.0]), opt.init(torch.tensor([8.0]))
        >>> for _ in range(2):
        ...     params, state = opt.step(params, torch.tensor([3.0]), state)
        >>> params, opt.eval_params(params, state)  # (0.5 * 5 + 2) / 1.5
        (tensor([2.]), tensor([3.]))
    """

    decay: Share = 0.999
    start: UpdatesFromZero = 0
    debias: bool = True

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``average`` decays with ``decay``."""
        return (SlotDecay("average", self.decay),)

    def share(self, count: Tensor, step: Tensor) -> Tensor:
        r""":math:`1-\beta`, over :math:`1-\beta^n` for the bias."""
        decay = at(self.decay, step, name="decay")
        newest = (1 - decay) * torch.ones_like(count, dtype=torch.float64)
        if self.debias:
            return torch.where(newest > 0, newest / bias_correction(decay, count), 1 / count.double())
        return torch.where(count == 1, 1.0, newest)


@dataclass(frozen=True, slots=True)
class MeanWeights(_Average):
    r"""The mean of the weights after each step since ``start``: stochastic weight averaging (SWA); the last transform of a chain.

    Args:
        start: Averaging begins after so many steps. Until then the average is the weights.

    Raises:
        ValueError: ``start`` is no whole number, or negative.

    Reference:
        Izmailov et al. 2018, https://arxiv.org/abs/1803.05407; ``torch.optim.swa_utils.AveragedModel``.
    """

    start: UpdatesFromZero = 0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``average`` moves more slowly the longer it is kept."""
        return (SlotDecay("average", 1.0),)

    def share(self, count: Tensor, step: Tensor) -> Tensor:
        r""":math:`1/n`."""
        return 1 / count.double()


@dataclass(frozen=True, slots=True)
class PowerAverageWeights(_Average):
    r"""Keep a power-function EMA of the weights, with a length that grows with the run; the last transform of a chain.

    .. math::
        \alpha_t = 1 - (1 - 1/t)^{\gamma + 1}

    Args:
        gamma: :math:`\gamma`, at least zero: the share of step s in the average is proportional to :math:`s^\gamma`. 6.94 gives a
            relative width of 0.10 of the run, 16.97 a width of 0.05; 0 is the mean.
        start: Averaging begins after so many steps. Until then the average is the weights.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Karras et al. 2024, https://arxiv.org/abs/2312.02696, section 3.1.
    """

    gamma: NonNegative = 6.94
    start: UpdatesFromZero = 0

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``average`` moves more slowly the longer it is kept."""
        return (SlotDecay("average", 1.0),)

    def share(self, count: Tensor, step: Tensor) -> Tensor:
        r""":math:`1 - (1 - 1/n)^{\gamma+1}`."""
        return 1 - (1 - 1 / count.double()) ** (at(self.gamma, step, name="gamma") + 1)


average_weights = AverageWeights
mean_weights = MeanWeights
power_average_weights = PowerAverageWeights


@tree.state
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

    learning_rate: NonNegative = 1e-2
    lambd: NonNegative = 1e-4
    alpha: Finite = 0.75
    t0: Finite = 1e6

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
        rate, lambd, alpha, start = self.at(step, "learning_rate", "lambd", "alpha", "t0")
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


@tree.state
class ScheduleFreeState(Generic[P]):
    """``base``: the weights that are stepped, the paper's z. Beside it the sum of the shares so far, and the greatest learning rate."""

    base: Slot[P]
    weight_sum: Tensor
    greatest_rate: Tensor


@dataclass(frozen=True, slots=True)
class ScheduleFree(Elementwise):
    r"""Step weights z along the updates, average them as x, and take gradients at a point y between; the last transform of a chain.

    .. math::
        \eta_t = \eta \min(t/T, 1) \qquad
        w_t = t^r \left(\max_{s \le t} \eta_s\right)^q \qquad
        c_t = w_t / \sum_{s \le t} w_s

        z_t = z_{t-1} - \eta_t u_t \qquad
        x_t = (1-c_t) x_{t-1} + c_t z_t \qquad
        y_t = (1-\beta) z_t + \beta x_t

    The parameters are y, all the time: there is no mode to switch. ``eval_params`` returns x, which is
    :math:`y + (1 - 1/\beta)(z - y)`, and does not change the state. The slot beside the parameters is z. It takes the place of
    ``scale_by_learning_rate``; weight decay before it is decay at y, as in the authors' code.

    Args:
        learning_rate: :math:`\eta`, at least zero; larger than of the same optimizer with a schedule.
        b1: :math:`\beta`, in (0, 1]: how near y is to the average.
        warmup_steps: :math:`T`, the number of updates over which the learning rate grows linearly; 0: no warmup.
        r: Shares grow with this power of the number of the update; at least zero.
        weight_lr_power: :math:`q`: shares grow with this power of the greatest learning rate so far; at least zero.
        rectified_by: Multiply :math:`\eta_t` by RAdam's rectification for second moments with this decay rate; None: do not.
        untrusted: The factor where there is no rectification, up to a length of 4: 0, no step, as ``schedulefree`` by default, or 1.

    Raises:
        TypeError: A schedule for ``b1``, which is used where no step is counted.
        ValueError: A hyperparameter out of range, or not finite.

    Reference:
        Defazio et al. 2024, https://arxiv.org/abs/2405.15682, Algorithm 1; shares and warm-up as in ``schedulefree`` 1.4.
    """

    learning_rate: NonNegative = 1.0
    _: KW_ONLY
    b1: FixedShare = 0.9
    warmup_steps: UpdatesFromZero = 0
    r: NonNegative = 0.0
    weight_lr_power: NonNegative = 2.0
    rectified_by: Rate | None = None
    untrusted: Share = 0.0

    def __post_init__(self) -> None:
        Elementwise.__post_init__(self)
        if is_zero(self.b1):
            raise ValueError("b1: got 0.0; accepted is a number in (0, 1]: the average is found by dividing by it.")

    def decays(self) -> tuple[SlotDecay, ...]:
        """``base`` is a sum of all updates."""
        return (SlotDecay("base", 1.0),)

    def init(self, params: P) -> ScheduleFreeState[P]:
        """Return the initial weights as z, and no shares."""
        leaves = tree.leaves(params)
        nothing = torch.zeros((), dtype=torch.float64, device=leaves[0].device if leaves else None)
        return ScheduleFreeState(tree.map(torch.clone, params), nothing, nothing.clone())

    def update(
        self, updates: P, state: ScheduleFreeState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, ScheduleFreeState[P]]:
        """Step z, and return how far y moves, without computing x."""
        step = require_step(ctx.step, "schedule_free").double()
        b1 = self._b1()
        rate = at(self.learning_rate, ctx.step, name="learning_rate") * torch.ones_like(step)
        if self.warmup_steps:
            rate = rate * (step / self.warmup_steps).clamp(max=1.0)
        if self.rectified_by is not None:
            decay, untrusted = (
                at(self.rectified_by, ctx.step, name="rectified_by"),
                at(self.untrusted, ctx.step, name="untrusted"),
            )
            is_trusted, factor = rectification(decay, require_step(ctx.step, "schedule_free"), 4.0)
            rate = rate * torch.where(is_trusted, factor, untrusted)
        greatest = torch.maximum(state.greatest_rate, rate)
        weight = step ** at(self.r, ctx.step, name="r")
        weight = weight * greatest ** at(self.weight_lr_power, ctx.step, name="weight_lr_power")
        weight_sum = state.weight_sum + weight
        # Until there is a learning rate above zero the average is empty.
        share = materialize(torch.where(weight_sum > 0, weight / torch.where(weight_sum > 0, weight_sum, 1.0), 0.0))
        along = materialize(rate * (b1 * (1 - share) - 1))
        rate = materialize(rate)

        moved = tree.elementwise(lambda u, y, z: share * (z - y) + along * u, updates, params, state.base)
        base = tree.elementwise(lambda u, z: z - rate * u, updates, state.base)
        return moved, ScheduleFreeState(base, weight_sum, greatest)

    def eval_params(self, params: P, state: ScheduleFreeState[P]) -> P:
        """Return x, the average of the weights that were stepped."""
        beyond = 1 - 1 / self._b1()
        return tree.elementwise(lambda y, z: y + beyond * (z - y), params, state.base)

    def _b1(self) -> Scalar:
        return at(self.b1, None, name="b1")


schedule_free = ScheduleFree
