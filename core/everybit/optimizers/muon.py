"""Optimizers of matrices, with another optimizer for other parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from everybit.base import Hyperparameter, Scalar, plain_name, require, require_name, require_patterns
from everybit.combinators import Chain, Partition, chain, partition
from everybit.linalg import (
    PUBLISHED,
    Arithmetic,
    Batching,
    Coefficients,
    MatrixView,
    Normalization,
    Triple,
    matrix,
    view_for,
)
from everybit.optimizers.adam import adamw
from everybit.protocol import Transform
from everybit.transforms import (
    Norm,
    Scale,
    Side,
    Sides,
    add_cautious_decay,
    add_decayed_weights,
    equalize,
    orthogonalize,
    require_sides,
    running_mean,
    scale,
    scale_by_learning_rate,
    scale_by_normuon,
    scale_by_shape,
    subtract_decayed_weights,
    trace,
)

Decay = Literal["decoupled", "coupled", "independent", "cautious"]
"""How weights of matrices decay."""

Others = Callable[[Hyperparameter], Transform[Any]] | None
"""What steps parameters that are no hidden matrices, from a learning rate; None: there are none."""

NOT_HIDDEN = (
    r"(^|[._])(embs?|\w*embed\w*|wte|wpe|head|logits|classifier)([._]|$)|(^|\.)(shared|output|score)(\.weight)?$"
)
"""Names of the first and last layers, whose matrices are not orthogonalized: a table of vectors is no linear map between hidden states."""


@dataclass(frozen=True, slots=True)
class HiddenMatrices:
    """Label parameters ``"matrix"``, the pattern from ``views`` that fits, or ``"others"``; made by :func:`muon`.

    Attributes:
        views: Views of parameters by patterns of their names.
        others: A regular expression that is found in the names of others; None: there are no others.
        view: The view of parameters that no pattern fits; None: matrices as they are, convolutions flattened. Parameters that it does not
            fit, by their number of dimensions, are among the others.
        embeddings: Names of the embeddings of a model, by the types of its modules; None: the model is not known.
    """

    views: tuple[tuple[str, MatrixView], ...] = ()
    others: str | None = NOT_HIDDEN
    view: MatrixView | None = None
    embeddings: frozenset[str] | None = None

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the label of a parameter.

        Raises:
            ValueError: A matrix without a name, which would tell whether it is an embedding or a head.
        """
        return self._decide(path, parameter)[0]

    def reason(self, path: str, parameter: Tensor) -> str:
        """Return what decided that a parameter is among the others: its shape, its name, or its module; empty for matrices."""
        return self._decide(path, parameter)[1]

    def basis(self) -> str:
        """Return what all labels are decided by."""
        return "names and shapes" if self.embeddings is None else "types of modules, names and shapes"

    def with_embeddings(self, names: Collection[str]) -> HiddenMatrices:
        """Return the same labels, for a model of which these parameters are embeddings, whatever they are called."""
        return replace(self, embeddings=frozenset(names))

    def _decide(self, path: str, parameter: Tensor) -> tuple[str, str]:
        name = plain_name(path)
        if self.others is not None and parameter.ndim < 2:
            return "others", "by shape"
        for pattern, _ in self.views:
            if re.search(pattern, name):
                return pattern, ""
        if self.others is None:
            return "matrix", ""
        seen = self.view or view_for(parameter.shape)
        if seen is None or not seen.fits(parameter.ndim):
            return "others", "by shape"
        if name in (self.embeddings or ()):
            return "others", "by the type of its module"
        require_name(path, "labels", "whether it is an embedding or a head", "others=None or labels=")
        return ("others", "by name") if re.search(self.others, name) else ("matrix", "")


def muon(
    learning_rate: Hyperparameter = 1e-3,
    *,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    average: bool = True,
    before: Sides | None = None,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    arithmetic: Arithmetic = "bfloat16",
    normalization: Normalization = "frobenius",
    eps: Hyperparameter = 1e-7,
    batching: Batching = "alone",
    after: Sides | None = None,
    scale: Scale = "original",
    weight_decay: Hyperparameter = 0.1,
    decay_kind: Decay = "decoupled",
    max_learning_rate: Scalar | None = None,
    others_rate: Hyperparameter | None = None,
    view: MatrixView | None = None,
    views: Mapping[str, MatrixView] | None = None,
    others: Others = adamw,
    labels: Callable[[str, Tensor], str] | None = None,
) -> Chain | Partition:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, made orthogonal; as ``torch.optim.Muon``.

    It is one optimizer for a whole model: hidden matrices go through Muon, all other parameters through ``others``, by their names and
    shapes. A matrix without a name is refused. ``print(eb.routing(tx, dict(model.named_parameters())))`` shows each parameter's way. With
    ``others=None`` all parameters are matrices, or are refused, as torch's.

    Args:
        learning_rate: At least zero; of ``others``, too. With ``scale="match_rms_adamw"`` AdamW's learning rate serves both.
        momentum: Decay rate, in [0, 1).
        nesterov: Look a step ahead.
        average: Momentum is a running mean, as torch's and Keller Jordan's. False: a decaying sum, as Moonlight's and Dion's.
        before: The vectors of equal length before the iteration, such as ``"rows"`` for MuonEq; see
            :class:`~everybit.transforms.orthogonalize.Equalize`.
        coefficients: The iteration's; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`, as for the next five.
        steps: Steps in the iteration.
        arithmetic: Its dtype.
        normalization: The norm that a matrix is divided by first.
        eps: The least norm, or the number added to it.
        batching: Whether matrices of one shape go through batched products.
        after: The vectors of equal length after the iteration: ``"columns_then_rows"`` for Muon+.
        scale: Factor of the update, from rows and columns.
        weight_decay: Non-negative; for matrices.
        decay_kind: ``"decoupled"``: times the learning rate, which the scale does not change; ``"coupled"``: added to the gradient;
            ``"independent"``: times the learning rate's share of ``max_learning_rate``; ``"cautious"``: decoupled, where it points the
            way of the update.
        max_learning_rate: The greatest learning rate, for independent decay.
        others_rate: The learning rate of ``others`` over that of matrices, at least zero. None: they have the same.
        view: How every matrix is seen; see :func:`everybit.heads`. None: matrices as they are, convolutions flattened.
        views: Other views of parameters by regular expressions on their names, of which the first that is found decides. With ``others``
            they apply to parameters of two dimensions or more, so that patterns need not leave out biases.
        others: A function from a learning rate to the optimizer of the other parameters; None: there are no others.
        labels: Which these are: a function of (path, parameter) that returns ``"matrix"``, a pattern of ``views``, or ``"others"``. None:
            :class:`HiddenMatrices`: other parameters are those with an unfitting number of dimensions, or with the name of an embedding or
            a head. :func:`everybit_torch.create`, given a model, and ``FlatStepper`` also know its ``nn.Embedding`` modules.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that is no matrix, that a view does not fit, or a view that
            no parameter has.
    """
    for name, sides in (("before", before), ("after", after)):
        if sides is not None:
            require_sides(name, sides)

    def direction(seen: MatrixView | None) -> list[Transform[Any]]:
        given: list[Transform[Any]] = [] if before is None else [equalize(seen, before, 1e-8)]
        if after is None:
            return [*given, orthogonalize(seen, coefficients, steps, arithmetic, normalization, eps, scale, batching)]
        # The factor comes after what would take it out again.
        orthogonal = orthogonalize(seen, coefficients, steps, arithmetic, normalization, eps, 1.0, batching)
        return [*given, orthogonal, equalize(seen, after, 1e-7), scale_by_shape(seen, scale)]

    def of(seen: MatrixView | None) -> Chain:
        first = running_mean(momentum, nesterov=nesterov) if average else trace(momentum, nesterov=nesterov)
        return _decayed([first, *direction(seen)], learning_rate, weight_decay, decay_kind, max_learning_rate)

    return routed(of, learning_rate, view, views, others, labels, others_rate)


def torch_muon(
    learning_rate: Hyperparameter = 1e-3,
    *,
    weight_decay: Hyperparameter = 0.1,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = PUBLISHED["quintic"][0],
    eps: Hyperparameter = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
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
    accepted = (None, "original", "match_rms_adamw")
    if adjust_lr_fn not in accepted:
        raise ValueError(f"adjust_lr_fn: got {adjust_lr_fn!r}; accepted are {', '.join(map(repr, accepted))}.")
    return muon(
        learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        coefficients=(ns_coefficients,),
        steps=ns_steps,
        arithmetic=arithmetic,
        eps=eps,
        scale=adjust_lr_fn or "original",
        weight_decay=weight_decay,
        view=matrix(),
        others=None,
    )


def normuon(
    learning_rate: Hyperparameter = 0.02,
    *,
    momentum: Hyperparameter = 0.95,
    b2: Hyperparameter = 0.95,
    nesterov: bool = True,
    average: bool = True,
    before: Sides | None = None,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    arithmetic: Arithmetic = "bfloat16",
    normalization: Normalization = "frobenius",
    eps: Hyperparameter = 1e-7,
    batching: Batching = "alone",
    side: Side = "rows",
    norm: Norm = "kept",
    debias: bool = False,
    scale: Scale = "original",
    weight_decay: Hyperparameter = 0.0,
    decay_kind: Decay = "decoupled",
    max_learning_rate: Scalar | None = None,
    others_rate: Hyperparameter | None = None,
    view: MatrixView | None = None,
    views: Mapping[str, MatrixView] | None = None,
    others: Others = adamw,
    labels: Callable[[str, Tensor], str] | None = None,
) -> Chain | Partition:
    """NorMuon (Li et al. 2025, https://arxiv.org/abs/2510.05491): Muon, with rows over the roots of their running mean squares.

    As the authors' code. The paper's algorithm has ``norm="exact", scale="match_rms_adamw"``.

    Args:
        learning_rate: Non-negative; of ``others``, too.
        momentum: Decay rate, in [0, 1).
        b2: Decay rate of the mean squares, in [0, 1).
        nesterov: Look a step ahead.
        average: Momentum is a running mean. False: a decaying sum.
        before: As for :func:`muon`, as are all further arguments except the next three.
        coefficients: The iteration's.
        steps: Steps in the iteration.
        arithmetic: Its dtype.
        normalization: The norm that a matrix is divided by first.
        eps: The least norm, or the number added to it.
        batching: Whether matrices of one shape go through batched products.
        side: The vectors with a mean square each; see :class:`~everybit.transforms.orthogonalize.ScaleByNorMuon`.
        norm: Whether a matrix gets its norm back, or that of an exactly orthogonal one.
        debias: Correct the bias of the mean squares.
        scale: Factor of the update, from rows and columns.
        weight_decay: Non-negative; for matrices.
        decay_kind: How weights decay.
        max_learning_rate: The greatest learning rate, for independent decay.
        others_rate: The learning rate of ``others`` over that of matrices. None: they have the same.
        view: How every matrix is seen.
        views: Other views of parameters by regular expressions on their names.
        others: The optimizer of the other parameters; None: there are no others.
        labels: Which these are.

    Raises:
        ValueError: An argument is out of range, as for :func:`muon`.
    """
    if before is not None:
        require_sides("before", before)

    def of(seen: MatrixView | None) -> Chain:
        first = running_mean(momentum, nesterov=nesterov) if average else trace(momentum, nesterov=nesterov)
        equal: list[Transform[Any]] = [] if before is None else [equalize(seen, before, 1e-8)]
        orthogonal = orthogonalize(seen, coefficients, steps, arithmetic, normalization, eps, 1.0, batching)
        direction = [
            first,
            *equal,
            orthogonal,
            scale_by_normuon(seen, b2, side, norm, debias),
            scale_by_shape(seen, scale),
        ]
        return _decayed(direction, learning_rate, weight_decay, decay_kind, max_learning_rate)

    return routed(of, learning_rate, view, views, others, labels, others_rate)


def _decayed(
    direction: list[Transform[Any]],
    learning_rate: Hyperparameter,
    weight_decay: Hyperparameter,
    kind: Decay,
    max_learning_rate: Scalar | None,
) -> Chain:
    """A direction with weight decay and learning rate."""
    if kind not in get_args(Decay):
        raise ValueError(f"decay_kind: got {kind!r}; accepted are {', '.join(map(repr, get_args(Decay)))}.")
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


def routed(
    of: Callable[[MatrixView | None], Chain],
    learning_rate: Hyperparameter,
    view: MatrixView | None,
    views: Mapping[str, MatrixView] | None,
    others: Others,
    labels: Callable[[str, Tensor], str] | None,
    others_rate: Hyperparameter | None = None,
) -> Chain | Partition:
    """One optimizer of matrices as ``of(view)``, with views of their own for some, and of the other parameters; see :func:`muon`."""
    if others is None and others_rate is not None:
        raise ValueError(f"others_rate: got {others_rate!r} with others=None; accepted with it is None.")
    if others_rate is not None:
        require("others_rate", others_rate, 0.0)
    if others is None and not views:
        if labels is not None:
            raise ValueError("labels: got a function with others=None and no views; accepted with them is None.")
        return of(view)
    given = dict(views or {})
    require_patterns("views", given)
    transforms: dict[str, Transform[Any]] = {"matrix": of(view), **{pattern: of(one) for pattern, one in given.items()}}
    rest: dict[str, Transform[Any]] = {}
    if others is not None:
        rest["others"] = (
            others(learning_rate) if others_rate is None else chain(others(learning_rate), scale(others_rate))
        )
    chosen = labels or HiddenMatrices(tuple(given.items()), NOT_HIDDEN if others is not None else None, view)
    # Where all matrices have views of their own, the first transform has no parameters.
    return partition({**transforms, **rest}, chosen, optional=("matrix", *rest) if given else tuple(rest))
