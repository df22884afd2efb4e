"""Running averages of the weights, which are evaluated in the place of those that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Slot,
    at,
    bias_correction,
    materialize,
    require,
    require_count,
    require_step,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
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

    decay: Hyperparameter = 0.999
    start: int = 0
    debias: bool = True

    def __post_init__(self) -> None:
        require("decay", self.decay, 0.0, 1.0)
        _require_start(self.start)

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

    start: int = 0

    def __post_init__(self) -> None:
        _require_start(self.start)

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

    gamma: Hyperparameter = 6.94
    start: int = 0

    def __post_init__(self) -> None:
        require("gamma", self.gamma, 0.0)
        _require_start(self.start)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``average`` moves more slowly the longer it is kept."""
        return (SlotDecay("average", 1.0),)

    def share(self, count: Tensor, step: Tensor) -> Tensor:
        r""":math:`1 - (1 - 1/n)^{\gamma+1}`."""
        return 1 - (1 - 1 / count.double()) ** (at(self.gamma, step, name="gamma") + 1)


def _require_start(start: object) -> None:
    require_count("start", start, "a number of steps", 0)


average_weights = AverageWeights
mean_weights = MeanWeights
power_average_weights = PowerAverageWeights
