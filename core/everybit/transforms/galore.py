"""GaLore's direction: Adam in a subspace of low rank, which the gradient chooses anew every few hundred updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from everybit import tree
from everybit.barriers import materialize, sqrt
from everybit.context import ALONE, Context
from everybit.dimensions import mean
from everybit.kronecker import moved
from everybit.labels import plain_name
from everybit.matrix_operations import eigenvectors, product
from everybit.matrix_views import MatrixView, view_for
from everybit.scalars import Hyperparameter, at, bias_correction, require, require_count, require_step
from everybit.transform import Cut, SlotDecay
from everybit.tree import Slot

P = TypeVar("P")

Shape = tuple[int, ...]


@tree.state
@dataclass(frozen=True, slots=True)
class GaloreState(Generic[P]):
    """Adam's means of projected gradients, (rank, longer side) for each matrix, and the bases, (lesser side, rank).

    What is not projected has means of its own shape, and a basis without elements.
    """

    momentum: Slot[P]
    variance: Slot[P]
    basis: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByGalore:
    r"""Adam of gradients that are projected to their first singular vectors, for each matrix on its lesser side.

    .. math::
        g_t = U^\top G_t \qquad m_t = \beta_1 m_{t-1} + (1-\beta_1) g_t \qquad v_t = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \qquad
        u_t = s\, \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} U \frac{m_t}{\sqrt{v_t} + \epsilon}

    where U are the first left singular vectors of the gradient at the last refresh, of a matrix with no more rows than columns; of another
    the right ones, from the right. The means are kept when the basis changes, whose vectors have the signs that bring each nearer to the
    one before it; others take the signs that their library happens to give. Vectors, and matrices whose lesser side is at most the rank,
    are Adam's, without :math:`s`.

    Args:
        rank: Number of singular vectors, at least 1.
        period: Updates between two choices of a basis, at least 1.
        scale: :math:`s`, at least zero.
        b1: :math:`\beta_1`, in [0, 1).
        b2: :math:`\beta_2`, in [0, 1).
        eps: :math:`\epsilon`, added before the bias is corrected; unit of the gradient.
        view: How a parameter becomes matrices, such as :func:`everybit.heads`; None: those of two dimensions as they are, convolutions of
            four or five flattened. Others are not projected.

    Raises:
        TypeError: ``view`` is none.
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a parameter of two dimensions or more that the view does
            not fit.

    Reference:
        Zhao et al. 2024, https://arxiv.org/abs/2403.03507.
    """

    cut: ClassVar[Cut] = "tensor"
    reduces: ClassVar[bool] = False
    rank: int = 128
    period: int = 200
    scale: Hyperparameter = 0.25
    b1: Hyperparameter = 0.9
    b2: Hyperparameter = 0.999
    eps: Hyperparameter = 1e-6
    view: MatrixView | None = None

    def __post_init__(self) -> None:
        require_count("rank", self.rank, "a whole number")
        require_count("period", self.period, "a whole number of updates")
        for name in ("b1", "b2"):
            require(name, getattr(self, name), 0.0, 1.0, open_high=True)
        for name in ("scale", "eps"):
            require(name, getattr(self, name), 0.0)
        if self.view is not None and not isinstance(self.view, MatrixView):
            raise TypeError(f"view: got {self.view!r}; accepted are None and values such as everybit.heads(8).")

    def decays(self) -> tuple[SlotDecay, ...]:
        """``momentum`` and ``variance`` by their rates; ``basis`` is replaced."""
        return (
            SlotDecay("momentum", self.b1),
            SlotDecay("variance", self.b2, squares=True),
            SlotDecay("basis", 0.0),
        )

    def periods(self) -> tuple[int, ...]:
        """The period of the bases."""
        return (self.period,)

    def init(self, params: P) -> GaloreState[P]:
        """Return means of zero, and the first unit vectors as bases."""
        for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
            try:
                self._view(leaf)
            except ValueError as error:
                raise ValueError(f"{plain_name(path) or 'a parameter'}: {error}") from None

        def means(p: Tensor) -> Any:
            if self._view(p) is None:
                return torch.zeros_like(p)
            return {name: p.new_zeros((*batch, rank, longer)) for name, batch, rank, _, longer in self._parts(p)}

        def bases(p: Tensor) -> dict[str, Tensor]:
            def units(batch: Shape, size: int, rank: int) -> Tensor:
                return torch.eye(size, rank, dtype=p.dtype, device=p.device).expand(*batch, size, rank).clone()

            found = {name: units(batch, size, rank) for name, batch, rank, size, _ in self._parts(p)}
            return found or {"none": p.new_zeros(0)}

        return GaloreState(tree.map(means, params), tree.map(means, params), tree.map(bases, params))

    def update(self, updates: P, state: GaloreState[Any], params: P, ctx: Context = ALONE) -> tuple[P, GaloreState[P]]:
        """Choose a basis if that is due, and update Adam's means in it."""
        step = require_step(ctx.step, "scale_by_galore")
        b1, b2, eps, scale = (at(getattr(self, name), step, name=name) for name in ("b1", "b2", "eps", "scale"))
        unbias = materialize(sqrt(bias_correction(b2, step)) / bias_correction(b1, step))

        def chosen() -> Any:
            return tree.map(self._chosen, updates, state.basis)

        def projected(g: Tensor, basis: dict[str, Tensor]) -> Any:
            if self._view(g) is None:
                return g
            return {name: product(basis[name].mT, rows) for name, rows in self._rows(g)}

        def both(function: Any, low: Any, old: Any) -> Any:
            return (
                {name: function(one, old[name]) for name, one in low.items()}
                if isinstance(low, dict)
                else function(low, old)
            )

        def direction(g: Tensor, m: Any, v: Any, basis: dict[str, Tensor]) -> Tensor:
            def adam(first: Tensor, second: Tensor) -> Tensor:
                return (first.reshape(-1) / (sqrt(second.reshape(-1)) + eps) * unbias).reshape(first.shape)

            found = both(adam, m, v)
            view = self._view(g)
            if view is None:
                return torch.as_tensor(found)
            parts = []
            for part, (name, *_) in zip(view.split(g), self._parts(g), strict=True):
                whole = product(basis[name], found[name])
                parts.append((whole if _is_wide(part.shape) else whole.mT) * scale)
            return view.joined(parts, g.shape)

        basis = ctx.every(self.period, chosen, lambda: state.basis)
        low = tree.map(projected, updates, basis)
        momentum = tree.map(
            lambda _, g, m: both(lambda x, old: moved(old, x, 1 - b1), g, m), updates, low, state.momentum
        )
        variance = tree.map(
            lambda _, g, v: both(lambda x, old: moved(old, x * x, 1 - b2), g, v), updates, low, state.variance
        )
        return tree.map(direction, updates, momentum, variance, basis), GaloreState(momentum, variance, basis)

    def _chosen(self, g: Tensor, old: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._view(g) is None:
            return {name: one.clone() for name, one in old.items()}
        return {
            name: _along(eigenvectors(product(rows, rows.mT))[1][..., : old[name].shape[-1]], old[name])
            for name, rows in self._rows(g)
        }

    def _rows(self, g: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The name of each batch of matrices, and these with their lesser side in the rows."""
        view = self._view(g)
        assert view is not None
        for part, (name, *_) in zip(view.split(g), self._parts(g), strict=True):
            yield name, part if _is_wide(part.shape) else part.mT

    def _parts(self, p: Tensor) -> Iterator[tuple[str, Shape, int, int, int]]:
        """Of each batch of matrices its name, leading dimensions, rank, and lesser and longer side."""
        view = self._view(p)
        if view is None:
            return
        shapes = view.shapes(p.shape)
        for index, (*batch, rows, columns) in enumerate(shapes):
            size = min(rows, columns)
            name = "projected" if len(shapes) == 1 else f"block{index}_projected"
            yield name, tuple(batch), min(self.rank, size), size, max(rows, columns)

    def _view(self, p: Tensor) -> MatrixView | None:
        """How a parameter is projected; None: not at all."""
        view = (self.view or view_for(p.shape)) if p.ndim > 1 and p.numel() else None
        if view is None:
            return None
        return view if any(min(shape[-2:]) > self.rank for shape in view.shapes(p.shape)) else None


def _along(new: Tensor, old: Tensor) -> Tensor:
    """A basis with the signs that bring each vector nearer to the one before."""
    return new * torch.where(mean(new * old, -2) < 0, -1.0, 1.0).to(new.dtype).unsqueeze(-2)


def _is_wide(shape: Shape) -> bool:
    return shape[-2] < shape[-1]


scale_by_galore = ScaleByGalore
