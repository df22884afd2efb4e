"""An axis for two-phase reductions: a transform is run until it asks for a total that is not known yet, and run again with the total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from torch import Tensor

from everybit.blocks import FirstElement, without_gaps
from everybit.tree import zeros_like

P = TypeVar("P")
Kind = Literal["sum", "max"]


class Pending(NamedTuple):
    """A reduction that a transform asks for, and whose total is not known yet.

    Attributes:
        kind: ``"sum"`` or ``"max"``.
        value: The partial result of the elements on which the transform was run.
    """

    kind: Kind
    value: Tensor


class NeedsReductionError(Exception):
    """A transform asked for a reduction whose total is not known yet: the pending reduction.

    Args:
        kind: ``"sum"`` or ``"max"``.
        value: The partial result of the elements on which the transform was run.
    """

    def __init__(self, kind: Kind, value: Tensor) -> None:
        super().__init__(kind)
        self.kind: Kind = kind
        self.value = value


class ReplayAxis:
    """An axis that answers a transform's reductions, in order, with totals that were found before.

    Args:
        totals: The totals that are known.
        counted: Whether this process contributes the elements on which the transform is run.
        first: Their indices; those of a buffer with gaps tell what is padding.
    """

    def __init__(self, totals: Sequence[Tensor], *, counted: bool = True, first: FirstElement = 0) -> None:
        self._totals, self._counted, self._first = totals, counted, first
        self._answered = 0

    def sum(self, value: Tensor) -> Tensor:
        """Return the total if it is known; else raise :class:`NeedsReductionError`."""
        return self._answer("sum", value)

    def max(self, value: Tensor) -> Tensor:
        """Return the maximum if it is known; else raise :class:`NeedsReductionError`."""
        return self._answer("max", value)

    def owned(self, tree: P) -> P:
        """Return ``tree`` with zeros in gaps, or zeros if another process contributes these elements."""
        return without_gaps(self._first, tree) if self._counted else zeros_like(tree)

    def known(self) -> Tensor | None:
        """Return the next total, which then counts as asked for; None if it is not known. No partial result has to be computed then."""
        if self._answered == len(self._totals):
            return None
        self._answered += 1
        return self._totals[self._answered - 1]

    def _answer(self, kind: Kind, value: Tensor) -> Tensor:
        total = ReplayAxis.known(self)
        return self._pending(kind, value) if total is None else total

    def _pending(self, kind: Kind, value: Tensor) -> Tensor:
        raise NeedsReductionError(kind, value)


class RecordingAxis(ReplayAxis):
    """A replay axis that notes the pending reduction and lets the transform run to its end, for compiled code.

    What the transform computes after the pending reduction is computed from a wrong answer. Nobody uses it, so a compiler leaves it out.

    Attributes:
        pending: The first reduction whose total is not known; None if there is none.
    """

    def __init__(self, totals: Sequence[Tensor], *, counted: bool = True, first: FirstElement = 0) -> None:
        super().__init__(totals, counted=counted, first=first)
        self.pending: Pending | None = None

    def _pending(self, kind: Kind, value: Tensor) -> Tensor:
        if self.pending is None:
            self.pending = Pending(kind, value)
        return value
