"""Weight decay, in the two ways that are called decoupled, and in the coupled way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from everybit.base import Hyperparameter, Scalar, at, is_zero, require, tree
from everybit.protocol import ALONE, Context, Elementwise
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class AddDecayedWeights(Elementwise):
    r"""Add :math:`\lambda p` to the updates, before the learning rate is applied.

    Put before a preconditioner this is an L2 penalty, ``torch.optim.Adam``'s and ``SGD``'s ``weight_decay``. Put between preconditioner
    and learning rate it is AdamW's decay :math:`p \leftarrow p - \eta\lambda p` (Loshchilov & Hutter 2019,
    https://arxiv.org/abs/1711.05101). Being part of the update it is inside every compensation: a decay of
    :math:`\eta\lambda = 10^{-5}` reaches bfloat16 weights, which ``p.mul_(1 - lr * wd)`` in bfloat16 never does.

    Args:
        weight_decay: :math:`\lambda`, at least zero.
    """

    weight_decay: Hyperparameter = 1e-2

    def __post_init__(self) -> None:
        require("weight_decay", self.weight_decay, 0.0)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """``updates + weight_decay * params``."""
        weight_decay = at(self.weight_decay, ctx.step, name="weight_decay")
        if is_zero(weight_decay):
            return updates, state
        return tree.elementwise(lambda u, p: u + _decay(weight_decay, p, -0.0), updates, params), state


@dataclass(frozen=True, slots=True)
class SubtractDecayedWeights(Elementwise):
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

    weight_decay: Hyperparameter = 1e-4
    learning_rate: Hyperparameter | None = None
    max_learning_rate: Scalar | None = None

    def __post_init__(self) -> None:
        require("weight_decay", self.weight_decay, 0.0)
        if (self.learning_rate is None) != (self.max_learning_rate is None):
            raise ValueError(
                "max_learning_rate: fully decoupled decay scales with learning_rate / max_learning_rate, so it needs both or neither;"
                f" got learning_rate={self.learning_rate!r}, max_learning_rate={self.max_learning_rate!r}."
            )
        if self.learning_rate is not None and self.max_learning_rate is not None:
            require("learning_rate", self.learning_rate, 0.0)
            require("max_learning_rate", self.max_learning_rate, 0.0, schedule=False)
            if is_zero(self.max_learning_rate):
                raise ValueError("max_learning_rate: got 0.0; accepted is a number above zero.")

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory."""
        return Empty()

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
