"""Optimizers that make another step of Adam's moments, each a composition of transforms."""

from __future__ import annotations

from everybit.combinators.chain import Chain, chain
from everybit.scalars import Hyperparameter
from everybit.transforms.adam_atan2 import scale_by_adam_atan2
from everybit.transforms.running_mean import scale_by_running_square
from everybit.transforms.schedule_free import schedule_free
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


def schedule_free_radam(
    learning_rate: Hyperparameter = 2.5e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    r: Hyperparameter = 0.0,
    weight_lr_power: Hyperparameter = 2.0,
    weight_decay: Hyperparameter = 0.0,
    sgd_phase: bool = False,
) -> Chain:
    """Schedule-free RAdam (Defazio et al. 2024, https://arxiv.org/abs/2405.15682), as ``schedulefree.RAdamScheduleFree``.

    :func:`everybit.schedule_free_adamw` with RAdam's rectification in the place of a warm-up.

    Args:
        learning_rate: At least zero.
        b1: How near to the average gradients are taken, in (0, 1]; there is no mean of gradients.
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        r: Shares in the average grow with this power of the number of the update.
        weight_lr_power: Shares in the average grow with this power of the greatest learning rate so far.
        weight_decay: Decoupled decay, at the weights where gradients are taken.
        sgd_phase: Step along the gradients until the square can be trusted, as RAdam (``silent_sgd_phase=False``); else do not step.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_running_square(b2, eps, sgd_phase),
        add_decayed_weights(weight_decay),
        schedule_free(
            learning_rate,
            b1=b1,
            r=r,
            weight_lr_power=weight_lr_power,
            rectified_by=b2,
            untrusted=1.0 if sgd_phase else 0.0,
        ),
    )
