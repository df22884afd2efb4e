"""Promises of combinators: those of the transforms inside."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from everybit.base import Ranged, tree
from everybit.protocol import (
    Context,
    Cut,
    SlotDecay,
    Transform,
    any_draws,
    any_per_tensor,
    any_reduces,
    coarsest,
    common,
    decays,
    enter,
    eval_params,
    periods,
    require_transform,
)

P = TypeVar("P")
R = TypeVar("R")


class Composed:
    """Base class of combinators, with the promises of all transforms inside; a combinator that does more overrides them."""

    __slots__ = ()

    def parts(self) -> Collection[Transform[Any]]:
        """Return the transforms inside, in order."""
        raise NotImplementedError

    @property
    def cut(self) -> Cut:
        """How finely parameters may be cut: as the coarsest part says."""
        return coarsest(self.parts())

    @property
    def reduces(self) -> bool:
        """Whether a part reduces."""
        return any_reduces(self.parts())

    @property
    def per_tensor(self) -> bool:
        """Whether a part reduces over each parameter."""
        return any_per_tensor(self.parts())

    @property
    def draws(self) -> bool:
        """Whether a part draws random bits."""
        return any_draws(self.parts())

    @property
    def common(self) -> tuple[str, ...]:
        """The numbers of the parts' states that all parameters share."""
        return common(*self.parts())

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the decay rates that the parts declare."""
        return decays(*self.parts())

    def periods(self) -> tuple[int, ...]:
        """Return the periods that the parts declare."""
        return periods(*self.parts())


class Wrapping(Composed, Ranged):
    """Base class of combinators of one transform: the field ``transform``, and its state the field ``inner`` of the combinator's state."""

    __slots__ = ()

    name: ClassVar[str]
    """What messages call it."""
    transform: Transform[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        require_transform(self.transform, who=self.name)
        Ranged.__post_init__(self)

    def parts(self) -> tuple[Transform[Any]]:
        """Return the transform."""
        return (self.transform,)

    def eval_params(self, params: P, state: Any) -> P:
        """Return the inner transform's weights for evaluation."""
        return eval_params(self.transform, params, state.inner)


def gated(
    holds: Tensor,
    transform: Transform[Any],
    updates: P,
    inner: Any,
    params: P,
    ctx: Context,
    after: Callable[[P, Any], R],
    otherwise: P | None = None,
) -> R:
    """Go on with an update that counts only if ``holds``; else the inner state stays, and updates are ``otherwise``, or minus zero.

    Added to minus zero, a weight of minus zero keeps its sign. The choice is made on the device: the update is computed in any case.
    """

    def kept(moves: P, new: Any) -> R:
        state = tree.where(holds, new, inner)
        if otherwise is not None:
            return after(tree.where(holds, moves, otherwise), state)
        return after(tree.map(lambda move: torch.where(holds, move, -0.0), moves), state)

    return enter(transform, updates, inner, params, ctx, kept)
