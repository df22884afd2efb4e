"""Optimizers with moments of their own in the place of Adam's."""

from __future__ import annotations

from everybit.base import Hyperparameter, Scalar
from everybit.combinators import Chain, chain
from everybit.transforms import (
    add_decayed_weights,
    begin_after,
    proximal_decay,
    reduce_variance,
    running_mean,
    scale_by_adam,
    scale_by_adan,
    scale_by_ademamix,
    scale_by_adopt,
    scale_by_belief,
    scale_by_learning_rate,
    scale_by_running_square,
    scale_by_sign,
    scale_by_yogi,
)


def adabelief(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-16,
    eps_root: Hyperparameter = 1e-16,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """AdaBelief (Zhuang et al. 2020, https://arxiv.org/abs/2010.07468), without rectification, as optax's.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        eps_root: Added to the square at every update.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_belief(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def yogi(
    learning_rate: Hyperparameter = 1e-2,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-3,
    initial_mean: Scalar = 0.0,
    initial_square: Scalar = 1e-6,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Yogi (Zaheer et al. 2018, https://papers.nips.cc/paper/8186); optax's with ``initial_mean=1e-6``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: One minus the share of the squared gradient by which the square moves, in [0, 1).
        eps: Added outside the root.
        initial_mean: First value of the mean.
        initial_square: First value of the square.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_yogi(b1, b2, eps, initial_mean=initial_mean, initial_square=initial_square),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def laprop(
    learning_rate: Hyperparameter = 4e-4,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-15,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """LaProp (Ziyin et al. 2020, https://arxiv.org/abs/2002.04839): gradients are divided by Adam's root first, and averaged then.

    Args:
        learning_rate: Non-negative. It is applied after the mean; the authors' code applies it before, which differs if it changes.
        b1: Decay rate of the mean of normalised gradients, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Decoupled decay, of the weights before the step; the authors' code and timm decay those after it.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_running_square(b2, eps),
        running_mean(b1, debias=True),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def adopt(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.9999,
    eps: Hyperparameter = 1e-6,
    clip_power: Hyperparameter | None = 0.25,
    nesterov: bool = False,
    weight_decay: Hyperparameter = 0.0,
    decay_at_first: bool = False,
) -> Chain:
    """ADOPT (Taniguchi et al. 2024, https://arxiv.org/abs/2411.02853), as the authors' ``ADOPT`` with ``decouple=True``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: The least denominator.
        clip_power: Normalised gradients are limited to this power of the number of updates before; 1/4 in the authors' code and optax,
            1/3 in timm. None: no limit.
        nesterov: Look ahead, as optax's option.
        weight_decay: Decoupled decay.
        decay_at_first: Decay weights at the first update too, which else only begins the square; as optax does.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_adopt(b1, b2, eps, clip_power=clip_power, nesterov=nesterov),
        add_decayed_weights(weight_decay),
        begin_after(0 if decay_at_first else 1),
        scale_by_learning_rate(learning_rate),
    )


def adan(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.98,
    b2: Hyperparameter = 0.92,
    b3: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    look_ahead: Hyperparameter | None = None,
    weight_decay: Hyperparameter = 0.0,
    proximal: bool = True,
) -> Chain:
    """Adan (Xie et al. 2022, https://arxiv.org/abs/2208.06677), as the authors' and timm's.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the gradients' mean, in [0, 1).
        b2: Decay rate of the differences' mean, in [0, 1).
        b3: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        eps_root: Added inside the root.
        look_ahead: Weight of the differences; None: ``b2``. optax has ``1 - b2``.
        weight_decay: Decoupled decay.
        proximal: Divide the moved weights by ``1 + learning_rate * weight_decay``, as the paper; else decay as AdamW, as the authors'
            ``no_prox=True`` and optax.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    direction, descent = scale_by_adan(b1, b2, b3, eps, eps_root, look_ahead), scale_by_learning_rate(learning_rate)
    if proximal:
        return chain(direction, descent, proximal_decay(weight_decay, learning_rate))
    return chain(direction, add_decayed_weights(weight_decay), descent)


def ademamix(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    b3: Hyperparameter = 0.9999,
    alpha: Hyperparameter = 5.0,
    alpha_warmup: int | None = None,
    b3_warmup: int | None = None,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 1e-2,
) -> Chain:
    """AdEMAMix (Pagliardini et al. 2024, https://arxiv.org/abs/2409.03137), as bitsandbytes' ``AdEMAMix``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the fast mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        b3: Decay rate of the slow mean, in [0, 1).
        alpha: Weight of the slow mean.
        alpha_warmup: Number of updates until ``alpha`` is reached; bitsandbytes' ``t_alpha``.
        b3_warmup: Number of updates until ``b3`` is reached; bitsandbytes' ``t_beta3``.
        eps: Added outside the root.
        eps_root: Added inside the root.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        scale_by_ademamix(b1, b2, b3, alpha, eps, eps_root, alpha_warmup=alpha_warmup, b3_warmup=b3_warmup),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def mars(
    learning_rate: Hyperparameter = 3e-3,
    *,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    gamma: Hyperparameter = 0.025,
    max_norm: Hyperparameter | None = 1.0,
    zero_before: bool = False,
    sign: bool = False,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """MARS (Yuan et al. 2024, https://arxiv.org/abs/2411.10438), MARS-AdamW or MARS-Lion in the approximate form, for all parameters.

    The authors' code and timm take AdamW with arguments of its own for vectors; :func:`everybit.partition` does that.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        gamma: Weight of the correction.
        max_norm: Limit of the norm of each tensor's corrected gradient.
        zero_before: Take zero for the gradient before the first, as the authors' code; timm does not.
        sign: Take the sign of the mean, as MARS-Lion; without ``b2`` and ``eps``.
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    direction = (running_mean(b1), scale_by_sign()) if sign else (scale_by_adam(b1, b2, eps),)
    return chain(
        reduce_variance(gamma, b1, max_norm, zero_before),
        *direction,
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )
