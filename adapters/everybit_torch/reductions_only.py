"""What stands in for a transform where it has no parameters: its reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import everybit as eb
from everybit.protocol import ALONE, any_draws, any_per_tensor, then

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class ReductionsOnly:
    """Takes part in the reductions of a transform of other parameters, without elements and without an effect.

    A reduction goes over all parameters, so that all of them have to take part in it, in the same order.
    """

    transform: eb.Transform[Any]

    @property
    def cut(self) -> eb.Cut:
        """It may be cut anywhere, since it does not change elements."""
        return "element"

    @property
    def reduces(self) -> bool:
        """Whether the transform makes requests."""
        return self.transform.reduces

    @property
    def draws(self) -> bool:
        """Whether the transform draws random bits. Elements that are not contributed draw them as well."""
        return any_draws([self.transform])

    @property
    def per_tensor(self) -> bool:
        """Whether the transform requests numbers of each parameter."""
        return any_per_tensor([self.transform])

    def init(self, params: P) -> Any:
        """Return the empty state of ``identity``."""
        return eb.identity().init(params)

    def update(self, updates: P, state: Any, params: P, ctx: eb.Context = ALONE) -> tuple[P, Any]:
        """Return the updates unchanged, after taking part in the transform's reductions."""

        def nothing(tree: P) -> P:
            return eb.tree.map(lambda x: x.reshape(-1)[:0], tree)

        none = nothing(params)
        contribution = self.transform.update(nothing(updates), self.transform.init(none), none, ctx)
        return then(contribution, lambda _: (updates, state))
