"""Optimizers with a small matrix for each dimension of a parameter, each a composition of transforms."""

from __future__ import annotations

from dataclasses import replace

from everybit.base import Hyperparameter, Scalar
from everybit.combinators import Chain, Partition, chain
from everybit.linalg import Kronecker, MatrixView
from everybit.optimizers.adam import adamw
from everybit.optimizers.matrices import MATRICES, Matrices, Others, routed, viewed
from everybit.transforms import (
    Correction,
    Damping,
    Grafting,
    MatrixScale,
    Trace,
    add_decayed_weights,
    scale_by_dion,
    scale_by_kron,
    scale_by_learning_rate,
    scale_by_shampoo,
    scale_by_soap,
    subtract_decay_of_moved,
    trace,
)

OF_SOAP, OF_SHAMPOO, OF_KRON = Kronecker(), Kronecker(max_dimension=8192), Kronecker(max_dimension=2048)
ADAM = Grafting()


def soap(
    learning_rate: Hyperparameter = 3e-3,
    *,
    b1: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    factor_decay: Hyperparameter | None = None,
    eps: Hyperparameter = 1e-8,
    weight_decay: Hyperparameter = 0.01,
    decay_moved: bool = True,
    period: int = 10,
    debias: bool = True,
    normalize: bool = False,
    correction: Correction = "none",
    where: Kronecker = OF_SOAP,
    others: Others = None,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """SOAP (Vyas et al. 2024, https://arxiv.org/abs/2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

    The first update finds the bases and has zero updates. Vectors and numbers go through Adam, which pauses at the first update too.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean gradient, in [0, 1).
        b2: Decay rate of its squares in the eigenbasis, in [0, 1).
        factor_decay: Decay rate of the products of gradients, in [0, 1); None: ``b2``.
        eps: Added to the root; see :class:`~everybit.transforms.soap.ScaleBySoap`, as for ``period`` to ``correction``.
        weight_decay: Non-negative; times the learning rate.
        decay_moved: Decay weights after they have moved, and not at the first update, as the authors do. False: before, as AdamW.
        period: Updates between two refreshes of the bases.
        debias: Correct the bias of both means.
        normalize: MatrixScale each direction to a root mean square of 1.
        correction: ``"kl"``: that of KL-Shampoo.
        where: Which dimensions have a matrix; by default those of up to 10,000 rows, so that the output layer of a
            large vocabulary has one on one side. With its ``view``, of parameters seen so.
        others: A function from a learning rate to the optimizer of all but matrices, such as ``everybit.adamw``. None: SOAP steps them.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that a view does not fit.
    """

    def of(seen: MatrixView | None) -> Chain:
        direction = scale_by_soap(
            b1, b2, factor_decay, eps, period, debias, normalize, correction, where=replace(where, view=seen)
        )
        rate = scale_by_learning_rate(learning_rate)
        if decay_moved:
            return chain(direction, rate, subtract_decay_of_moved(weight_decay, learning_rate, after=1))
        return chain(direction, add_decayed_weights(weight_decay), rate)

    return routed(of, learning_rate, viewed(matrices, where), others)


def shampoo(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter | None = 0.9,
    b2: Hyperparameter | None = 0.999,
    eps: Hyperparameter = 1e-12,
    damping: Damping = "root",
    exponent: Hyperparameter | None = None,
    period: int = 10,
    graft: Grafting = ADAM,
    debias: bool = True,
    momentum: Hyperparameter | Trace | None = None,
    weight_decay: Hyperparameter = 0.01,
    where: Kronecker = OF_SHAMPOO,
    others: Others = None,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """Shampoo (Gupta et al. 2018, https://arxiv.org/abs/1802.09568): gradients between inverse roots of their mean products.

    By default with the size of Adam's steps for each matrix, so that AdamW's learning rates may be kept, and with Adam for vectors. The
    paper's form is ``shampoo(lr, b1=None, b2=None, eps=1e-4, damping="start", period=1, graft=Grafting("none"),
    where=Kronecker(vectors=True))``.

    Args:
        learning_rate: Non-negative.
        b1: Decay rate of the mean gradient, in [0, 1); None: the gradient itself. For this to ``debias`` see
            :class:`~everybit.transforms.shampoo.ScaleByShampoo`.
        b2: Decay rate of the products of gradients, in [0, 1); None: their sum.
        eps: Added to their eigenvalues.
        damping: Before the root is taken (``"root"``), or at the start (``"start"``).
        exponent: The exponent of the inverse roots; None: 1/4 for both sides of a matrix, 1/2 for a single side.
        period: Updates between two refreshes of the roots.
        graft: The optimizer that gives the steps' size.
        debias: Correct the bias of means.
        momentum: Decay rate of a momentum of the steps, in [0, 1), summed as SGD's; or ``everybit.trace(0.9, nesterov=True)``. None: no
            momentum.
        weight_decay: Non-negative; decoupled, as AdamW's.
        where: Which dimensions have a matrix; by default those of up to 8,192 rows. With its ``view``, of parameters seen so.
        others: A function from a learning rate to the optimizer of all but matrices, such as ``everybit.adamw``. None: Shampoo steps them.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that a view does not fit.
    """

    def of(seen: MatrixView | None) -> Chain:
        direction = scale_by_shampoo(b1, b2, eps, damping, exponent, period, graft, debias, replace(where, view=seen))
        after = [] if momentum is None else [momentum if isinstance(momentum, Trace) else trace(momentum)]
        return chain(direction, *after, add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate))

    return routed(of, learning_rate, viewed(matrices, where), others)


def kron(
    learning_rate: Hyperparameter = 1e-3,
    *,
    b1: Hyperparameter = 0.9,
    preconditioner_rate: Hyperparameter = 0.1,
    period: int = 1,
    start: Scalar = 1.0,
    of_momentum: bool = True,
    normalize: bool = False,
    max_rms: Hyperparameter | None = 1.1,
    weight_decay: Hyperparameter = 0.0,
    where: Kronecker = OF_KRON,
    others: Others = None,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """PSGD with a Kronecker preconditioner (Li 2015, https://arxiv.org/abs/1512.04202; 2024, https://arxiv.org/abs/2402.11858).

    Gradients are whitened by small triangular matrices, which are fitted step by step with a random probe: there is no decomposition.

    Args:
        learning_rate: Non-negative; about a third of AdamW's.
        b1: Decay rate of the mean gradient, in [0, 1); for this to ``max_rms`` see :class:`~everybit.transforms.kron.ScaleByKron`.
        preconditioner_rate: Step size of the matrices, in [0, 1].
        period: Updates between two steps of the matrices.
        start: Their size before the first update.
        of_momentum: Fit them to the mean gradient; False: to the gradient.
        normalize: Divide each gradient by its norm first.
        max_rms: The root mean square to which a direction is limited; None: it is not.
        weight_decay: Non-negative; decoupled, as AdamW's.
        where: Which dimensions have a matrix; by default those of up to 2,048 rows; others have a diagonal. With its ``view``, of
            parameters seen so.
        others: A function from a learning rate to the optimizer of all but matrices, such as ``everybit.adamw``. None: Kron steps them.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that a view does not fit.
    """

    def of(seen: MatrixView | None) -> Chain:
        direction = scale_by_kron(
            b1, preconditioner_rate, period, start, of_momentum, normalize, max_rms, replace(where, view=seen)
        )
        return chain(direction, add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate))

    return routed(of, learning_rate, viewed(matrices, where), others)


def dion(
    learning_rate: Hyperparameter = 1e-2,
    *,
    decay: Hyperparameter = 0.95,
    rank_divisor: int = 4,
    eps: Hyperparameter = 1e-8,
    scale: MatrixScale = "spectral_unclamped",
    weight_decay: Hyperparameter = 0.01,
    others: Others = adamw,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """Dion (Ahn et al. 2025, https://arxiv.org/abs/2504.05295): orthonormal updates of low rank, and momentum that keeps the rest.

    It is one optimizer for a whole model, as :func:`everybit.muon` is: hidden matrices go through Dion, all other parameters through
    ``others``, by their names and shapes. With ``others=None`` all parameters are matrices, or are refused.

    Args:
        learning_rate: Non-negative.
        decay: The share of the used part that stays in the momentum, in [0, 1].
        rank_divisor: The rank is a matrix's lesser side over this, rounded up; at least 1. The authors' rank fraction of 1/4 is a 4.
        eps: Added to the norms of columns.
        scale: Factor of the update, from rows and columns; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`.
        weight_decay: Non-negative; decoupled, by the learning rate without the scale.
        others: A function from a learning rate to the optimizer of all but matrices; None: there are no others.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that is no matrix, or that a view does not fit.
    """

    def of(seen: MatrixView | None) -> Chain:
        direction = scale_by_dion(decay, rank_divisor, eps, scale, seen)
        return chain(direction, add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate))

    return routed(of, learning_rate, matrices, others)
