"""Optimizers that came after AdamW, and its competitors, each a composition of transforms."""

from __future__ import annotations

from everybit.combinators.chain import Chain, chain
from everybit.scalars import Hyperparameter, is_zero
from everybit.transforms.adam import scale_by_adam
from everybit.transforms.adan import proximal_decay, scale_by_adan
from everybit.transforms.ademamix import scale_by_ademamix
from everybit.transforms.adopt import begin_after, scale_by_adopt
from everybit.transforms.belief import scale_by_belief
from everybit.transforms.novograd import scale_by_novograd
from everybit.transforms.running_mean import running_mean, scale_by_running_square
from everybit.transforms.schedule_free import schedule_free
from everybit.transforms.stable_adam import scale_by_stable_adam
from everybit.transforms.stateless import clip_by_global_norm, identity, scale_by_learning_rate, scale_by_sign
from everybit.transforms.trace import trace
from everybit.transforms.trust_ratio import scale_by_lars, scale_by_trust_ratio
from everybit.transforms.variance_reduction import reduce_variance
from everybit.transforms.weight_decay import add_decayed_weights
from everybit.transforms.yogi import scale_by_yogi


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
        learning_rate: At least zero.
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
        learning_rate: At least zero.
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


def schedule_free_sgd(
    learning_rate: Hyperparameter = 1.0,
    *,
    b1: Hyperparameter = 0.9,
    warmup_steps: int = 0,
    r: Hyperparameter = 0.0,
    weight_lr_power: Hyperparameter = 2.0,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Schedule-free SGD (Defazio et al. 2024, https://arxiv.org/abs/2405.15682), as ``schedulefree.SGDScheduleFree``.

    The weights for evaluation are those of ``eval_params``; there is no mode to switch.

    Args:
        learning_rate: At least zero.
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
    b1: Hyperparameter = 0.9,
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
        learning_rate: At least zero; one to ten times AdamW's.
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
        learning_rate: At least zero.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Added to Adam's direction, before its norm is taken.
        max_grad_norm: Limit of the norm of all gradients; None: none, as in the paper and optax. timm has 1.0.
        max_ratio: Limit of the trust ratio: 1 for LAMBC, timm's ``trust_clip=True``. None: none.
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
        learning_rate: At least zero.
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
        learning_rate: At least zero.
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
        learning_rate: At least zero.
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
    initial_mean: Hyperparameter = 0.0,
    initial_square: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Yogi (Zaheer et al. 2018, https://papers.nips.cc/paper/8186); optax's with ``initial_mean=1e-6``.

    Args:
        learning_rate: At least zero.
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
        learning_rate: At least zero. It is applied after the mean; the authors' code applies it before, which differs if it changes.
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


def signum(
    learning_rate: Hyperparameter = 1e-4,
    *,
    momentum: Hyperparameter = 0.9,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """Signum (Bernstein et al. 2018, https://arxiv.org/abs/1802.04434): the sign of the gradients' running mean.

    Args:
        learning_rate: At least zero.
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
        learning_rate: At least zero. The author's scales by parameter's root mean square are not part of it.
        b1: Decay rate of the mean, in [0, 1).
        weight_decay: Decoupled decay.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return signum(learning_rate, momentum=b1, weight_decay=weight_decay)


def stable_adamw(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 1e-2,
) -> Chain:
    """StableAdamW (Wortsman et al. 2023, https://arxiv.org/abs/2304.13013), as torch-optimi's.

    Args:
        learning_rate: At least zero.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Decoupled decay, made smaller with the rest of a tensor's step.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(scale_by_stable_adam(b1, b2, eps, weight_decay), scale_by_learning_rate(learning_rate))


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
        learning_rate: At least zero.
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


def novograd(
    learning_rate: Hyperparameter = 1e-2,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.25,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
) -> Chain:
    """NovoGrad (Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286), as optax's: one number of each tensor for the second moment.

    Args:
        learning_rate: At least zero.
        b1: Decay rate of the sum of normalised gradients, in [0, 1).
        b2: Decay rate of the norms' square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Decay, which goes through the momentum.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(scale_by_novograd(b1, b2, eps, weight_decay=weight_decay), scale_by_learning_rate(learning_rate))
