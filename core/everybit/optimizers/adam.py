"""Adam and AdamW, and relatives that take another step of the same moments."""

from __future__ import annotations

from typing import Any

from everybit.base import Hyperparameter, Scalar
from everybit.combinators import Chain, chain, masked
from everybit.optimizers.sgd import ascent
from everybit.protocol import Transform
from everybit.transforms import (
    Amsgrad,
    add_decayed_weights,
    scale_by_adam,
    scale_by_adam_atan2,
    scale_by_learning_rate,
    scale_by_stable_adam,
    subtract_decayed_weights,
)


def adam(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    amsgrad: Amsgrad = False,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Adam (Kingma & Ba 2015, https://arxiv.org/abs/1412.6980), as ``torch.optim.Adam``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Added outside the root.
        eps_root: Added inside the root.
        amsgrad: Divide by the greatest running square so far; see :class:`~everybit.transforms.adam.ScaleByAdam`.
        weight_decay: L2 penalty, added to the gradient; for decoupled decay see :func:`adamw`.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_adam(b1, b2, eps, eps_root, amsgrad=amsgrad),
        scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    eps_root: Hyperparameter = 0.0,
    amsgrad: Amsgrad = False,
    weight_decay: Hyperparameter = 1e-2,
    fully_decoupled: bool = False,
    max_learning_rate: Scalar | None = None,
    mask: Any = None,
    maximize: bool = False,
) -> Chain:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), as ``torch.optim.AdamW``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Added outside the root.
        eps_root: Added inside the root.
        amsgrad: Divide by the greatest running square so far; see :class:`~everybit.transforms.adam.ScaleByAdam`.
        weight_decay: Decay; a step shrinks a parameter by ``learning_rate * weight_decay`` of itself.
        fully_decoupled: A step shrinks a parameter by ``weight_decay`` of itself instead, scaled by
            ``learning_rate / max_learning_rate`` if the latter is given.
        max_learning_rate: The schedule's greatest value; only with ``fully_decoupled``.
        mask: Where weights decay: a function of (path, parameter), such as :func:`everybit.not_norm_or_bias`, or a tree of bools whose
            structure is a prefix of the parameters'. None: everywhere.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range; ``max_learning_rate`` without ``fully_decoupled``.

    Examples:
        >>> import everybit as eb
        >>> optimizer = eb.with_policy(eb.adamw(3e-4, b2=0.95, weight_decay=0.1), eb.policies.LEAN_BF16)
    """
    if max_learning_rate is not None and not fully_decoupled:
        raise ValueError(
            f"max_learning_rate: got {max_learning_rate!r} without fully_decoupled=True, where it has no meaning."
        )
    descent = scale_by_learning_rate(learning_rate)
    adam = scale_by_adam(b1, b2, eps, eps_root, amsgrad=amsgrad)
    if fully_decoupled:
        relative = None if max_learning_rate is None else learning_rate
        decay: Transform[Any] = subtract_decayed_weights(weight_decay, relative, max_learning_rate)
        order: tuple[Transform[Any], ...] = (adam, descent, decay if mask is None else masked(decay, mask))
    else:
        decay = add_decayed_weights(weight_decay)
        order = (adam, decay if mask is None else masked(decay, mask), descent)
    return chain(*ascent(maximize), *order)


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
        learning_rate: Non-negative.
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
        learning_rate: Non-negative.
        b1: Decay rate of the mean, in [0, 1).
        b2: Decay rate of the square, in [0, 1).
        eps: Added outside the root.
        weight_decay: Decoupled decay, made smaller with the rest of a tensor's step.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(scale_by_stable_adam(b1, b2, eps, weight_decay), scale_by_learning_rate(learning_rate))
