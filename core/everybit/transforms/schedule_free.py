"""Schedule-free learning: gradients at a point between the weights that are stepped and their average."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Scalar,
    Slot,
    at,
    is_zero,
    materialize,
    require,
    require_count,
    require_step,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise, SlotDecay
from everybit.transforms.radam import rectification

P = TypeVar("P")


@tree.state
@dataclass(frozen=True, slots=True)
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

    learning_rate: Hyperparameter = 1.0
    _: KW_ONLY
    b1: Hyperparameter = 0.9
    warmup_steps: int = 0
    r: Hyperparameter = 0.0
    weight_lr_power: Hyperparameter = 2.0
    rectified_by: Hyperparameter | None = None
    untrusted: Hyperparameter = 0.0

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, 0.0)
        require("b1", self.b1, 0.0, 1.0, schedule=False)
        if is_zero(self.b1):
            raise ValueError("b1: got 0.0; accepted is a number in (0, 1]: the average is found by dividing by it.")
        require("r", self.r, 0.0)
        require("weight_lr_power", self.weight_lr_power, 0.0)
        if self.rectified_by is not None:
            require("rectified_by", self.rectified_by, 0.0, 1.0, open_high=True)
        require("untrusted", self.untrusted, 0.0, 1.0)
        require_count("warmup_steps", self.warmup_steps, "a number of updates", 0)

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
