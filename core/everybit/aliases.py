"""Well-known optimizers, each a composition of transforms."""

from __future__ import annotations

from typing import Any

from everybit.combinators.chain import Chain, chain
from everybit.combinators.masked import masked
from everybit.scalars import Hyperparameter, Scalar
from everybit.transform import Transform
from everybit.transforms.adam import Amsgrad, scale_by_adam
from everybit.transforms.lion import scale_by_lion
from everybit.transforms.rms import scale_by_rms
from everybit.transforms.stateless import identity, scale, scale_by_learning_rate
from everybit.transforms.trace import trace
from everybit.transforms.weight_decay import add_decayed_weights, subtract_decayed_weights


def sgd(
    learning_rate: Hyperparameter = 1e-3,
    *,
    momentum: Hyperparameter | None = None,
    dampening: Hyperparameter = 0.0,
    nesterov: bool = False,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Gradient descent with optional momentum, as ``torch.optim.SGD``.

    Args:
        learning_rate: At least zero.
        momentum: Decay of the momentum, in [0, 1]; None keeps no momentum (and no state).
        dampening: See :class:`~everybit.transforms.trace.Trace`.
        nesterov: Look ahead; needs momentum, and zero dampening.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range; Nesterov without momentum.

    Examples:
        >>> import everybit as eb
        >>> optimizer = eb.with_policy(eb.sgd(0.1, momentum=0.9), eb.policies.FP32)
    """
    if nesterov and momentum is None:
        raise ValueError("nesterov: got True without momentum; Nesterov momentum needs momentum above zero.")
    return chain(
        *_ascent(maximize),
        add_decayed_weights(weight_decay),
        identity() if momentum is None else trace(momentum, dampening=dampening, nesterov=nesterov),
        scale_by_learning_rate(learning_rate),
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
        learning_rate: At least zero.
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
        *_ascent(maximize),
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
        learning_rate: At least zero.
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
    return chain(*_ascent(maximize), *order)


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
        learning_rate: At least zero; about a tenth to a third of AdamW's.
        b1: Weight of the momentum in the direction, in [0, 1).
        b2: Decay rate of the momentum, in [0, 1).
        weight_decay: Decay; about three to ten times AdamW's.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        *_ascent(maximize),
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def rmsprop(
    learning_rate: Hyperparameter = 1e-2,
    *,
    decay: Hyperparameter = 0.99,
    eps: Hyperparameter = 1e-8,
    momentum: Hyperparameter | None = None,
    centered: bool = False,
    eps_inside_root: bool = False,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """RMSprop (Hinton 2012; centred: Graves 2013, https://arxiv.org/abs/1308.0850), as ``torch.optim.RMSprop``.

    Args:
        learning_rate: At least zero.
        decay: Decay rate of the running square, in [0, 1); torch's ``alpha``.
        eps: Added outside the root.
        momentum: Decay of a momentum of the preconditioned gradients; None keeps none.
        centered: Divide by the root of the variance instead of the square.
        eps_inside_root: Add ``eps`` inside the root, as optax does.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        *_ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_rms(decay, eps, centered=centered, eps_inside_root=eps_inside_root),
        identity() if momentum is None else trace(momentum),
        scale_by_learning_rate(learning_rate),
    )


def _ascent(maximize: bool) -> tuple[Transform[Any], ...]:
    return (scale(-1.0),) if maximize else ()
