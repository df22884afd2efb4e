"""Which parameters of a model are matrices, how each is seen, and the optimizer of the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Instance,
    NonNegativeConstant,
    Options,
    plain_name,
    require,
    require_name,
    require_patterns,
)
from everybit.combinators import Chain, NamedChain, Partition, chain, partition
from everybit.linalg import Kronecker, MatrixView, view_for
from everybit.protocol import Transform, transforms_in
from everybit.transforms import ClipByGlobalNorm, Orthogonalize, clip_by_global_norm, scale

Others = Callable[[Hyperparameter], Transform[Any]] | None
"""What steps parameters that are no hidden matrices, from a learning rate; None: there are none."""

NOT_HIDDEN = (
    r"(^|[._])(embs?|\w*embed\w*|wte|wpe|head|logits|classifier)([._]|$)|(^|\.)(shared|output|score)(\.weight)?$"
)
"""Names of the first and last layers, whose matrices are not orthogonalized: a table of vectors is no linear map between hidden states."""

LARGE = 1 << 16
"""Elements from which on a weight of two dimensions or more is expected among the matrices, unless a rule names it."""


@dataclass(frozen=True, slots=True)
class HiddenMatrices:
    """Label parameters ``"matrix"``, the pattern from ``views`` that fits, or ``"others"``; made by :class:`Matrices`.

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

    def misses(self, path: str, parameter: Tensor) -> bool:
        """Whether a large weight of two dimensions or more is among the others by its shape alone, as experts without a view are."""
        if not _is_large(parameter) or self._decide(path, parameter) != ("others", "by shape"):
            return False
        return self.others is None or re.search(self.others, plain_name(path)) is None

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
        require_name(path, "labels", "whether it is an embedding or a head", "others=None or Matrices(labels=...)")
        return ("others", "by name") if re.search(self.others, name) else ("matrix", "")


@dataclass(frozen=True, slots=True)
class MatricesByFunction:
    """The labels of a function, which say of each large weight that it leaves out whether a rule names it; made by :class:`Matrices`.

    Attributes:
        labels: The function.
        others: A regular expression that is found in the names of others which are no mistake.
        embeddings: Names of the embeddings of a model, by the types of its modules.
    """

    labels: Callable[[str, Tensor], str]
    others: str
    embeddings: frozenset[str] = frozenset()

    def __call__(self, path: str, parameter: Tensor) -> str:
        """Return the function's label."""
        return self.labels(path, parameter)

    def reason(self, path: str, parameter: Tensor) -> str:
        """Return what decided that a parameter is among the others: the function; empty for matrices."""
        return "by the function" if self(path, parameter) == "others" else ""

    def basis(self) -> str:
        """Return what all labels are decided by."""
        return "a function"

    def misses(self, path: str, parameter: Tensor) -> bool:
        """Whether a large weight of two dimensions or more is among the others, and is no embedding, and no rule names it."""
        if not _is_large(parameter) or self(path, parameter) != "others":
            return False
        name = plain_name(path)
        return name not in self.embeddings and re.search(self.others, name) is None

    def with_embeddings(self, names: Collection[str]) -> MatricesByFunction:
        """Return the same labels, for a model of which these parameters are embeddings."""
        return replace(self, embeddings=frozenset(names))


def _is_large(parameter: Tensor) -> bool:
    return parameter.ndim > 1 and parameter.numel() >= LARGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices(Options):
    """Which parameters an optimizer of matrices steps, and how it sees each.

    Args:
        view: How every matrix is seen; see :func:`everybit.heads`. None: matrices as they are, convolutions flattened; for optimizers with
            a matrix for each dimension, as tensors.
        views: Other views of parameters by regular expressions on their names, of which the first that is found decides. With ``others``
            they apply to parameters of two dimensions or more, so that patterns need not leave out biases.
        labels: Which parameters are these: a function of (path, parameter) that returns ``"matrix"``, a pattern of ``views``, or
            ``"others"``. None: :class:`HiddenMatrices`: other parameters are those with an unfitting number of dimensions, or with the name
            of an embedding or a head. :func:`everybit_torch.create`, given a model, and ``FlatStepper`` also know its ``nn.Embedding``
            modules. A torch optimizer and a stepper warn of large weights that go to the others without a rule.
        others: A regular expression on the names of further parameters that go to the others, or that ``labels`` rightly leaves to them.
            Parameters that a pattern of ``views`` fits are no others.
        others_clip: The greatest norm of all gradients of the others; see :func:`everybit.clip_by_global_norm`. None: they are not clipped.
    """

    view: MatrixView | None = None
    views: Mapping[str, MatrixView] | None = None
    labels: Callable[[str, Tensor], str] | None = field(default=None, metadata={"in_files": False})
    others: str | None = None
    others_clip: NonNegativeConstant | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.others is not None:
            require_patterns("others", {self.others: None})


MATRICES = Matrices()
"""Every hidden matrix, as it is."""


def routed(
    of: Callable[[MatrixView | None], Chain],
    learning_rate: Hyperparameter,
    matrices: Matrices,
    others: Others,
    others_rate: Hyperparameter | None = None,
) -> Chain | Partition:
    """One optimizer of matrices as ``of(view)``, with views of their own for some, and of the other parameters; see :func:`muon`."""
    Instance(Matrices).check("matrices", matrices)
    view, views, labels = matrices.view, matrices.views, matrices.labels
    if others is None and others_rate is not None:
        raise ValueError(f"others_rate: got {others_rate!r} with others=None; accepted with it is None.")
    for name in ("others", "others_clip") if others is None else ():
        if (given_for_others := getattr(matrices, name)) is not None:
            raise ValueError(f"matrices.{name}: got {given_for_others!r} with others=None; accepted with it is None.")
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
        clip = [] if matrices.others_clip is None else [clip_by_global_norm(matrices.others_clip)]
        of_others = [*clip, others(learning_rate), *([] if others_rate is None else [scale(others_rate)])]
        rest["others"] = of_others[0] if len(of_others) == 1 else chain(*of_others)
    named = NOT_HIDDEN if matrices.others is None else f"{NOT_HIDDEN}|{matrices.others}"
    chosen: Callable[[str, Tensor], str]
    if labels is not None:
        chosen = MatricesByFunction(labels, named)
    else:
        chosen = HiddenMatrices(tuple(given.items()), named if others is not None else None, view)
    # Where all matrices have views of their own, the first transform has no parameters.
    return partition({**transforms, **rest}, chosen, optional=("matrix", *rest) if given else tuple(rest))


def clip_beside_matrices(transform: object) -> str | None:
    """Return a warning if a clip by the norm of all updates is before Muon or after its iteration; None without one."""
    for node in transforms_in(transform):
        parts = node.parts() if isinstance(node, (Chain, NamedChain)) else ()
        clips = [number for number, part in enumerate(parts) if isinstance(part, ClipByGlobalNorm)]
        orthogonal = [number for number, part in enumerate(parts) if _has(part, Orthogonalize)]
        if not clips or not orthogonal:
            continue
        if clips[-1] > orthogonal[0]:
            return (
                "clip_by_global_norm after orthogonalize: divides orthogonal updates by their norm, which grows with the model's width."
                " Accepted is Matrices(others_clip=...), which clips the gradients of the other parameters alone."
            )
        if any(_has(parts[number], Partition) for number in orthogonal):
            return (
                "clip_by_global_norm before muon: its norm is of all gradients, and orthogonal updates do not depend on their lengths: it"
                " scales the others' by that of the matrices. Accepted is Matrices(others_clip=...), which clips the others alone."
            )
    return None


def _has(transform: object, kind: type) -> bool:
    return any(isinstance(one, kind) for one in transforms_in(transform))


def viewed(matrices: Matrices, where: Kronecker) -> Matrices:
    """Return the matrices as ``where`` sees them, if it says how: a file has its table alone.

    Raises:
        TypeError: One of them is another value.
        ValueError: Both have a view.
    """
    Instance(Kronecker).check("where", where)
    if where.view is None:
        return matrices
    Instance(Matrices).check("matrices", matrices)
    if matrices.view is not None:
        raise ValueError(f"where.view: got {where.view}, with matrices.view={matrices.view}; accepted is one of them.")
    return replace(matrices, view=where.view)
