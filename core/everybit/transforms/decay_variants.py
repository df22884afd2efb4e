"""Weight decay that depends on the direction, or follows the learning rate; :mod:`everybit.transforms.weight_decay` has the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Scalar, as_tensor, at, is_zero, require, require_count, require_step, tree
from everybit.protocol import ALONE, Context, Elementwise
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AddCautiousDecay(Elementwise):
    r"""Cautious weight decay: add :math:`\lambda p` to the updates where it points the way of the update, :math:`u p > 0`.

    Between preconditioner and learning rate, where the updates still point uphill.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        at_zero: Decay where an update is exactly zero too, :math:`u p \ge 0`. Implementations differ in this.

    Raises:
        ValueError: ``weight_decay`` out of range.

    Reference:
        Chen et al. 2025, https://arxiv.org/abs/2510.12402.
    """

    weight_decay: Hyperparameter = 1e-2
    at_zero: bool = False

    def __post_init__(self) -> None:
        require("weight_decay", self.weight_decay, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates + weight_decay * params`` where their signs agree, else ``updates``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        if is_zero(weight_decay):
            return updates, state

        def decayed(u: Tensor, p: Tensor) -> Tensor:
            # Signs, since their product neither overflows nor vanishes.
            agreement = torch.sign(u) * torch.sign(p)
            agrees = agreement >= 0 if self.at_zero else agreement > 0
            if isinstance(weight_decay, Tensor):
                agrees = agrees & (weight_decay != 0)
            return torch.where(agrees, u + weight_decay * p, u)

        return tree.elementwise(decayed, updates, params), state


@dataclass(frozen=True, slots=True)
class AddCorrectedDecay(Elementwise):
    r"""AdamC's corrected weight decay: add :math:`\lambda p \, \eta_t / \eta_\text{max}` to the updates.

    The learning rate is applied after it, so that a step shrinks a weight by :math:`\lambda \eta_t^2 / \eta_\text{max}` of itself. It is
    meant for weights that are followed by a normalization; use :func:`everybit.masked` for them. timm's ``corrected_weight_decay`` is the
    same.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        learning_rate: :math:`\eta_t`, the learning rate of the chain.
        max_learning_rate: :math:`\eta_\text{max}`, above zero.

    Raises:
        ValueError: A hyperparameter out of range.

    Reference:
        Defazio 2025, https://arxiv.org/abs/2506.02285, Algorithm 1.
    """

    weight_decay: Hyperparameter
    learning_rate: Hyperparameter
    max_learning_rate: Scalar

    def __post_init__(self) -> None:
        require("weight_decay", self.weight_decay, 0.0)
        require("learning_rate", self.learning_rate, 0.0)
        require("max_learning_rate", self.max_learning_rate, 0.0, schedule=False)
        if is_zero(self.max_learning_rate):
            raise ValueError("max_learning_rate: got 0.0; accepted is a number above zero.")

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates + weight_decay * (learning_rate / max_learning_rate) * params``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        decay = weight_decay * (at(self.learning_rate, ctx.step, name="learning_rate") / self.max_learning_rate)
        if is_zero(decay):
            return updates, state

        def decayed(u: Tensor, p: Tensor) -> Tensor:
            # Zero times an infinite weight would be NaN; a decay that is the number zero was skipped above.
            added = decay * p
            return u + (torch.where(decay == 0, -0.0, added) if isinstance(decay, Tensor) else added)

        return tree.elementwise(decayed, updates, params), state


@dataclass(frozen=True, slots=True)
class SubtractDecayOfMoved(Elementwise):
    r"""Decay weights after they have moved, :math:`p \leftarrow (1 - \eta\lambda)(p + u)`, as SOAP's authors do; after the learning rate.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        learning_rate: :math:`\eta`, at least zero.
        after: The number of first updates without decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """

    weight_decay: Hyperparameter = 1e-2
    learning_rate: Hyperparameter = 1e-3
    after: int = 0

    def __post_init__(self) -> None:
        require("weight_decay", self.weight_decay, 0.0)
        require("learning_rate", self.learning_rate, 0.0)
        require_count("after", self.after, "a whole number of updates", 0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates - learning_rate * weight_decay * (params + updates)``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        if is_zero(weight_decay):
            return updates, state
        rate = at(self.learning_rate, ctx.step, name="learning_rate") * weight_decay
        pauses = as_tensor(rate) == 0
        if self.after:
            pauses = pauses | (require_step(ctx.step, "subtract_decay_of_moved") <= self.after)

        def decayed(u: Tensor, p: Tensor) -> Tensor:
            return torch.where(pauses.to(u.device), u, u - rate * (p + u))

        return tree.elementwise(decayed, updates, params), state


add_cautious_decay = AddCautiousDecay
add_corrected_decay = AddCorrectedDecay
subtract_decay_of_moved = SubtractDecayOfMoved
