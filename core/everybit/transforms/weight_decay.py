"""Weight decay, and its variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import (
    FixedAboveZero,
    NonNegative,
    Scalar,
    UpdatesFromZero,
    as_tensor,
    at,
    is_zero,
    require_step,
    tree,
)
from everybit.protocol import ALONE, Context, Elementwise
from everybit.transforms.updates import Empty, Memoryless

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AddDecayedWeights(Memoryless, Elementwise):
    r"""Add :math:`\lambda p` to the updates, before the learning rate is applied.

    Put before a preconditioner this is an L2 penalty, ``torch.optim.Adam``'s and ``SGD``'s ``weight_decay``. Put between preconditioner
    and learning rate it is AdamW's decay :math:`p \leftarrow p - \eta\lambda p` (Loshchilov & Hutter 2019,
    https://arxiv.org/abs/1711.05101). Being part of the update it is inside every compensation: a decay of
    :math:`\eta\lambda = 10^{-5}` reaches bfloat16 weights, which ``p.mul_(1 - lr * wd)`` in bfloat16 never does.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
    """

    weight_decay: NonNegative = 1e-2

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates + weight_decay * params``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        if is_zero(weight_decay):
            return updates, state
        return tree.elementwise(lambda u, p: u + _decay(weight_decay, p, -0.0), updates, params), state


@dataclass(frozen=True, slots=True)
class SubtractDecayedWeights(Memoryless, Elementwise):
    r"""Subtract :math:`\lambda s_t p` from the updates, after the learning rate is applied: fully decoupled decay.

    The learning rate scales the decay only by how far its schedule has come, :math:`s_t = \eta_t / \eta_\text{max}`, so that tuning
    tuning either does not detune the other (Loshchilov & Hutter 2019, section 2; Schaipp 2024, https://fabian-sp.github.io/posts/2024/02/decoupling/).

    Args:
        weight_decay: :math:`\lambda`, at least zero; typically 1e-5 to 1e-4.
        learning_rate: :math:`\eta_t`; None for :math:`s_t = 1`.
        max_learning_rate: :math:`\eta_\text{max}`, above zero.

    Raises:
        ValueError: One of ``learning_rate`` and ``max_learning_rate`` without the other, or out of range.
    """

    weight_decay: NonNegative = 1e-4
    learning_rate: NonNegative | None = None
    max_learning_rate: FixedAboveZero | None = None

    def __post_init__(self) -> None:
        Elementwise.__post_init__(self)
        if (self.learning_rate is None) != (self.max_learning_rate is None):
            raise ValueError(
                "max_learning_rate: fully decoupled decay scales with learning_rate / max_learning_rate, so it needs both or neither;"
                f" got learning_rate={self.learning_rate!r}, max_learning_rate={self.max_learning_rate!r}."
            )

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates - weight_decay * (learning_rate / max_learning_rate) * params``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        if self.learning_rate is not None and self.max_learning_rate is not None:
            weight_decay = weight_decay * (
                at(self.learning_rate, ctx.step, name="learning_rate") / self.max_learning_rate
            )
        if is_zero(weight_decay):
            return updates, state
        return tree.elementwise(lambda u, p: u - _decay(weight_decay, p, 0.0), updates, params), state


def _decay(weight_decay: Scalar, p: Tensor, nothing: float) -> Tensor:
    """``weight_decay * p``, and ``nothing`` where the decay is zero: zero times an infinite weight would be NaN.

    A decay that is the number zero is skipped by the caller; compiled code gets the same zero as a tensor, and has to give the same bits.
    ``nothing`` is the zero that leaves an update its sign: -0.0 to add, 0.0 to subtract.
    """
    decay = weight_decay * p
    return torch.where(weight_decay == 0, nothing, decay) if isinstance(weight_decay, Tensor) else decay


def not_norm_or_bias(path: str, parameter: Tensor) -> bool:
    """Whether a parameter is decayed under the usual recipe "no weight decay on norms and biases"; a mask for weight decay.

    The weights of normalization layers and biases are vectors, so a parameter is decayed if it has two dimensions or more and is not called
    a bias. For a ``torch.nn.Module`` see also :func:`everybit_torch.weight_decay_groups`, which knows the classes of its layers.

    Args:
        path: As :func:`everybit.tree.paths` writes it. The last name decides: one of its words, separated by underscores, is ``bias``.
        parameter: A parameter of any shape; its values are not read.

    Examples:
        >>> import everybit as eb
        >>> optimizer = eb.adamw(3e-4, weight_decay=0.1, mask=eb.not_norm_or_bias)
        >>> decay = eb.masked(eb.add_decayed_weights(0.1), where=eb.not_norm_or_bias)
    """
    name = path.rstrip("]'\"").replace("'", ".").replace('"', ".").replace("[", ".").rsplit(".", 1)[-1]
    return parameter.ndim >= 2 and "bias" not in name.split("_")


add_decayed_weights = AddDecayedWeights
subtract_decayed_weights = SubtractDecayedWeights


@dataclass(frozen=True, slots=True)
class AddCautiousDecay(Memoryless, Elementwise):
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

    weight_decay: NonNegative = 1e-2
    at_zero: bool = False

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
class AddCorrectedDecay(Memoryless, Elementwise):
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

    weight_decay: NonNegative
    learning_rate: NonNegative
    max_learning_rate: FixedAboveZero

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
class SubtractDecayOfMoved(Memoryless, Elementwise):
    r"""Decay weights after they have moved, :math:`p \leftarrow (1 - \eta\lambda)(p + u)`, as SOAP's authors do; after the learning rate.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
        learning_rate: :math:`\eta`, at least zero.
        after: The number of first updates without decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """

    weight_decay: NonNegative = 1e-2
    learning_rate: NonNegative = 1e-3
    after: UpdatesFromZero = 0

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
