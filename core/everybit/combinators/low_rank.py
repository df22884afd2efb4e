"""A transform in a subspace of low rank, as GaLore has Adam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from everybit.base import Hyperparameter, NonNegative, Numbering, Slot, at, first_of_whole, tree
from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.combinators.wrapping import Wrapping
from everybit.linalg import Basis, MatrixView, ProjectedSide, Projection
from everybit.protocol import (
    ALONE,
    Context,
    Cut,
    SlotDecay,
    Transform,
    decays,
    enter,
    eval_params,
    periods,
    transforms_in,
)

P = TypeVar("P")


@tree.state
class LowRankState(Generic[P]):
    """The inner transform's state of projected gradients, and the bases: (size of the projected dimension, rank) for each matrix.

    A slot of the inner state holds factors for a projected parameter, ``{"projected": ...}``. Factors of the inner transform itself
    have both names: ``"projected_rows"``. A parameter that is not projected has a basis without elements.
    """

    inner: Any
    basis: Slot[P]


@dataclass(frozen=True, slots=True)
class LowRank(Wrapping):
    r"""Project the gradient of each matrix on one side, update there with the inner transform, and project the updates back.

    .. math::
        g_t = U^\top G_t \qquad u_t = s\, U\, \operatorname{inner}(g_t)

    The inner transform's state has the size of the projections. It is kept when the basis U changes. Vectors, and matrices with a side
    of at most the rank, go through the inner transform as they are, without :math:`s`. Weights that the inner transform reads are
    projected, too. A decay in there would shrink only their projection, so weight decay belongs behind this transform.

    Args:
        transform: The inner transform. It may need whole matrices, and has no other reduction.
        scale: :math:`s`, at least zero.
        projection: The bases, and which parameters are projected.

    Raises:
        TypeError: The inner transform is not a transform.
        ValueError: ``scale`` is out of range; an inner transform with reductions, masks, labels, or with weights for evaluation, which have
            no meaning here (the last from ``init``); from ``init``, a parameter of two dimensions or more that the view does not fit.

    Reference:
        Zhao et al. 2024, https://arxiv.org/abs/2403.03507.
    """

    transform: Transform[Any]
    scale: NonNegative = 0.25
    projection: Projection = field(default_factory=Projection)

    def __post_init__(self) -> None:
        Wrapping.__post_init__(self)
        if self.transform.reduces:
            raise ValueError(
                f"low_rank: got {self.transform!r}, which reduces over parameters; accepted are transforms that do not. What clips by a"
                " norm stands before low_rank or behind it."
            )
        if any(isinstance(one, (Masked, Partition)) for one in transforms_in(self.transform)):
            raise ValueError(
                f"low_rank: got {self.transform!r} with a mask or labels inside; accepted is low_rank inside of them, which are asked by"
                " the parameters' own names and shapes."
            )

    @property
    def cut(self) -> Cut:
        """``"tensor"``: an element's projection is made of its matrix."""
        return "tensor"

    @property
    def draws(self) -> bool:
        """Whether bases are random, or the inner transform draws."""
        return self.projection.draws or getattr(self.transform, "draws", False)

    @property
    def reads_weights(self) -> bool:
        """Whether the inner transform looks at weights."""
        inside = [one for one in transforms_in(self.transform) if not isinstance(one, (Chain, NamedChain))]
        return any(getattr(one, "reads_weights", True) for one in inside)

    def decays(self) -> tuple[SlotDecay, ...]:
        """Those of the inner transform; ``basis`` is replaced."""
        return (*decays(self.transform), SlotDecay("basis", 0.0))

    def periods(self) -> tuple[int, ...]:
        """Those of the inner transform, and that of the bases."""
        return tuple(sorted({*periods(self.transform), *self.projection.periods}))

    def step_cost(self, shape: Sequence[int]) -> float:
        """Return the multiply-adds of projections on a parameter of this shape."""
        return self.projection.step_cost(shape)

    def eval_params(self, params: P, state: LowRankState[P]) -> P:  # noqa: ARG002  # as the protocol has it
        """The weights that are trained: ``init`` refuses inner transforms that have others."""
        return params

    def init(self, params: P) -> LowRankState[P]:
        """Return the inner state of zeros, and the first unit vectors as bases."""
        self.projection.require(params)
        low: Any = tree.map(self.projection.zeros, params)
        inner = self.transform.init(low)
        if any(a is not b for a, b in zip(_evaluated(self.transform, low, inner), tree.leaves(low), strict=True)):
            raise ValueError(
                f"low_rank: got {self.transform!r}, which has weights for evaluation; accepted are transforms without. Put an average of"
                " weights behind low_rank."
            )
        packed = self._renamed(_packed, inner, params)
        return LowRankState(packed, tree.map(self.projection.first_bases, params))

    def update(
        self, updates: P, state: LowRankState[Any], params: P, ctx: Context = ALONE
    ) -> tuple[P, LowRankState[P]]:
        """Choose a basis if that is due, and update in it."""
        scale = at(self.scale, ctx.step, name="scale")
        bases, stored = self.projection.bases(ctx, updates, state.basis)
        low: Any = tree.map(self.projection.down, updates, bases)
        # What looks at shapes alone is given others of them: weights may be elsewhere.
        low_params: Any = tree.map(self.projection.down, params, bases) if self.reads_weights else low
        inner = self._renamed(_unpacked, state.inner, params)

        def back(g: Tensor, move: Any, basis: dict[str, Tensor]) -> Tensor:
            whole = self.projection.up(move, basis, g)
            return whole * scale if isinstance(move, dict) else whole

        def after(moves: Any, inner: Any) -> tuple[P, LowRankState[P]]:
            packed = self._renamed(_packed, inner, params)
            return tree.map(back, updates, moves, bases), LowRankState(packed, stored)

        return enter(self.transform, low, inner, low_params, self._inside(ctx, params), after)

    def _renamed(self, rename: Callable[[Any, list[str]], Any], inner: Any, params: Any) -> Any:
        """Return a state with ``rename`` applied to each parameter's value of each slot."""
        names = [[part.name for part in self.projection.parts(p.shape)] for p in tree.leaves(params)]
        return tree.map_values(lambda _, values: [*map(rename, values, names)], inner, params)

    def _inside(self, ctx: Context, params: Any) -> Context:
        """Return the inner transform's context: projections draw the random bits of their matrices' first elements."""
        if not getattr(self.transform, "draws", False):
            return replace(ctx, numbering=None)
        leaves = tree.leaves(params)
        known = Numbering.through(leaves, ctx.first_element) if ctx.numbering is None else ctx.numbering
        numbering: list[Numbering] = []
        for (first, kind), leaf in zip(known, leaves, strict=True):
            parts = self.projection.parts(leaf.shape)
            numbering += [Numbering(first_of_whole(first) + part.start, kind) for part in parts] or [
                Numbering(first, kind)
            ]
        return replace(ctx, numbering=tuple(numbering))


def _evaluated(transform: Transform[Any], low: Any, inner: Any) -> list[Tensor]:
    return tree.leaves(eval_params(transform, low, inner))


def _packed(value: Any, names: list[str]) -> Any:
    """Return a slot's value for one parameter as factors; a factor's name has those of slot and basis."""
    if not names:
        return value
    found: dict[str, Any] = {}
    for name in names:
        own = value[name]
        found |= {f"{name}_{factor}": x for factor, x in own.items()} if isinstance(own, dict) else {name: own}
    return found


def _unpacked(value: Any, names: list[str]) -> Any:
    """The contrary of :func:`_packed`."""
    if not names:
        return value
    return {name: value[name] if name in value else _of_part(value, f"{name}_") for name in names}


def _of_part(value: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {factor.removeprefix(prefix): x for factor, x in value.items() if factor.startswith(prefix)}


def low_rank(
    transform: Transform[Any],
    *,
    rank: int = 128,
    period: int = 200,
    scale: Hyperparameter = 0.25,
    basis: Basis = "singular",
    side: ProjectedSide = "smaller",
    view: MatrixView | None = None,
) -> LowRank:
    """Apply ``transform`` to projected gradients, with state of their size, and project its updates back.

    Args:
        transform: What to apply, without its learning rate: ``scale_by_adam()``, ``scale_by_lion()``, ``trace(0.9)``.
        rank: Of the subspace of each matrix; for this to ``view`` see :class:`~everybit.Projection`, but for the scale.
        period: Updates between two choices of a subspace.
        scale: Factor of projected updates, at least zero.
        basis: ``"singular"``: singular vectors; ``"random"``: random vectors, which are not stored.
        side: The dimension that is projected.
        view: How parameters become matrices; see :func:`everybit.heads`.

    Raises:
        TypeError: ``transform`` is not a transform.
        ValueError: A hyperparameter out of range; a transform that reduces over parameters.

    Examples:
        >>> import everybit as eb
        >>> lion = eb.chain(eb.low_rank(eb.scale_by_lion(), rank=4), eb.scale_by_learning_rate(1e-4))
        >>> with_8_bits = eb.with_policy(lion, "LEAN_8BIT")
    """
    return LowRank(transform, scale, Projection(rank, period, basis, side, view))
