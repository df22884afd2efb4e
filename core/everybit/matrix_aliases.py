"""Optimizers of matrices, with another optimizer for what is no matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from everybit.combinators.chain import Chain, chain
from everybit.combinators.masked import Partition, partition
from everybit.labels import plain_name, require_patterns
from everybit.matrix_views import MatrixView, view_for
from everybit.orthogonalization import Arithmetic, Coefficients, Normalization
from everybit.scalars import Hyperparameter, Scalar
from everybit.transform import Transform
from everybit.transforms.decay_variants import add_cautious_decay
from everybit.transforms.orthogonalize import Scale, orthogonalize
from everybit.transforms.running_mean import running_mean
from everybit.transforms.stateless import scale_by_learning_rate
from everybit.transforms.trace import trace
from everybit.transforms.weight_decay import add_decayed_weights, subtract_decayed_weights

Decay = Literal["decoupled", "coupled", "independent", "cautious"]
"""How weights of matrices decay."""

NOT_HIDDEN = r"(^|[._])(embs?|\w*embed\w*|wte|wpe|head|classifier)([._]|$)|(^|\.)(shared|output|score)(\.weight)?$"
"""Names of the first and last layers, whose matrices are not orthogonalized: a table of vectors is no linear map between hidden states."""


@dataclass(frozen=True, slots=True)
class HiddenMatrices:
    """Labels of parameters: ``"matrix"``, the pattern of one of ``views``, or ``"others"``; made by :func:`muon`.

    Attributes:
        views: Views of parameters by patterns of their names.
        others: A regular expression that is found in the names of others; None: there are no others.
    """

    views: tuple[tuple[str, MatrixView], ...] = ()
    others: str | None = NOT_HIDDEN

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the label of a parameter."""
        name = plain_name(path)
        if self.others is not None and parameter.ndim < 2:
            return "others"
        for pattern, _ in self.views:
            if re.search(pattern, name):
                return pattern
        if self.others is None:
            return "matrix"
        hidden = view_for(parameter.shape) is not None and not re.search(self.others, name)
        return "matrix" if hidden else "others"


def muon(
    learning_rate: Hyperparameter = 1e-3,
    *,
    momentum: Hyperparameter = 0.95,
    nesterov: bool = True,
    average: bool = True,
    coefficients: Coefficients = "quintic",
    steps: int = 5,
    arithmetic: Arithmetic = "bfloat16",
    normalization: Normalization = "frobenius",
    eps: Hyperparameter = 1e-7,
    scale: Scale = "original",
    weight_decay: Hyperparameter = 0.1,
    decay: Decay = "decoupled",
    max_learning_rate: Scalar | None = None,
    view: MatrixView | None = None,
    views: Mapping[str, MatrixView] | None = None,
    others: Callable[[Hyperparameter], Transform[Any]] | None = None,
    labels: Callable[[str, Tensor], str] | None = None,
) -> Chain | Partition:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): momentum, made orthogonal; as ``torch.optim.Muon``.

    Without ``others`` all parameters are matrices, or are refused. With ``others`` it is one optimizer for a whole model: hidden matrices
    go through Muon, all other parameters through ``others``. ``print(eb.label_table(tx.labels, dict(model.named_parameters())))`` shows
    what goes where.

    Args:
        learning_rate: At least zero; of ``others``, too. With ``scale="match_rms_adamw"`` AdamW's learning rate serves both.
        momentum: Decay rate, in [0, 1).
        nesterov: Look a step ahead.
        average: Momentum is a running mean, as torch's and Keller Jordan's. False: a decaying sum, as Moonlight's and Dion's.
        coefficients: Of the iteration; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`, as for the next four.
        steps: Of the iteration.
        arithmetic: Its dtype.
        normalization: What a matrix is divided by first.
        eps: The least norm, or what is added to it.
        scale: Factor of the update, from rows and columns.
        weight_decay: At least zero.
        decay: ``"decoupled"``: times the learning rate, which the scale does not change; ``"coupled"``: added to the gradient;
            ``"independent"``: times the learning rate's share of ``max_learning_rate``; ``"cautious"``: decoupled, where it points the
            way of the update.
        max_learning_rate: Of independent decay.
        view: How every matrix is seen; see :func:`everybit.heads`. None: matrices as they are, convolutions flattened.
        views: Other views of parameters by regular expressions on their names, of which the first that is found decides. With ``others``
            they are asked of parameters of two dimensions or more, so that biases need not be kept out of them.
        others: What steps the other parameters, from a learning rate, such as ``everybit.adamw``.
        labels: Which these are: a function of (path, parameter) that returns ``"matrix"``, a pattern of ``views``, or ``"others"``. None:
            :class:`HiddenMatrices`: those of one or three dimensions, and those whose names say that they are embeddings or a head.

    Raises:
        ValueError: A hyperparameter out of range; from ``init``, a parameter that is no matrix, that a view does not fit, or a view that
            no parameter has.
    """

    def of(seen: MatrixView | None) -> Chain:
        first = running_mean(momentum, nesterov=nesterov) if average else trace(momentum, nesterov=nesterov)
        orthogonal = orthogonalize(seen, coefficients, steps, arithmetic, normalization, eps, scale)
        rate = scale_by_learning_rate(learning_rate)
        if decay == "coupled":
            return chain(add_decayed_weights(weight_decay), first, orthogonal, rate)
        if decay == "independent":
            independent = subtract_decayed_weights(weight_decay, learning_rate, max_learning_rate)
            return chain(first, orthogonal, rate, independent)
        added = add_cautious_decay(weight_decay) if decay == "cautious" else add_decayed_weights(weight_decay)
        return chain(first, orthogonal, added, rate)

    if decay not in get_args(Decay):
        raise ValueError(f"decay: got {decay!r}; accepted are {', '.join(map(repr, get_args(Decay)))}.")
    return routed(of, learning_rate, view, views, others, labels)


def routed(
    of: Callable[[MatrixView | None], Chain],
    learning_rate: Hyperparameter,
    view: MatrixView | None,
    views: Mapping[str, MatrixView] | None,
    others: Callable[[Hyperparameter], Transform[Any]] | None,
    labels: Callable[[str, Tensor], str] | None,
) -> Chain | Partition:
    """One optimizer of matrices as ``of(view)``, with views of their own for some, and of the other parameters; see :func:`muon`."""
    if others is None and not views:
        return of(view)
    given = dict(views or {})
    require_patterns("views", given)
    transforms = {"matrix": of(view), **{pattern: of(one) for pattern, one in given.items()}}
    rest = {} if others is None else {"others": others(learning_rate)}
    chosen = labels or HiddenMatrices(tuple(given.items()), NOT_HIDDEN if others is not None else None)
    # Where all matrices have views of their own, there is none left for the first transform.
    return partition({**transforms, **rest}, chosen, optional=("matrix", *rest) if given else tuple(rest))
