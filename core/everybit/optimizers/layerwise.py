"""Optimizers with rates that follow norms of each parameter."""

from __future__ import annotations

from everybit.base import Hyperparameter, is_zero
from everybit.combinators import Chain, chain
from everybit.transforms import (
    add_decayed_weights,
    clip_by_global_norm,
    identity,
    scale_by_adam,
    scale_by_lars,
    scale_by_learning_rate,
    scale_by_trust_ratio,
    trace,
)


def lamb(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 1e-2,
    max_grad_norm: Hyperparameter | None = None,
    max_ratio: Hyperparameter | None = None,
    always_adapt: bool = True,
) -> Chain:
    """LAMB (You et al. 2020, https://arxiv.org/abs/1904.00962), as optax's; as timm's with other arguments.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Added to Adam's direction, before its norm is taken.
        max_grad_norm: Limit of the norm of all gradients; None: no limit, as in the paper and optax. timm has 1.0.
        max_ratio: Limit of the trust ratio: 1 for LAMBC, timm's ``trust_clip=True``. None: no limit.
        always_adapt: False: without trust ratios if the weight decay is the number zero, as timm.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    adapts = always_adapt or not is_zero(weight_decay)
    return chain(
        identity() if max_grad_norm is None else clip_by_global_norm(max_grad_norm),
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(max_ratio=max_ratio) if adapts else identity(),
        scale_by_learning_rate(learning_rate),
    )


def lars(
    learning_rate: Hyperparameter = 1.0,
    *,
    momentum: Hyperparameter = 0.9,
    nesterov: bool = False,
    weight_decay: Hyperparameter = 0.0,
    trust_coefficient: Hyperparameter = 1e-3,
    eps: Hyperparameter = 1e-8,
    joint_norm: bool = False,
    rate_inside: bool = False,
) -> Chain:
    """LARS (You et al. 2017, https://arxiv.org/abs/1708.03888): the paper's ratio, with the learning rate outside of momentum, as timm.

    Args:
        learning_rate: Non-negative.
        momentum: Decay of the momentum, in [0, 1].
        nesterov: Look ahead.
        weight_decay: L2 penalty, added to the gradient.
        trust_coefficient: The ratio of an update's norm to its parameter's, before learning rate and momentum.
        eps: Added to the norm that is divided by.
        joint_norm: Divide by the norm of gradient and decay together, as optax; else by the sum of their norms, as the paper and timm.
        rate_inside: Multiply by the learning rate before momentum, as the paper and optax; else after it, as timm. They differ if it
            changes.

    Raises:
        ValueError: A hyperparameter out of range; Nesterov without momentum.
    """
    ratio = (
        (add_decayed_weights(weight_decay), scale_by_trust_ratio(coefficient=trust_coefficient, eps=eps))
        if joint_norm
        else (scale_by_lars(weight_decay, trust_coefficient, eps),)
    )
    ways = (trace(momentum, nesterov=nesterov), scale_by_learning_rate(learning_rate))
    return chain(*ratio, *(reversed(ways) if rate_inside else ways))
