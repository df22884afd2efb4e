"""Promises of a combinator with one transform: those of its transform."""

from __future__ import annotations

from typing import Any, TypeVar

from everybit.protocol import Cut, SlotDecay, Transform, any_draws, any_per_tensor, decays, eval_params, periods

P = TypeVar("P")


class Wrapping:
    """Base class of combinators of one transform.

    The transform is the field ``transform``, and its state the field ``inner`` of the combinator's state. A combinator that does more than
    its transform overrides these promises.
    """

    __slots__ = ()

    transform: Transform[Any]

    @property
    def cut(self) -> Cut:
        """How finely parameters may be cut: as those of the inner transform."""
        return self.transform.cut

    @property
    def reduces(self) -> bool:
        """Whether the inner transform does."""
        return self.transform.reduces

    @property
    def per_tensor(self) -> bool:
        """Whether the inner transform reduces over each parameter."""
        return any_per_tensor([self.transform])

    @property
    def draws(self) -> bool:
        """Whether the inner transform does."""
        return any_draws([self.transform])

    def decays(self) -> tuple[SlotDecay, ...]:
        """Return the decay rates that the inner transform declares."""
        return decays(self.transform)

    def periods(self) -> tuple[int, ...]:
        """Return the periods that the inner transform declares."""
        return periods(self.transform)

    def eval_params(self, params: P, state: Any) -> P:
        """Return the inner transform's weights for evaluation."""
        return eval_params(self.transform, params, state.inner)
