"""Shampoo's direction: gradients between inverse roots of their mean products, at the size of another optimizer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import (
    NonNegative,
    NonNegativeConstant,
    Options,
    Rate,
    RateConstant,
    Scalar,
    Slot,
    Updates,
    at,
    bias_correction,
    materialize,
    require_step,
    sqrt,
    tree,
)
from everybit.linalg import Block, Kronecker, inverse_roots, root_mean_square
from everybit.linalg.kronecker import moved, times
from everybit.protocol import ALONE, Context, SlotDecay, WholeTensors

P = TypeVar("P")


Graft = Literal["none", "sgd", "adagrad", "rmsprop", "adam"]
"""Optimizers with a size for the direction of each matrix; ``"none"``: it keeps its own."""

Damping = Literal["root", "start"]
"""Where ``eps`` is added: to the eigenvalues before their root is taken, or to the matrices before the first update."""


@dataclass(frozen=True, slots=True)
class Grafting(Options):
    """The optimizer whose size Shampoo's direction gets, for each matrix.

    Args:
        of: ``"adam"``, ``"rmsprop"`` (no bias corrected), ``"adagrad"``, ``"sgd"`` (the mean itself), or no optimizer: ``"none"``.
        decay: Decay rate of the squares of ``"adam"`` and ``"rmsprop"``, in [0, 1).
        eps: Added to their roots, and to that of ``"adagrad"``; unit of the gradient.
        start: The update from which Shampoo's matrices are used; before it, steps are those of the optimizer. None: the first refresh
            after the first update.

    Raises:
        ValueError: An argument out of range, or a ``start`` without an optimizer.
    """

    of: Graft = "adam"
    decay: RateConstant = 0.999
    eps: NonNegativeConstant = 1e-8
    start: Updates | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.of == "none" and self.start not in (None, 1):
            raise ValueError(f"start: got {self.start} without a graft to take before; accepted are None and 1.")


@tree.state
class ShampooState(Generic[P]):
    """The mean of gradients, that of their squares, that of their products, and the inverse roots of these.

    ``factors`` and ``roots`` hold a square matrix for each dimension of a parameter; see :mod:`everybit.linalg.kronecker`. Where no mean
    or no squares are needed, ``momentum`` and ``variance`` hold a factor without elements.
    """

    momentum: Slot[P]
    variance: Slot[P]
    factors: Slot[P]
    roots: Slot[P]


@dataclass(frozen=True, slots=True)
class ScaleByShampoo(WholeTensors):
    r"""Multiply by the inverse roots of the mean products of gradients.

    Of each matrix :math:`G` with mean :math:`m`:

    .. math::
        L_t = \beta_2 L_{t-1} + (1-\beta_2) G_t G_t^\top \qquad R_t = \beta_2 R_{t-1} + (1-\beta_2) G_t^\top G_t \qquad
        S_t = (\hat L_t + \epsilon I)^{-e} \hat m_t (\hat R_t + \epsilon I)^{-e} \qquad
        u_t = \frac{\lVert D_t \rVert}{\lVert S_t \rVert} S_t

    where :math:`D_t` is the direction of the optimizer that is grafted, and hats say that the bias is corrected. The roots are those of
    the last refresh. A tensor of more dimensions is multiplied along each. A parameter without matrices, such as a vector, takes
    :math:`D_t` itself, or without a graft the step of a diagonal matrix, :math:`\hat m_t / \sqrt{\hat v_t + \epsilon}`.

    Args:
        b1: Decay rate of :math:`m`, in [0, 1); None: the gradient itself.
        b2: :math:`\beta_2`, in [0, 1); None: sums, as the paper's.
        eps: :math:`\epsilon`; unit of the gradient squared.
        damping: ``"root"``: as above. ``"start"``: :math:`L_0 = R_0 = \epsilon I`, as the paper.
        exponent: :math:`e`; None: 1 over twice the number of dimensions that have a matrix, 1/4 for both sides of one, 1/2 for one side.
        period: Updates between two refreshes of the roots, at least 1.
        graft: The optimizer whose size the direction gets.
        debias: Correct the bias of :math:`m`, and of :math:`L` and :math:`R` where they are means and begin at zero.
        where: Which dimensions have a matrix.

    Raises:
        ValueError: A hyperparameter out of range, or not finite; from ``init``, a parameter that the view does not fit.

    Reference:
        Gupta et al. 2018, https://arxiv.org/abs/1802.09568; grafting: Anil et al. 2020, https://arxiv.org/abs/2002.09018; with the mean of
        gradients: Shi et al. 2023, https://arxiv.org/abs/2309.06497.
    """

    reads_weights = False
    b1: Rate | None = 0.9
    b2: Rate | None = 0.999
    eps: NonNegative = 1e-12
    damping: Damping = "root"
    exponent: NonNegative | None = None
    period: Updates = 10
    graft: Grafting = field(default_factory=lambda: Grafting())  # a default that torch 2.11 traces
    debias: bool = True
    where: Kronecker = field(default_factory=lambda: Kronecker(max_dimension=8192))  # a default that torch 2.11 traces

    def decays(self) -> tuple[SlotDecay, ...]:
        """``roots`` may not be rounded to nearest in 16 bits, the others by their rates.

        A rounding error is a share of a root's largest eigenvalue; the least one, in the direction of the largest gradients, would change
        its sign.
        """
        rate = 1.0 if self.b2 is None else self.b2
        squares = {"none": rate, "sgd": 0.0, "adagrad": 1.0}.get(self.graft.of, self.graft.decay)
        return (
            SlotDecay("momentum", 0.0 if self.b1 is None else self.b1),
            SlotDecay("variance", squares, squares=True),
            SlotDecay("factors", rate),
            SlotDecay("roots", 1.0),
        )

    def periods(self) -> tuple[int, ...]:
        """The period of the roots."""
        return (self.period,)

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of a step: the product of gradients, that with the roots, and an eigendecomposition a refresh."""
        return self.where.step_cost(shape, products=2.0, cubes=10.0 / self.period)

    def init(self, params: P) -> ShampooState[P]:
        """Return means and sums of zero, or the matrices of ``damping="start"``, and the identity for all roots."""
        self.where.require(params)
        eps = self.eps if self.damping == "start" else 0.0
        if callable(eps) and not isinstance(eps, Tensor):
            raise ValueError(
                "eps: got a schedule with damping='start', which asks for it before the first update; accepted is a number."
            )

        def begun(p: Tensor) -> Any:
            return self.where.mapped(lambda one: one * eps, self.where.identities(p))

        return ShampooState(
            tree.map(lambda p: _nothing(p) if self.b1 is None else torch.zeros_like(p), params),
            tree.map(lambda p: torch.zeros_like(p) if self._keeps_squares(p) else _nothing(p), params),
            tree.map(begun, params),
            tree.map(self.where.identities, params),
        )

    def update(
        self, updates: P, state: ShampooState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, ShampooState[P]]:
        """Update means and products, refresh the roots if that is due, and multiply by them."""
        step = require_step(ctx.step, "scale_by_shampoo")
        b1, b2 = (None if one is None else at(one, step, name=name) for name, one in (("b1", self.b1), ("b2", self.b2)))
        eps = at(self.eps, step, name="eps")
        unbias = _unbias(b1, step) if self.debias else 1.0
        unbias_factors = _unbias(b2, step) if self.debias and self.damping == "root" else 1.0

        def averaged(g: Tensor, m: Any) -> Any:
            return _nothing(g) if b1 is None else moved(m, g, 1 - b1)

        def added(g: Tensor, old: dict[str, Tensor]) -> Any:
            return self.where.mapped(
                lambda a, b: a + b if b2 is None else moved(a, b, 1 - b2), old, self.where.products(g)
            )

        def refreshed() -> Any:
            def of(p: Tensor, factors: dict[str, Tensor]) -> Any:
                exponents = self._exponents(p, step)
                ridge = eps if self.damping == "root" else 0.0
                return {
                    name: inverse_roots(one * unbias_factors, exponents[name], ridge) if one.numel() else one.clone()
                    for name, one in factors.items()
                }

            return tree.map(of, updates, factors)

        momentum = tree.map(averaged, updates, state.momentum)
        variance = tree.map(self._squared(step, b2), updates, state.variance)
        factors = tree.map(added, updates, state.factors)
        roots = ctx.every(self.period, refreshed, lambda: state.roots)
        sized = self._sized(step, unbias_factors, eps)
        begins = self.graft.start if self.graft.start is not None else 1 if self.graft.of == "none" else self.period + 1

        def direction(g: Tensor, m: Any, v: Any, matrices: dict[str, Tensor]) -> Tensor:
            mean = g if b1 is None else (m.reshape(-1) * unbias).reshape(m.shape)
            blocks = self.where.blocks(g.shape)
            sizes = self.where.split(sized(mean, v))
            parts = []
            for part, size, block in zip(self.where.split(mean), sizes, blocks, strict=True):
                found = self._grafted(part, size, block, matrices)
                parts.append(torch.where(step >= begins, found, size) if any(block.has) and begins > 1 else found)
            return self.where.joined(parts, g.shape)

        return tree.map(direction, updates, momentum, variance, roots), ShampooState(momentum, variance, factors, roots)

    def _keeps_squares(self, p: Tensor) -> bool:
        if self.graft.of == "none":
            return not all(any(block.has) for block in self.where.blocks(p.shape))
        return self.graft.of != "sgd"

    def _exponents(self, p: Tensor, step: Tensor) -> dict[str, Scalar]:
        found: dict[str, Scalar] = {}
        for block in self.where.blocks(p.shape):
            for _, name in block.dimensions:
                given = self.exponent
                found[name] = 0.5 / sum(block.has) if given is None else at(given, step, name="exponent")
        return found

    def _squared(self, step: Tensor, b2: Scalar | None) -> Any:
        """The sums or means of squares after this update."""
        sums = self.graft.of == "adagrad" or (self.graft.of == "none" and b2 is None)
        rate = b2 if self.graft.of == "none" and b2 is not None else at(self.graft.decay, step, name="graft.decay")

        def squared(g: Tensor, v: Any) -> Any:
            if isinstance(v, dict):
                return _nothing(g)
            return v + g * g if sums else moved(v, g * g, 1 - rate)

        return squared

    def _sized(self, step: Tensor, unbias_factors: Scalar, eps: Scalar) -> Any:
        """The direction that is grafted, from the mean of gradients and the squares."""
        graft_eps = at(self.graft.eps, step, name="graft.eps")
        unbias = _unbias(at(self.graft.decay, step, name="graft.decay"), step) if self.graft.of == "adam" else 1.0

        def sized(mean: Tensor, v: Any) -> Tensor:
            if isinstance(v, dict):
                return mean
            flat, squares = mean.reshape(-1), v.reshape(-1)
            root = (
                sqrt(squares * unbias_factors + eps) if self.graft.of == "none" else sqrt(squares * unbias) + graft_eps
            )
            return (flat / root).reshape(mean.shape)

        return sized

    def _grafted(self, mean: Tensor, size: Tensor, block: Block, roots: dict[str, Tensor]) -> Tensor:
        if not any(block.has):
            return size.clone()
        found = mean
        for dim, name in block.dimensions:
            found = times(found, roots[name], dim, block.batch)
        if self.graft.of == "none":
            return found
        own, wanted = root_mean_square(found, block.batch), root_mean_square(size, block.batch)
        known = own > 0
        return found * torch.where(known, wanted / torch.where(known, own, 1.0), 0.0)


def _nothing(p: Tensor) -> dict[str, Tensor]:
    return {"none": p.new_zeros(0)}


def _unbias(rate: Scalar | None, step: Tensor) -> Scalar:
    return 1.0 if rate is None else materialize(1 / bias_correction(rate, step))


scale_by_shampoo = ScaleByShampoo
