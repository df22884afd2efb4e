"""NorMuon's normalization: rows of an orthogonal update over the roots of their running mean squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from everybit.base import (
    Hyperparameter,
    Slot,
    at,
    bias_correction,
    materialize,
    mean,
    require,
    require_step,
    sqrt,
    sum_of_squares,
    tree,
)
from everybit.linalg import factored
from everybit.protocol import ALONE, Context, SlotDecay
from everybit.transforms.matrix_wise import MatrixWise, alone, from_shape, require_above_zero

P = TypeVar("P")

Side = Literal["rows", "longer"]
"""What has a second moment: each row, or each of the rows or columns of which there are more."""

Norm = Literal["kept", "exact"]
"""The Frobenius norm of what is passed on: that of what came in, or that of an exactly orthogonal matrix."""


@tree.state
@dataclass(frozen=True, slots=True)
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

    reads_weights: ClassVar[bool] = False
    b2: Hyperparameter = 0.95
    side: Side = "rows"
    norm: Norm = "kept"
    debias: bool = False
    eps: Hyperparameter = 1e-10

    def __post_init__(self) -> None:
        MatrixWise.__post_init__(self)
        require("b2", self.b2, 0.0, 1.0, open_high=True)
        require_above_zero("eps", self.eps)
        for name, value, accepted in (("side", self.side, get_args(Side)), ("norm", self.norm, get_args(Norm))):
            if value not in accepted:
                raise ValueError(f"{name}: got {value!r}; accepted are {' and '.join(map(repr, accepted))}.")

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
        b2, eps = at(self.b2, ctx.step, name="b2"), at(self.eps, ctx.step, name="eps")
        unbias: Any = 1.0
        if self.debias:
            unbias = materialize(1 / bias_correction(b2, require_step(ctx.step, "scale_by_normuon with debias")))

        def moved(o: Tensor, v: Tensor) -> Tensor:
            dim = self._dim(o.shape)
            found: Tensor = factored.moved(v, mean(o * o, dim).unsqueeze(dim), 1 - b2, None)
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
