"""Dion: momentum that is orthonormal in a subspace of each matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    Count,
    Key,
    NonNegative,
    Scalar,
    Share,
    Slot,
    mean,
    normal,
    require_each,
    sqrt,
    tree,
)
from everybit.linalg import MatrixView, orthonormal, product, view_for
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors
from everybit.protocol.context import ONCE
from everybit.transforms.matrix_wise import MatrixScale, require_scale, scaled

P = TypeVar("P")


@tree.state
class DionState(Generic[P]):
    """The momentum, and for each matrix of c columns the right factor of its approximation, (c, rank): ``{"right": ...}``."""

    momentum: Slot[P]
    basis: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByDion(WholeTensors):
    r"""Replace the momentum of each matrix by an approximation of low rank with orthonormal factors, times a factor.

    .. math::
        B_t = M_{t-1} + G_t \qquad P_t = \operatorname{qr}(B_t Q_{t-1}) \qquad R_t = B_t^\top P_t \qquad
        Q_t = \frac{R_t}{\lVert R_t \rVert_\text{column}} \qquad M_t = B_t - (1-\mu) P_t R_t^\top \qquad u_t = s\, P_t Q_t^\top

    One step of power iteration for each update: the approximation follows the momentum. The error of the approximation stays in the
    momentum and comes later (error feedback). Columns of :math:`R` that are zero give no update, and leave their column of :math:`Q` as
    it was. Of a momentum of less rank than the approximation, the columns to spare are made of rounding where that is above ``eps``.
    :math:`Q_0` is standard normal, of the bits of the optimizer's seed and the parameter's place in the model.

    Args:
        decay: :math:`\mu`, in [0, 1]: the share of the approximation that stays in the momentum.
        rank_divisor: The rank is a matrix's lesser side over this, rounded up; at least 1. The authors' rank fraction of 1/4 is a 4.
        eps: Added to the norms of columns; unit of the gradient.
        scale: :math:`s`, as for :class:`~everybit.transforms.orthogonalize.Orthogonalize`; the authors' is ``"spectral_unclamped"``.
        view: How a parameter becomes matrices, as for it.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A hyperparameter out of range; from ``init``, a parameter that cannot be seen so.

    Reference:
        Ahn et al. 2025, https://arxiv.org/abs/2504.05295.
    """

    reads_weights = False
    draws = True
    decay: Share = 0.95
    rank_divisor: Count = 4
    eps: NonNegative = 1e-8
    scale: MatrixScale = "spectral_unclamped"
    view: MatrixView | None = None

    def __post_init__(self) -> None:
        WholeTensors.__post_init__(self)
        require_scale(self.scale)

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` keeps the error of the approximation; ``basis`` turns slowly where singular values are nearly equal."""
        return (SlotDecay("momentum", 1.0), SlotDecay("basis", 1.0))

    def periods(self) -> tuple[int, ...]:
        """One that only the first update begins, which draws the first bases."""
        return (ONCE,)

    def init(self, params: P) -> DionState[P]:
        """Return momentum of zero, and bases of zero until the first update draws them."""
        require_each(params, self._view)

        def zeros(p: Tensor) -> dict[str, Tensor]:
            return {name: p.new_zeros(shape) for name, shape in self._shapes(p)} or {"right": p.new_zeros(0)}

        return DionState(tree.zeros_like(params), tree.map(zeros, params))

    def update(self, updates: P, state: DionState[Any], params: P, ctx: Context = ALONE) -> tuple[P, DionState[P]]:
        """Add to the momentum, approximate it, and subtract the part that is used."""
        decay, eps = self.at(ctx.step, "decay", "eps")

        def drawn() -> Any:
            return tree.map(self._drawn, updates, ctx.keys("radius", updates), ctx.keys("angle", updates))

        found = tree.map(
            lambda g, m, q: self._approximated(g + m, q, decay, eps),
            updates,
            state.momentum,
            ctx.every(ONCE, drawn, lambda: state.basis),
        )
        # Of each parameter three things, which are taken apart again.
        parts = tree.flatten_up_to(updates, found)
        first, second, third = ([one[index] for one in parts] for index in range(3))
        return tree.replace(updates, first), DionState(tree.replace(updates, second), tree.replace(updates, third))

    def _approximated(
        self, b: Tensor, bases: dict[str, Tensor], decay: Scalar, eps: Scalar
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if not b.numel():
            return b.clone(), b.clone(), {name: one.clone() for name, one in bases.items()}
        view = self._view(b)
        moves, left, right = [], [], {}
        for part, (name, _) in zip(view.split(b), self._shapes(b), strict=True):
            p = orthonormal(product(part, bases[name]))
            r = product(part.mT, p)
            length = sqrt(mean(r * r, -2) * r.shape[-2]).unsqueeze(-2)
            q = r / (length + torch.where(length > 0, eps, 1.0).to(r.dtype))
            moves.append(scaled(product(p, q.mT), self.scale, part.shape))
            left.append(part - (1 - decay) * product(p, r.mT))
            right[name] = torch.where(length > 0, q, bases[name])
        return view.joined(moves, b.shape), view.joined(left, b.shape), right

    def _drawn(self, p: Tensor, radius: Key, angle: Key) -> dict[str, Tensor]:
        """The first bases: a parameter's share of the bits is as long as the parameter, and its bases are no longer."""
        if not p.numel():
            return {"right": p.new_zeros(0)}
        sizes = [math.prod(shape) for _, shape in self._shapes(p)]
        # A part of a vector as long as the parameter, since bits are by the place of each element.
        numbers = normal(p.reshape(-1), radius, angle)[: sum(sizes)].to(p.dtype)
        pieces = torch.split(numbers, sizes)
        return {name: one.reshape(shape).clone() for one, (name, shape) in zip(pieces, self._shapes(p), strict=True)}

    def _shapes(self, p: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name of each batch of matrices, and the shape of its right factors."""
        if not p.numel():
            return
        shapes = self._view(p).shapes(p.shape)
        for index, (*batch, rows, columns) in enumerate(shapes):
            rank = -(-min(rows, columns) // self.rank_divisor)
            yield "right" if len(shapes) == 1 else f"block{index}_right", (*batch, columns, rank)

    def _view(self, leaf: Tensor) -> MatrixView:
        view = self.view or view_for(leaf.shape) or (None if leaf.numel() else MatrixView("matrix"))
        if view is None:
            raise ValueError(
                f"got shape {tuple(leaf.shape)}; accepted are matrices, convolutions (four or five dimensions), and parameters for which a"
                " view is named. Give others to another transform: everybit.dion(..., others=everybit.adamw), or everybit.partition."
            )
        if leaf.numel():
            view.shapes(leaf.shape)
        return view


scale_by_dion = ScaleByDion
