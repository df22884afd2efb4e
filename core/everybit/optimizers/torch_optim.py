"""The rest of ``torch.optim``'s optimizers, each a composition of transforms, with torch's defaults."""

from __future__ import annotations

from typing import Any

from everybit.base import Hyperparameter, Scalar
from everybit.combinators import Chain, chain
from everybit.optimizers.sgd import ascent
from everybit.protocol import Transform
from everybit.transforms import (
    add_decayed_weights,
    averaged_descent,
    scale_by_adadelta,
    scale_by_adagrad,
    scale_by_adamax,
    scale_by_learning_rate,
    scale_by_nadam,
    scale_by_radam,
    scale_by_rprop,
    scale_by_torch_adafactor,
)


def nadam(
    learning_rate: Hyperparameter = 2e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    momentum_decay: Hyperparameter = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Chain:
    """Adam with Nesterov momentum (Dozat 2016, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ), as ``torch.optim.NAdam``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty, added to the gradient.
        momentum_decay: How fast momentum rises to ``b1``, at least zero; see :class:`~everybit.transforms.adam.ScaleByNadam`.
        decoupled_weight_decay: A step shrinks a parameter by ``learning_rate * weight_decay`` of itself instead, as
            :func:`everybit.adamw` does.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return _chain(
        scale_by_nadam(b1, b2, eps, momentum_decay), learning_rate, weight_decay, decoupled_weight_decay, maximize
    )


def radam(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    decoupled_weight_decay: bool = False,
    threshold: Hyperparameter = 5.0,
    eps_after_correction: bool = False,
    maximize: bool = False,
) -> Chain:
    """Rectified Adam (Liu et al. 2020, https://arxiv.org/abs/1908.03265), as ``torch.optim.RAdam``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the second moment, in [0, 1).
        eps: Added outside the root.
        weight_decay: L2 penalty, added to the gradient.
        decoupled_weight_decay: A step shrinks a parameter by ``learning_rate * weight_decay`` of itself instead, as
            :func:`everybit.adamw` does.
        threshold: The length of the second moment above which it is used, at least 4; see :class:`everybit.scale_by_radam`.
        eps_after_correction: Add ``eps`` after the bias of the root is corrected, as optax does.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    adam = scale_by_radam(b1, b2, eps, threshold=threshold, eps_after_correction=eps_after_correction)
    return _chain(adam, learning_rate, weight_decay, decoupled_weight_decay, maximize)


def adagrad(
    learning_rate: Hyperparameter = 1e-2,
    *,
    lr_decay: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    initial_accumulator_value: Scalar = 0.0,
    eps: Hyperparameter = 1e-10,
    eps_inside_root: bool = False,
    maximize: bool = False,
) -> Chain:
    """Adagrad (Duchi et al. 2011, https://jmlr.org/papers/v12/duchi11a.html), as ``torch.optim.Adagrad``.

    Args:
        learning_rate: Non-negative.
        lr_decay: The learning rate of step t is ``learning_rate / (1 + (t - 1) * lr_decay)``.
        weight_decay: L2 penalty, added to the gradient.
        initial_accumulator_value: The start of the sum of squares, non-negative.
        eps: Added outside the root.
        eps_inside_root: Add ``eps`` inside the root, as optax does.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    adagrad = scale_by_adagrad(initial_accumulator_value, eps, lr_decay, eps_inside_root)
    return _chain(adagrad, learning_rate, weight_decay, False, maximize)


def adamax(
    learning_rate: Hyperparameter = 2e-3,
    *,
    b1: Hyperparameter = 0.9,
    b2: Hyperparameter = 0.999,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Adam with the maximum norm (Kingma & Ba 2015, https://arxiv.org/abs/1412.6980, Algorithm 2), as ``torch.optim.Adamax``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the first moment, in [0, 1).
        b2: Decay rate of the maximum, in [0, 1).
        eps: Added to the magnitudes of the gradients.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return _chain(scale_by_adamax(b1, b2, eps), learning_rate, weight_decay, False, maximize)


def adadelta(
    learning_rate: Hyperparameter = 1.0,
    *,
    rho: Hyperparameter = 0.9,
    eps: Hyperparameter = 1e-6,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Adadelta (Zeiler 2012, https://arxiv.org/abs/1212.5701), as ``torch.optim.Adadelta``.

    Args:
        learning_rate: Non-negative.
        rho: Decay rate of the running squares, in [0, 1].
        eps: Added inside the roots.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return _chain(scale_by_adadelta(rho, eps), learning_rate, weight_decay, False, maximize)


def torch_adafactor(
    learning_rate: Hyperparameter = 1e-2,
    *,
    beta2_decay: Hyperparameter = -0.8,
    eps1: Hyperparameter | None = None,
    eps2: Hyperparameter = 1e-3,
    d: Hyperparameter = 1.0,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Adafactor (Shazeer & Stern 2018, https://arxiv.org/abs/1804.04235) in the flavour of ``torch.optim.Adafactor``.

    Args:
        learning_rate: The limit of the relative step, at least zero.
        beta2_decay: The share of the newest squares in step t is ``t ** beta2_decay``; at most zero.
        eps1: The least root of a mean of squares, at least zero; None: the spacing of the compute dtype at 1.
        eps2: The least root mean square of weights that a step is relative to, at least zero.
        d: The root mean square above which an update is scaled down, at least 1.
        weight_decay: Decay; a step shrinks a parameter by ``learning_rate * weight_decay`` of itself.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(*ascent(maximize), scale_by_torch_adafactor(learning_rate, beta2_decay, eps1, eps2, d, weight_decay))


def rprop(
    learning_rate: Hyperparameter = 1e-2,
    *,
    shrink: Hyperparameter = 0.5,
    grow: Hyperparameter = 1.2,
    min_step: Hyperparameter = 1e-6,
    max_step: Hyperparameter = 50.0,
    maximize: bool = False,
) -> Chain:
    """Resilient backpropagation (Riedmiller & Braun 1993, https://doi.org/10.1109/ICNN.1993.298623), as ``torch.optim.Rprop``.

    Args:
        learning_rate: The size of the first step, at least zero; it has no effect after that.
        shrink: Factor of a step's size where the gradient's sign changes, in [0, 1].
        grow: Factor where it stays, at least 1.
        min_step: The least size of a step.
        max_step: The greatest.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    return chain(*ascent(maximize), scale_by_rprop(learning_rate, shrink, grow, min_step, max_step))


def asgd(
    learning_rate: Hyperparameter = 1e-2,
    *,
    lambd: Hyperparameter = 1e-4,
    alpha: Hyperparameter = 0.75,
    t0: Hyperparameter = 1e6,
    weight_decay: Hyperparameter = 0.0,
    maximize: bool = False,
) -> Chain:
    """Averaged stochastic gradient descent (Polyak & Juditsky 1992, https://doi.org/10.1137/0330046), as ``torch.optim.ASGD``.

    Args:
        learning_rate: Non-negative.
        lambd: Weight decay, and how fast the learning rate falls; see :class:`~everybit.transforms.averages.AveragedDescent`.
        alpha: The power by which the learning rate falls.
        t0: The number of steps before averaging begins.
        weight_decay: L2 penalty, added to the gradient.
        maximize: Ascend instead.

    Raises:
        ValueError: A hyperparameter out of range.
    """
    descent = averaged_descent(learning_rate, lambd, alpha, t0)
    return chain(*ascent(maximize), add_decayed_weights(weight_decay), descent)


def _chain(
    preconditioner: Transform[Any],
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    decoupled: bool,
    maximize: bool,
) -> Chain:
    decay = add_decayed_weights(weight_decay)
    order = (preconditioner, decay) if decoupled else (decay, preconditioner)
    return chain(*ascent(maximize), *order, scale_by_learning_rate(learning_rate))
