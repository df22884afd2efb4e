"""Moments in subspaces of matrices: Dion and APOLLO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    AtLeastOne,
    Count,
    Key,
    NonNegative,
    Rate,
    Scalar,
    Share,
    Slot,
    at,
    bias_correction,
    materialize,
    mean,
    normal,
    require_each,
    require_step,
    sqrt,
    square_root,
    tree,
)
from everybit.linalg import MatrixView, Projection, orthonormal, product, root_mean_square, view_for
from everybit.linalg.kronecker import moved
from everybit.linalg.projections import nothing
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors
from everybit.protocol.context import ONCE
from everybit.transforms.matrix_wise import Scale, require_scale, scaled

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
    scale: Scale = "spectral_unclamped"
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


ScaledBy = Literal["channel", "tensor"]
"""What has a factor of its own: each index of the dimension that is not projected, or each matrix."""

TINY = 1e-8
"""Added to norms that are divided by."""


@tree.state
class ApolloState(Generic[P]):
    """Adam's means of projected gradients, (rank, other side) for each matrix, the norm of its last step, and the stored bases.

    A parameter that is not projected has means of its own shape, and neither norm nor basis.
    """

    momentum: Slot[P]
    variance: Slot[P]
    norm: Slot[P]
    basis: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByApollo(WholeTensors):
    r"""Scale each channel of a matrix, or the matrix, by the factor by which Adam scales its projection.

    .. math::
        R_t = U^\top G_t \qquad m_t = \beta_1 m_{t-1} + (1-\beta_1) R_t \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) R_t^2 \qquad
        S_j = \frac{\lVert (m_t / (\sqrt{v_t} + \epsilon))_{:,j} \rVert}{\lVert R_{t,:,j} \rVert + 10^{-8}}
    .. math::
        D_t = G_t S \qquad D_t \leftarrow D_t \min\!\left(1, \gamma \frac{\lVert D_{t-1} \rVert}{\lVert D_t \rVert}\right) \qquad
        u_t = \sqrt{s}\, \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} D_t

    U has normal numbers of variance 1/rank. The norm of :math:`D_t` grows by no more than :math:`\gamma` from one update to the next;
    after a norm of zero it is not limited, whereas the authors' code limits it to about 1e-8 then, from which it grows back by a
    hundredth in each step. Vectors, and matrices with a side of at most the rank, are Adam's, without :math:`s` and limit. APOLLO-Mini is
    ``scale_type="tensor"`` with a rank of 1 and an s of 128.

    Args:
        scale: :math:`s`, at least zero. As in the authors' code its root is taken; the paper's factor is that root.
        scale_type: ``"channel"``: a factor for each index j of the dimension that is not projected; ``"tensor"``: one for each matrix.
        limit: :math:`\gamma`, at least 1; None: steps may grow as they like.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        eps: :math:`\epsilon`, added before the bias is corrected; unit of the gradient.
        projection: The bases U, and which parameters are projected.

    Raises:
        TypeError: ``view`` is not a view.
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a parameter of two dimensions or more that the view does
            not fit.

    Reference:
        Zhu et al. 2024, https://arxiv.org/abs/2412.05270; https://github.com/zhuhanqing/APOLLO. The limit is that of Chen et al. 2024,
        https://arxiv.org/abs/2410.01623.
    """

    reads_weights = False
    scale: NonNegative = 1.0
    scale_type: ScaledBy = "channel"
    limit: AtLeastOne | None = 1.01
    b1: Rate = 0.9
    b2: Rate = 0.999
    eps: NonNegative = 1e-6
    projection: Projection = field(default_factory=lambda: Projection(256, basis="random"))

    @property
    def draws(self) -> bool:
        """Whether bases are random."""
        return self.projection.draws

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` and ``variance`` by their rates; ``norm`` by its least step, which the limit makes; ``basis`` is replaced."""
        grows = 0.0 if self.limit is None else 1 / self.limit if isinstance(self.limit, (int, float)) else 1.0
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("norm", grows),
            SlotDecay("basis", 0.0),
        )

    def periods(self) -> tuple[int, ...]:
        """The period of the bases, if they are computed from gradients."""
        return self.projection.periods

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of the projection of a parameter of this shape."""
        return self.projection.step_cost(shape)

    def init(self, params: P) -> ApolloState[P]:
        """Return means and norms of zero, and the first unit vectors as bases where these are stored."""
        self.projection.require(params)

        def means(p: Tensor) -> Any:
            low = self.projection.zeros(p)
            return low if isinstance(low, dict) else torch.zeros_like(p)

        def norms(p: Tensor) -> dict[str, Tensor]:
            parts = () if self.limit is None else self.projection.parts(p.shape)
            return {part.name: p.new_zeros((*part.batch, 1, 1)) for part in parts} or nothing(p)

        bases = tree.map(self.projection.first_bases, params)
        return ApolloState(tree.map(means, params), tree.map(means, params), tree.map(norms, params), bases)

    def update(self, updates: P, state: ApolloState[Any], params: P, ctx: Context = ALONE) -> tuple[P, ApolloState[P]]:
        """Update the means of projections, and scale gradients by them."""
        step = require_step(ctx.step, "scale_by_apollo")
        b1, b2, eps, scale = (at(getattr(self, name), step, name=name) for name in ("b1", "b2", "eps", "scale"))
        limit = None if self.limit is None else at(self.limit, step, name="limit")
        unbias = materialize(sqrt(bias_correction(b2, step)) / bias_correction(b1, step))
        factor = materialize(unbias * square_root(scale))

        bases, stored = self.projection.bases(ctx, updates, state.basis)
        low: Any = tree.map(self.projection.down, updates, bases)
        momentum = tree.map(
            lambda _, x, m: _both(lambda new, old: moved(old, new, 1 - b1), x, m), updates, low, state.momentum
        )
        variance = tree.map(
            lambda _, x, v: _both(lambda new, old: moved(old, new * new, 1 - b2), x, v), updates, low, state.variance
        )

        def preconditioned(m: Tensor, v: Tensor) -> Tensor:
            return (m.reshape(-1) / (sqrt(v.reshape(-1)) + eps)).reshape(m.shape)

        def step_of(g: Tensor, x: Any, m: Any, v: Any, norms: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            moves = _both(preconditioned, m, v)
            if isinstance(moves, Tensor):
                return (moves.reshape(-1) * unbias).reshape(g.shape), nothing(g)
            found, sizes = [], {}
            for one, (name, move) in zip(self.projection.split(g), moves.items(), strict=True):
                scaled = one * self._ratio(move, x[name])
                if limit is not None:
                    scaled, sizes[name] = _limited(scaled, norms[name], limit)
                found.append(scaled * factor)
            return self.projection.joined(found, g.shape), sizes or nothing(g)

        steps = tree.flatten_up_to(updates, tree.map(step_of, updates, low, momentum, variance, state.norm))
        directions, norms = (tree.replace(updates, [one[index] for one in steps]) for index in range(2))
        return directions, ApolloState(momentum, variance, norms, stored)

    def _ratio(self, move: Tensor, low: Tensor) -> Tensor:
        """The norm of what Adam makes of a projection over that of the projection, to multiply with."""
        if self.scale_type == "tensor":
            return _norm(move) / (_norm(low) + TINY)
        lengths = [_root(mean(x * x, -2).unsqueeze(-2) * x.shape[-2]) for x in (move, low)]
        return lengths[0] / (lengths[1] + TINY)


def _limited(x: Tensor, before: Tensor, limit: Scalar) -> tuple[Tensor, Tensor]:
    """Return matrices with norms of at most ``limit`` times the norms before, if there were any, and their norms."""
    size = _norm(x)
    # A sum of tensors: a number over a tensor would be the number times an inverse, rounded twice.
    most = (before + TINY) * (torch.zeros_like(before) + limit)
    is_over = (before > 0) & (size > most)
    share = torch.where(is_over, most / torch.where(is_over, size, 1.0), 1.0)
    return x * share, torch.where(is_over, most, size)


def _norm(x: Tensor) -> Tensor:
    """Return the norm of each matrix."""
    return root_mean_square(x, x.ndim - 2) * math.sqrt(math.prod(x.shape[-2:]))


def _root(square: Tensor) -> Tensor:
    # No root of zero, which has no derivative.
    known = square > 0
    return torch.where(known, sqrt(torch.where(known, square, 1.0)), 0.0)


def _both(function: Any, x: Any, old: Any) -> Any:
    """``function`` of a tensor and what belongs to it, or of each projected matrix and what belongs to that."""
    return {name: function(one, old[name]) for name, one in x.items()} if isinstance(x, dict) else function(x, old)


scale_by_apollo = ScaleByApollo
