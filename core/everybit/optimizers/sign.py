"""Optimizers that step by the sign of an average."""

from __future__ import annotations

from everybit.base import Hyperparameter
from everybit.combinators import Chain, chain
from everybit.optimizers.sgd import ascent
from everybit.transforms import add_decayed_weights, running_mean, scale_by_learning_rate, scale_by_lion, scale_by_sign


def lion(
    learning_rate: Hyperparameter = 1e-4,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Lion with decoupled weight decay (Chen et al. 2023, https://arxiv.org/abs/2302.06675).

    Args:
        learning_rate: Non-negative; about a tenth to a third of AdamW's.
        b1: Weight of the momentum in the direction, in [0, 1).
        b2: Decay rate of the momentum, in [0, 1).
        weight_decay: Decay; about three to ten times AdamW's.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        *ascent(maximize),
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def signum(
    learning_rate: Hyperparameter = 1e-4,
    *,
    momentum: Hyperparameter = 0.9,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Signum (Bernstein et al. 2018, https://arxiv.org/abs/1802.04434): the sign of the gradients' running mean.

    Args:
        learning_rate: Non-negative.
        momentum: Decay rate of the mean, in [0, 1).
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        running_mean(momentum),
        scale_by_sign(),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def tiger(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.965,
    weight_decay: Hyperparameter = 1e-2,
) -> Chain:
    """Tiger (Su 2023, https://github.com/bojone/tiger), a Lion of one decay rate: Signum by other defaults.

    Args:
        learning_rate: Non-negative. The author's scales by parameter's root mean square are not part of it.
        b1: Decay rate of the mean, in [0, 1).
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return signum(learning_rate, momentum=b1, weight_decay=weight_decay)
