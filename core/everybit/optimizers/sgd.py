"""Stochastic gradient descent and RMSprop."""

from __future__ import annotations

from typing import Any

from everybit.base import Hyperparameter
from everybit.combinators import Chain, chain
from everybit.protocol import Transform
from everybit.transforms import add_decayed_weights, identity, scale, scale_by_learning_rate, scale_by_rms, trace


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
        learning_rate: Non-negative.
        momentum: Decay of the momentum, in [0, 1]; None keeps no momentum (and no state).
        dampening: See :class:`~everybit.transforms.momentum.Trace`.
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
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        identity() if momentum is None else trace(momentum, dampening=dampening, nesterov=nesterov),
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
        learning_rate: Non-negative.
        decay: Decay rate of the running square, in [0, 1); torch's ``alpha``.
        eps: Added outside the root.
        momentum: Decay of a momentum of the preconditioned gradients; None: no momentum.
        centered: Divide by the root of the variance instead of the square.
        eps_inside_root: Add ``eps`` inside the root, as optax does.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(
        *ascent(maximize),
        add_decayed_weights(weight_decay),
        scale_by_rms(decay, eps, centered=centered, eps_inside_root=eps_inside_root),
        identity() if momentum is None else trace(momentum),
        scale_by_learning_rate(learning_rate),
    )


def ascent(maximize: bool) -> tuple[Transform[Any], ...]:
    """Return the transforms that turn a descent into an ascent; empty if ``maximize`` is False."""
    return (scale(-1.0),) if maximize else ()
