"""Updates with orthogonal matrices, which Muon makes of its momentum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

from torch import Tensor

from everybit.base import Hyperparameter, at
from everybit.linalg import Arithmetic, Batching, Coefficients, Normalization, orthogonalized, triples
from everybit.protocol import ALONE, Context
from everybit.transforms.matrix_wise import (
    MatrixWise,
    Scale,
    Stateless,
    require_above_zero,
    require_scale,
    scaled,
)
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Orthogonalize(Stateless):
    r"""Replace each matrix of the updates by a matrix with its singular vectors, and singular values about 1, times a factor.

    .. math::
        U \Sigma V^\top \mapsto s\, U V^\top \qquad X_0 = \frac{M}{\lVert M \rVert_F} \qquad
        X_{k+1} = a_k X_k + b_k (X_k X_k^\top) X_k + c_k (X_k X_k^\top)^2 X_k

    A matrix of zeros stays zero.

    Args:
        view: The view of a parameter as matrices, such as :func:`everybit.heads`. None: two dimensions are a matrix, and four or
            five, a convolution, is flattened to ``(first, all others)``. For other views of parameters with certain names there is
            :func:`everybit.partition`, or ``views=`` of :func:`everybit.muon`.
        coefficients: ``"quintic"`` (Keller Jordan's), ``"cubic"``, ``"polar_express"``, ``"deepseek"``, or triples :math:`(a_k, b_k, c_k)`
            of each step, the last of which is repeated.
        steps: Steps in the iteration, from 1 to 99.
        arithmetic: The dtype of the iteration.
        normalization: ``"frobenius"``: the norm is at least ``eps``. ``"polar_express"``: 1.01 times the norm, plus ``eps``.
        eps: Above zero.
        scale: :math:`s`, from the rows and columns of each matrix. ``"original"``: :math:`\sqrt{\max(1, r/c)}`; ``"match_rms_adamw"``:
            :math:`0.2\sqrt{\max(r, c)}`, with which AdamW's learning rates may be kept; ``"spectral_unclamped"``: :math:`\sqrt{r/c}`;
            a number; a function of both.
        batching: ``"alone"``: each matrix is computed by itself, so that its bits do not depend on which others there are, nor on how
            parameters are sharded. ``"together"``: the matrices of one parameter, such as its experts, go through batched products:
            faster for many small matrices, but their bits depend on how many there are.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A hyperparameter out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; factors: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
    """

    coefficients: Coefficients = "quintic"
    steps: int = 5
    arithmetic: Arithmetic = "bfloat16"
    normalization: Normalization = "frobenius"
    eps: Hyperparameter = 1e-7
    scale: Scale = "original"
    batching: Batching = "alone"

    def __post_init__(self) -> None:
        MatrixWise.__post_init__(self)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or not 1 <= self.steps < 100:
            raise ValueError(f"steps: got {self.steps!r}; accepted is a whole number of steps, from 1 to 99.")
        triples(self.coefficients, self.steps)
        for name, value, accepted in (
            ("arithmetic", self.arithmetic, get_args(Arithmetic)),
            ("normalization", self.normalization, get_args(Normalization)),
            ("batching", self.batching, get_args(Batching)),
        ):
            if value not in accepted:
                raise ValueError(f"{name}: got {value!r}; accepted are {', '.join(map(repr, accepted))}.")
        require_above_zero("eps", self.eps)
        require_scale(self.scale)

    def init(self, params: P) -> Empty:
        """Return the empty state of a transform without memory, after a look at all shapes."""
        self.require_shapes(params)
        return Empty()

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the orthogonal updates."""
        coefficients = triples(self.coefficients, self.steps)
        eps = at(self.eps, ctx.step, name="eps")

        def of_batch(batch: Tensor) -> Tensor:
            found = orthogonalized(
                batch,
                coefficients,
                arithmetic=self.arithmetic,
                normalization=self.normalization,
                eps=eps,
                batching=self.batching,
            )
            return scaled(found, self.scale, batch.shape)

        return self.of_batches(of_batch, updates), state

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of the iterations on all matrices of a parameter; see :mod:`everybit.combinators.step_costs`.

        Raises:
            ValueError: A parameter cannot be seen so.
        """
        total = 0.0
        for *batch, rows, columns in self.matrices(shape):
            short, long = sorted((rows, columns))
            of_each = sum(
                2 * short**2 * long + (short**3 if c else 0) for *_, c in triples(self.coefficients, self.steps)
            )
            total += math.prod(batch) * of_each
        return total


orthogonalize = Orthogonalize
