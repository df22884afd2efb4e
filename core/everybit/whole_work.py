"""Transforms of whole tensors for who holds parts of them: their work is done elsewhere, and the rest of a step where the parts are.

A chain of element-wise transforms around such that must see whole tensors, as Muon is, becomes one that may be cut anywhere: it asks
``ctx.joint`` for what these make of the updates that come to them. Who steps parts brings updates together, does the work, and gives each
part its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from everybit import tree
from everybit.context import ALONE, Context
from everybit.contracts import updated
from everybit.joint_work import AtOnce
from everybit.transform import Elementwise, Transform
from everybit.transforms.stateless import Empty

P = TypeVar("P")


@runtime_checkable
class Rounds(Protocol):
    """A transform that rounds updates to a dtype before it does anything else, and whose own are numbers of it, but for a factor."""

    @property
    def rounds_to(self) -> torch.dtype:
        """The dtype."""
        ...

    def without_factor(self) -> tuple[Transform[Any], Transform[Any]]:
        """Return the transform whose updates are numbers of that dtype, and the one that multiplies them: both in turn are this one."""
        ...


@runtime_checkable
class OfRows(Protocol):
    """A transform of whole tensors that can be applied to some rows of an update, from the shape of the whole alone."""

    def of_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Return what becomes of the rows ``first`` and on of an update of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class WholeWork:
    """Transforms one after the other that must see whole tensors; itself no transform.

    Attributes:
        parts: Those that are run on whole tensors, in order.
        of_rows: Those that come after them, and that are run where the rows are.
    """

    parts: tuple[Transform[Any], ...]
    of_rows: tuple[OfRows, ...] = ()

    @classmethod
    def of(cls, transforms: Sequence[Transform[Any]]) -> WholeWork:
        """The work of these transforms; what can be done to rows alone is left to who has them."""
        parts: list[Any] = [
            part for one in transforms for part in (one.without_factor() if isinstance(one, Rounds) else (one,))
        ]
        end = len(parts)
        while end and isinstance(parts[end - 1], OfRows):
            end -= 1
        return cls(tuple(parts[:end]), tuple(parts[end:]))

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an update of this one may be brought to the work, so that no bit of the result changes."""
        return _narrower(self.parts[:1], dtype)

    def returned_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a result of this one may be brought back, so that no bit of it changes."""
        return _narrower(self.parts[-1:], dtype)

    def run(self, update: Tensor, ctx: Context) -> Tensor:
        """Return what the parts make of a whole update, without those that are run on rows."""
        weights = torch.empty_like(update, device="meta")  # of which they promise to look at the shape alone
        updates = [update]
        for part in self.parts:
            updates, _ = updated(part, updates, part.init(updates), [weights], ctx)
        return updates[0]

    def on_rows(self, rows: Tensor, shape: Sequence[int], first: int) -> Tensor:
        """Return what the rest makes of the rows ``first`` and on of a result of this shape."""
        for part in self.of_rows:
            rows = part.of_rows(rows, shape, first)
        return rows


def _narrower(part: Sequence[Transform[Any]], dtype: torch.dtype) -> torch.dtype:
    for one in part:
        if isinstance(one, Rounds) and torch.promote_types(one.rounds_to, dtype) is dtype:
            return one.rounds_to
    return dtype


@dataclass(frozen=True, slots=True)
class Errand:
    """Work that parts of tensors ask for.

    Attributes:
        work: The work.
        ctx: Of the step.
    """

    work: WholeWork
    ctx: Context

    def run(self, update: Tensor) -> Tensor:
        """Return what the work makes of a whole update."""
        return self.work.run(update, self.ctx)

    def __call__(self, batch: Tensor) -> Tensor:
        """Refuse to work on a part, as who knows of no parts would.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"{', '.join(type(part).__name__ for part in self.work.parts)}: got {tuple(batch.shape)}, a part of a tensor; accepted are"
            " whole ones, brought together by who asks for the work."
        )


@dataclass(frozen=True, slots=True)
class OnWholes(Elementwise):
    """Asks for the work of transforms that must see whole tensors, of parts of which it gets updates.

    Where nobody answers, updates pass as they are: in a run for reductions, on which the work has no influence.

    Attributes:
        work: Of these transforms.
    """

    work: WholeWork

    def init(self, params: P) -> Empty:  # noqa: ARG002  # a transform's
        """Return the empty state of a transform without memory."""
        return Empty()

    def update(
        self,
        updates: P,
        state: Empty,
        params: P,  # noqa: ARG002  # a transform's
        ctx: Context = ALONE,
    ) -> tuple[P, Empty]:
        """Return the parts of the results."""
        if ctx.joint is AtOnce:
            return updates, state
        return tree.replace(updates, ctx.joint.results(tree.leaves(updates), Errand(self.work, ctx))), state


def why_not_elsewhere(transform: Transform[Any], shape: Sequence[int]) -> str | None:
    """Why the work of a transform cannot be done elsewhere, for parameters of this shape; None: it can."""
    if tree.leaves(transform.init([torch.empty(tuple(shape), device="meta")])):
        return "it keeps state for whole tensors"
    if transform.reduces:
        return "it reduces over parameters"
    if getattr(transform, "draws", False):
        return "it draws random bits"
    return None if getattr(transform, "reads_weights", True) is False else "it does not say reads_weights = False"
