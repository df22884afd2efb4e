"""Optimizers of matrices, with another optimizer for other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from everybit.base import Hyperparameter, Scalar, require_word
from everybit.combinators import Chain, Partition, chain
from everybit.linalg import PUBLISHED, Arithmetic, MatrixView, NewtonSchulz, Triple, matrix
from everybit.optimizers.adam import adamw
from everybit.optimizers.matrices import MATRICES, Matrices, Others, routed
from everybit.protocol import Transform
from everybit.transforms import (
    MatrixScale,
    Norm,
    Side,
    UnitSides,
    add_cautious_decay,
    add_decayed_weights,
    equalize,
    orthogonalize,
    running_mean,
    scale_by_learning_rate,
    scale_by_normuon,
    scale_by_shape,
    subtract_decayed_weights,
    trace,
)

Decay = Literal["decoupled", "coupled", "independent", "cautious"]
"""How weights of matrices decay."""

Adjustment = Literal[None, "original", "match_rms_adamw"]
"""The factors of an update that ``torch.optim.Muon`` has."""

NEWTON_SCHULZ = NewtonSchulz()


def muon(
    learning_rate: Hyperparameter = 1e-3,
    *,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    averaged: bool = True,
    before: UnitSides | None = None,
    iteration: NewtonSchulz = NEWTON_SCHULZ,
    after: UnitSides | Callable[[MatrixView | None], Transform[Any]] | None = None,
    scale: MatrixScale = "original",
    weight_decay: Hyperparameter = 0.1,
    decay_kind: Decay = "decoupled",
    max_learning_rate: Scalar | None = None,
    others: Others = adamw,
    others_rate: Hyperparameter | None = None,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, made orthogonal; as ``torch.optim.Muon``.

    It is one optimizer for a whole model: hidden matrices go through Muon, all other parameters through ``others``, by their names and
    shapes. A matrix without a name is refused. ``print(eb.routing(tx, dict(model.named_parameters())))`` shows each parameter's way. With
    ``others=None`` all parameters are matrices, or are refused, as torch's.

    Args:
        learning_rate: At least zero; of ``others``, too. With ``scale="match_rms_adamw"`` AdamW's learning rate serves both.
        momentum: Decay rate, in [0, 1).
        nesterov: Look a step ahead.
        averaged: Momentum is a running mean, as torch's and Keller Jordan's. False: a decaying sum, as Moonlight's and Dion's.
        before: The vectors of equal length before the iteration, such as ``"rows"`` for MuonEq; see
            :class:`~everybit.transforms.orthogonalize.Equalize`.
        iteration: How the nearest orthogonal matrix is approached.
        after: The vectors of equal length after the iteration: ``"columns_then_rows"`` for Muon+. Or a function from a view to a transform
            that comes there, such as ``everybit.scale_by_normuon``.
        scale: Factor of the update, from rows and columns.
        weight_decay: Non-negative; for matrices.
        decay_kind: ``"decoupled"``: times the learning rate, which the scale does not change; ``"coupled"``: added to the gradient;
            ``"independent"``: times the learning rate's share of ``max_learning_rate``; ``"cautious"``: decoupled, where it points the
            way of the update.
        max_learning_rate: The greatest learning rate, for independent decay.
        others: A function from a learning rate to the optimizer of the other parameters; None: there are no others.
        others_rate: The learning rate of ``others`` over that of matrices, at least zero. None: they have the same.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that is no matrix, that a view does not fit, or a view that
            no parameter has.
    """
    if before is not None:
        require_word("before", before, UnitSides)
    if not callable(after) and after is not None:
        require_word("after", after, UnitSides)

    def direction(seen: MatrixView | None) -> list[Transform[Any]]:
        given: list[Transform[Any]] = [] if before is None else [equalize(seen, before, 1e-8)]
        if after is None:
            return [*given, orthogonalize(seen, iteration, scale)]
        # The factor comes after what would take it out again.
        then = after(seen) if callable(after) else equalize(seen, after, 1e-7)
        return [*given, orthogonalize(seen, iteration, 1.0), then, scale_by_shape(seen, scale)]

    def of(seen: MatrixView | None) -> Chain:
        first = running_mean(momentum, nesterov=nesterov) if averaged else trace(momentum, nesterov=nesterov)
        return _decayed([first, *direction(seen)], learning_rate, weight_decay, decay_kind, max_learning_rate)

    return routed(of, learning_rate, matrices, others, others_rate)


def torch_muon(
    learning_rate: Hyperparameter = 1e-3,
    *,
    weight_decay: Hyperparameter = 0.1,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = PUBLISHED["quintic"][0],
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Adjustment = None,
    arithmetic: Arithmetic = "bfloat16",
) -> Chain | Partition:
    """Muon of matrices alone, with the arguments of ``torch.optim.Muon``; :func:`muon` is the same for a whole model.

    Args:
        learning_rate: Non-negative.
        weight_decay: A step shrinks a parameter by ``learning_rate * weight_decay`` of itself.
        momentum: Decay rate, in [0, 1).
        nesterov: Look a step ahead.
        ns_coefficients: a, b, c of each step of the iteration.
        eps: The least norm that a matrix is divided by, above zero.
        ns_steps: Steps in the iteration, from 1 to 99.
        adjust_lr_fn: Factor of the update, from rows and columns: ``"original"``, the default, or ``"match_rms_adamw"``.
        arithmetic: The dtype of the iteration; ``"bfloat16"`` is torch's.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that has not two dimensions.
    """
    if len(ns_coefficients) != 3:
        raise ValueError(f"ns_coefficients: got {ns_coefficients!r}; accepted are three numbers.")
    require_word("adjust_lr_fn", adjust_lr_fn, Adjustment)
    return muon(
        learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        iteration=NewtonSchulz((ns_coefficients,), ns_steps, arithmetic, eps=eps),
        scale=adjust_lr_fn or "original",
        weight_decay=weight_decay,
        others=None,
        matrices=Matrices(view=matrix()),
    )


def normuon(
    learning_rate: Hyperparameter = 0.02,
    *,
    momentum: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    nesterov: bool = True,
    iteration: NewtonSchulz = NEWTON_SCHULZ,
    side: Side = "rows",
    norm: Norm = "kept",
    scale: MatrixScale = "original",
    weight_decay: Hyperparameter = 0.0,
    decay_kind: Decay = "decoupled",
    max_learning_rate: Scalar | None = None,
    others: Others = adamw,
    others_rate: Hyperparameter | None = None,
    matrices: Matrices = MATRICES,
) -> Chain | Partition:
    """NorMuon (Li et al. 2025, https://arxiv.org/abs/2510.05491): Muon, with rows over the roots of their running mean squares.

    As the authors' code. The paper's algorithm has ``norm="exact", scale="match_rms_adamw"``. It is ``muon(after=scale_by_normuon)``, which
    has Muon's further arguments.

    Args:
        learning_rate: Non-negative; of ``others``, too.
        momentum: Decay rate, in [0, 1).
        b2: Decay rate of the mean squares, in [0, 1).
        nesterov: Look a step ahead.
        iteration: As for :func:`muon`, as are all further arguments except the next two.
        side: The vectors with a mean square each; see :class:`~everybit.transforms.orthogonalize.ScaleByNorMuon`.
        norm: Whether a matrix gets its norm back, or that of an exactly orthogonal one.
        scale: Factor of the update, from rows and columns.
        weight_decay: Non-negative; for matrices.
        decay_kind: How weights decay.
        max_learning_rate: The greatest learning rate, for independent decay.
        others: The optimizer of the other parameters; None: there are no others.
        others_rate: The learning rate of ``others`` over that of matrices. None: they have the same.
        matrices: Which parameters are matrices, and how each is seen.

    Raises:
        ValueError: An argument is out of range, as for :func:`muon`.
    """
    return muon(
        learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        iteration=iteration,
        after=lambda seen: scale_by_normuon(seen, b2, side, norm),
        scale=scale,
        weight_decay=weight_decay,
        decay_kind=decay_kind,
        max_learning_rate=max_learning_rate,
        others=others,
        others_rate=others_rate,
        matrices=matrices,
    )


def _decayed(
    direction: list[Transform[Any]],
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    kind: Decay,
    max_learning_rate: Scalar | None,
) -> Chain:
    """A direction with weight decay and learning rate."""
    require_word("decay_kind", kind, Decay)
    if max_learning_rate is not None and kind != "independent":
        raise ValueError(
            f"max_learning_rate: got {max_learning_rate!r} with decay_kind={kind!r}; accepted with it is None."
        )
    rate = scale_by_learning_rate(learning_rate)
    if kind == "coupled":
        return chain(add_decayed_weights(weight_decay), *direction, rate)
    if kind == "independent":
        return chain(*direction, rate, subtract_decayed_weights(weight_decay, learning_rate, max_learning_rate))
    added = add_cautious_decay(weight_decay) if kind == "cautious" else add_decayed_weights(weight_decay)
    return chain(*direction, added, rate)
