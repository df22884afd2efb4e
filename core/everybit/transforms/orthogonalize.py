"""The direction of Muon: orthogonal momentum, rows of equal length, and NorMuon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    AboveZero,
    NonNegative,
    Rate,
    Scalar,
    Slot,
    at,
    bias_correction,
    materialize,
    mean,
    require_step,
    sqrt,
    sum_of_squares,
    tree,
)
from everybit.linalg import NewtonSchulz, factored_moments
from everybit.protocol import ALONE, Context, SlotDecay
from everybit.transforms.matrix_wise import MatrixScale, MatrixWise, Stateless, alone, from_shape, require_scale, scaled
from everybit.transforms.updates import Empty

P = TypeVar("P")


UnitSides = Literal["rows", "columns", "both", "rows_then_columns", "columns_then_rows"]
"""What gets the length 1: ``"both"`` at once, from the lengths before, or one after the other."""


@dataclass(frozen=True, slots=True)
class Equalize(Stateless):
    r"""Divide the rows of each matrix, its columns, or both by their lengths.

    .. math::
        X \mapsto D_r^{-1/2} X D_c^{-1/2} \qquad D_r = \operatorname{diag}\Bigl(\sum_j X_{ij}^2 + \epsilon\Bigr) \qquad
        D_c = \operatorname{diag}\Bigl(\sum_i X_{ij}^2 + \epsilon\Bigr)

    without :math:`D_c` for rows and without :math:`D_r` for columns. Before :class:`~everybit.transforms.orthogonalize.Orthogonalize`
    this is MuonEq, for which the authors take rows; after it Muon+, where columns and rows follow one another. A matrix of zeros stays
    zero.

    Args:
        view: How a parameter becomes matrices; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`.
        sides: ``"rows"``, ``"columns"``, ``"both"``, ``"rows_then_columns"`` or ``"columns_then_rows"``.
        eps: Added to the squares of lengths, at least zero; their unit. 1e-8 in MuonEq's code, 1e-7 in that of Muon+.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: An argument out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Chang et al. 2026, https://arxiv.org/abs/2603.28254 (before); Zhang et al. 2026, https://arxiv.org/abs/2602.21545 (after).
    """

    sides: UnitSides = "rows"
    eps: NonNegative = 1e-8

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the updates with rows and columns of their new lengths."""
        eps = at(self.eps, ctx.step, name="eps")
        first, _, second = self.sides.partition("_then_")

        def one(x: Tensor) -> Tensor:
            if first == "both":
                return x * _over_length(x, -1, eps) * _over_length(x, -2, eps)
            for side in (first, second):
                if side:
                    x = x * _over_length(x, -1 if side == "rows" else -2, eps)
            return x

        return self.of_batches(lambda batch: alone(one, batch), updates), state


def _over_length(x: Tensor, dim: int, eps: Scalar) -> Tensor:
    square = mean(x * x, dim).unsqueeze(dim) * from_shape(x.shape[dim], x)
    # A row of zeros is divided by one where there is no eps.
    length = sqrt(square + eps)
    return materialize(1 / length.masked_fill(length == 0, 1.0))


equalize = Equalize


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
            :func:`everybit.partition`, or :class:`everybit.Matrices`.
        iteration: How the nearest orthogonal matrix is approached.
        scale: :math:`s`, from the rows and columns of each matrix. ``"original"``: :math:`\sqrt{\max(1, r/c)}`; ``"match_rms_adamw"``:
            :math:`0.2\sqrt{\max(r, c)}`, with which AdamW's learning rates may be kept; ``"spectral_unclamped"``: :math:`\sqrt{r/c}`;
            a number; a function of both.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A hyperparameter out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; factors: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
    """

    iteration: NewtonSchulz = field(default_factory=NewtonSchulz)  # a default that torch 2.11 traces
    scale: MatrixScale = "original"

    def __post_init__(self) -> None:
        MatrixWise.__post_init__(self)
        require_scale(self.scale)

    def update(self, updates: P, state: Empty, params: P, ctx: Context = ALONE) -> tuple[P, Empty]:
        """Return the orthogonal updates."""

        def of_batch(batch: Tensor) -> Tensor:
            return scaled(self.iteration.orthogonalized(batch), self.scale, batch.shape)

        return self.of_batches(of_batch, updates), state

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of the iterations on all matrices of a parameter; see :mod:`everybit.combinators.whole_tensors`.

        Raises:
            ValueError: A parameter cannot be seen so.
        """
        found = self.matrices(shape)
        return sum(math.prod(batch) * self.iteration.cost(rows, columns) for *batch, rows, columns in found)


orthogonalize = Orthogonalize


Side = Literal["rows", "longer"]
"""What has a second moment: each row, or each of the rows or columns of which there are more."""

Norm = Literal["kept", "exact"]
"""The Frobenius norm of what is passed on: that of what came in, or that of an exactly orthogonal matrix."""


@tree.state
class NorMuonState(Generic[P]):
    """The running mean square of each row, or column; a dict of them for each parameter."""

    variance: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByNorMuon(MatrixWise):
    r"""Divide the rows of orthogonal updates by the roots of their running mean squares, and bring the matrix back to its norm.

    .. math::
        v_t = \beta v_{t-1} + (1-\beta) \tfrac1c \sum_j O_{ij}^2 \qquad
        \hat O_{ij} = \frac{O_{ij}}{\sqrt{v_{t,i}} + \epsilon} \qquad
        u_t = \hat O \frac{\lVert O \rVert_F}{\lVert \hat O \rVert_F + \epsilon}

    for a matrix O of r rows and c columns.

    Args:
        view: How a parameter becomes matrices; see :class:`~everybit.transforms.orthogonalize.Orthogonalize`.
        b2: :math:`\beta`, in [0, 1).
        side: ``"rows"``: as the authors and Dion. ``"longer"``: of a wide matrix its columns, as modded-nanogpt.
        norm: ``"kept"``: as the authors' code. ``"exact"``: :math:`\sqrt{\min(r, c)}` in the place of :math:`\lVert O \rVert_F`; with the
            factor :math:`0.2\sqrt{\max(r, c)}` after it this is the paper's :math:`0.2\sqrt{rc}`.
        debias: Divide :math:`v_t` by :math:`1-\beta^t`, as Dion did at first. A norm that is brought back takes that out again but for
            :math:`\epsilon`.
        eps: :math:`\epsilon`, above zero.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: An argument out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Li et al. 2025, https://arxiv.org/abs/2510.05491, Algorithm 1.
    """

    reads_weights = False
    b2: Rate = 0.95
    side: Side = "rows"
    norm: Norm = "kept"
    debias: bool = False
    eps: AboveZero = 1e-10

    def decays(self) -> tuple[SlotDecay, ...]:
        """Declare that ``variance`` decays with ``b2``."""
        return (SlotDecay("variance", self.b2, squares=True),)

    def init(self, params: P) -> NorMuonState[P]:
        """Return mean squares of zero."""
        self.require_shapes(params)
        return NorMuonState(tree.map(self._zeros, params))

    def update(
        self, updates: P, state: NorMuonState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, NorMuonState[P]]:
        """Update the mean squares, and divide by their roots."""
        b2, eps = self.at(ctx.step, "b2", "eps")
        unbias: Any = 1.0
        if self.debias:
            unbias = materialize(1 / bias_correction(b2, require_step(ctx.step, "scale_by_normuon with debias")))

        def moved(o: Tensor, v: Tensor) -> Tensor:
            dim = self._dim(o.shape)
            found: Tensor = factored_moments.moved(v, mean(o * o, dim).unsqueeze(dim), 1 - b2, None)
            return found

        def divided(o: Tensor, v: Tensor) -> Tensor:
            rows, columns = o.shape
            found = o * materialize(1 / (sqrt(v * unbias) + eps))
            before = _norm(o) if self.norm == "kept" else from_shape(math.sqrt(min(rows, columns)), o)
            return found * materialize(before / (_norm(found) + eps))

        def of_leaf(function: Any, leaf: Tensor, held: dict[str, Tensor]) -> list[Tensor]:
            parts = self.view_of(leaf.shape).split(leaf)
            return [alone(function, *pair) for pair in zip(parts, held.values(), strict=True)]

        def new_variance(leaf: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
            if not leaf.numel():
                return {name: x.clone() for name, x in held.items()}
            return dict(zip(held, of_leaf(moved, leaf, held), strict=True))

        def new_update(leaf: Tensor, held: dict[str, Tensor]) -> Tensor:
            if not leaf.numel():
                return leaf
            return self.view_of(leaf.shape).joined(of_leaf(divided, leaf, held), leaf.shape)

        variance = tree.map(new_variance, updates, state.variance)
        return tree.map(new_update, updates, variance), NorMuonState(variance)

    def _zeros(self, p: Tensor) -> dict[str, Tensor]:
        if not p.numel():
            return {"rows": torch.zeros_like(p.reshape(-1)[:0])}
        batches = self.view_of(p.shape).split(torch.zeros_like(p))
        found = {}
        for number, batch in enumerate(batches):
            dim = self._dim(batch.shape)
            name = "rows" if dim == -1 else "columns"
            found[name if len(batches) == 1 else f"{name}{number}"] = batch.narrow(dim, 0, 1).clone()
        return found

    def _dim(self, shape: Sequence[int]) -> int:
        """The dimension along which a mean is taken, counted from the end."""
        return -1 if self.side == "rows" or shape[-2] >= shape[-1] else -2


def _norm(x: Tensor) -> Tensor:
    return sqrt(sum_of_squares(x))


scale_by_normuon = ScaleByNorMuon
