"""Optimizers that make another step of Adam's moments, each a composition of transforms."""

from __future__ import annotations

from everybit.combinators.chain import Chain, chain
from everybit.scalars import Hyperparameter
from everybit.transforms.adam_atan2 import scale_by_adam_atan2
from everybit.transforms.stateless import scale_by_learning_rate
from everybit.transforms.weight_decay import add_decayed_weights


def adam_atan2(
    learning_rate: Hyperparameter = 1e-4,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    a: Hyperparameter = 1.27,
    b: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Adam-atan2 (Everett et al. 2024, https://arxiv.org/abs/2407.05872), as ``adam_atan2_pytorch.AdamAtan2``.

    Args:
        learning_rate: At least zero.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        a: A factor of the angle; 1 in the paper.
        b: A factor of the root.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_adam_atan2(b1, b2, a, b), add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate)
    )
