"""Updates whose matrices are orthogonal: what Muon makes of its momentum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, get_args

from torch import Tensor

from everybit import tree
from everybit.context import ALONE, Context
from everybit.labels import plain_name
from everybit.matrix_views import MatrixView, view_for
from everybit.orthogonalization import Arithmetic, Coefficients, Normalization, orthogonalized, triples
from everybit.scalars import Hyperparameter, Scalar, at, is_zero, require
from everybit.transform import Cut
from everybit.transforms.stateless import Empty

P = TypeVar("P")

ScaleName = Literal["original", "match_rms_adamw", "spectral_unclamped"]
"""Published factors of an orthogonal update, by torch's names."""

Scale = ScaleName | Scalar | Callable[[int, int], float]
"""The factor of an orthogonal update: a published one, a number, or a function of rows and columns."""

SCALES: dict[ScaleName, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


@dataclass(frozen=True, slots=True)
class Orthogonalize:
    r"""Replace each matrix of the updates by one with its singular vectors, and singular values about 1, times a factor.

    .. math::
        U \Sigma V^\top \mapsto s\, U V^\top \qquad X_0 = \frac{M}{\lVert M \rVert_F} \qquad
        X_{k+1} = a_k X_k + b_k (X_k X_k^\top) X_k + c_k (X_k X_k^\top)^2 X_k

    A matrix of zeros stays zero. Each matrix is computed by itself, so that its bits do not depend on others.

    Args:
        view: How a parameter becomes matrices, such as :func:`everybit.heads`. None: one of two dimensions is a matrix, one of four or
            five, a convolution, is flattened to ``(first, all others)``. For other views of parameters with certain names there is
            :func:`everybit.partition`, or ``views=`` of :func:`everybit.muon`.
        coefficients: ``"quintic"`` (Keller Jordan's), ``"cubic"``, ``"polar_express"``, ``"deepseek"``, or triples :math:`(a_k, b_k, c_k)`
            of each step, the last of which is repeated.
        steps: Of the iteration, at least 1; fewer than 100.
        arithmetic: The dtype of the iteration.
        normalization: ``"frobenius"``: the norm is at least ``eps``. ``"polar_express"``: 1.01 times the norm, plus ``eps``.
        eps: Above zero.
        scale: :math:`s`, from the rows and columns of each matrix. ``"original"``: :math:`\sqrt{\max(1, r/c)}`; ``"match_rms_adamw"``:
            :math:`0.2\sqrt{\max(r, c)}`, with which AdamW's learning rates may be kept; ``"spectral_unclamped"``: :math:`\sqrt{r/c}`;
            a number; a function of both.

    Raises:
        TypeError: ``view`` is none.
        ValueError: A hyperparameter out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; factors: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
    """

    cut: ClassVar[Cut] = "tensor"
    reduces: ClassVar[bool] = False
    view: MatrixView | None = None
    coefficients: Coefficients = "quintic"
    steps: int = 5
    arithmetic: Arithmetic = "bfloat16"
    normalization: Normalization = "frobenius"
    eps: Hyperparameter = 1e-7
    scale: Scale = "original"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps < 100:
            raise ValueError(f"steps: got {self.steps!r}; accepted is a whole number of steps, from 1 to 99.")
        triples(self.coefficients, self.steps)
        for name, value, accepted in (
            ("arithmetic", self.arithmetic, get_args(Arithmetic)),
            ("normalization", self.normalization, get_args(Normalization)),
        ):
            if value not in accepted:
                raise ValueError(f"{name}: got {value!r}; accepted are {', '.join(map(repr, accepted))}.")
        require("eps", self.eps, 0.0)
        if is_zero(self.eps):
            raise ValueError("eps: got 0.0; accepted is a number above zero.")
        require_scale(self.scale)
        if self.view is not None and not isinstance(self.view, MatrixView):
            raise TypeError(f"view: got {self.view!r}; accepted are None and values such as everybit.heads(8).")

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory, after a look at all shapes."""
        for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
            if not leaf.numel():
                continue
            try:
                self._view(leaf).shapes(leaf.shape)
            except ValueError as error:
                raise ValueError(f"{plain_name(path) or 'a parameter'}: {error}") from None
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the orthogonal updates."""
        coefficients = triples(self.coefficients, self.steps)
        eps = at(self.eps, ctx.step, name="eps")

        def one(batch: Tensor) -> Tensor:
            found = orthogonalized(
                batch, coefficients, arithmetic=self.arithmetic, normalization=self.normalization, eps=eps
            )
            return found * factor_of(self.scale, *batch.shape[-2:])

        def whole(leaf: Tensor) -> Tensor:
            if not leaf.numel():
                return leaf
            view = self._view(leaf)
            return view.joined([one(batch) for batch in view.split(leaf)], leaf.shape)

        return tree.map(whole, updates), state

    def _view(self, leaf: Tensor) -> MatrixView:
        view = self.view or view_for(leaf.shape)
        if view is None:
            raise ValueError(
                f"got shape {tuple(leaf.shape)}; accepted are matrices, convolutions (four or five dimensions), and parameters for which a"
                " view is named. Give others to another transform: everybit.muon(..., others=everybit.adamw), or everybit.partition."
            )
        return view


def require_scale(scale: object) -> None:
    """Refuse a name of no factor.

    Raises:
        ValueError: It is none.
    """
    if isinstance(scale, str) and scale not in SCALES:
        raise ValueError(
            f"scale: got {scale!r}; accepted are {', '.join(map(repr, SCALES))}, a number, or a function of rows and columns."
        )


def factor_of(scale: Scale, rows: int, columns: int) -> Scalar:
    """The factor of an orthogonal update of a matrix."""
    if isinstance(scale, str):
        return SCALES[scale](rows, columns)
    return float(scale(rows, columns)) if callable(scale) else scale


orthogonalize = Orthogonalize
