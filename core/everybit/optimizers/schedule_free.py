"""Schedule-free optimizers."""

from __future__ import annotations

from everybit.base import Hyperparameter, Scalar
from everybit.combinators import Chain, chain
from everybit.transforms import add_decayed_weights, scale_by_running_square, schedule_free


def schedule_free_sgd(
    learning_rate: Hyperparameter = 1.0,
    *,
    b1: Scalar = 0.9,
    warmup_steps: int = 0,
    r: Hyperparameter = 0.0,
    weight_lr_power: Hyperparameter = 2.0,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Schedule-free SGD (Defazio et al. 2024, https://arxiv.org/abs/2405.15682), as ``schedulefree.SGDScheduleFree``.

    The weights for evaluation are those of ``eval_params``; there is no mode to switch.

    Args:
        learning_rate: Non-negative.
        b1: How near to the average gradients are taken, in (0, 1]; ``momentum`` of ``schedulefree``.
        warmup_steps: Number of updates over which the learning rate grows linearly.
        r: Shares in the average grow with this power of the number of the update.
        weight_lr_power: Shares in the average grow with this power of the greatest learning rate so far.
        weight_decay: Added to the gradient, at the weights where it is taken.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        add_decayed_weights(weight_decay),
        schedule_free(learning_rate, b1=b1, warmup_steps=warmup_steps, r=r, weight_lr_power=weight_lr_power),
    )


def schedule_free_adamw(
    learning_rate: Hyperparameter = 2.5e-3,
    *,
    b1: Scalar = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    warmup_steps: int = 0,
    r: Hyperparameter = 0.0,
    weight_lr_power: Hyperparameter = 2.0,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Schedule-free AdamW (Defazio et al. 2024, https://arxiv.org/abs/2405.15682), as ``schedulefree.AdamWScheduleFree``.

    The weights for evaluation are those of ``eval_params``; there is no mode to switch. It has two slots, as AdamW.

    Args:
        learning_rate: Non-negative, and one to ten times AdamW's.
        b1: How near to the average gradients are taken, in (0, 1]; there is no mean of gradients.
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        warmup_steps: Number of updates over which the learning rate grows linearly.
        r: Shares in the average grow with this power of the number of the update.
        weight_lr_power: Shares in the average grow with this power of the greatest learning rate so far.
        weight_decay: Decoupled decay, at the weights where gradients are taken.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_running_square(b2, eps),
        add_decayed_weights(weight_decay),
        schedule_free(learning_rate, b1=b1, warmup_steps=warmup_steps, r=r, weight_lr_power=weight_lr_power),
    )


def schedule_free_radam(
    learning_rate: Hyperparameter = 2.5e-3,
    *,
    b1: Scalar = 0.9,
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
        learning_rate: Non-negative.
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
