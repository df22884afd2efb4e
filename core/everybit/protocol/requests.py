"""Requests of a step for numbers that need more than the elements at hand: a result, or a pending one.

A transform that needs the norm of all gradients, or the norm of each parameter, requests it and says how its update goes on::

    return ctx.request(eb.SumOfSquares(updates), clipped)

Where all elements of the step are in one process the request is met at once, and ``update`` returns its pair. Where a driver steps pieces
or shards, ``update`` returns :class:`Pending`: the request, and a function of its total. The driver adds up the partial
results of all pieces and ranks. It may call ``update`` anew for each piece then, so that no memory is held between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from everybit.base import tree

A = TypeVar("A")
R = TypeVar("R")

Kind = Literal["sum", "max"]

Owned = Callable[[Any], Any]
"""Sets elements to zero that another process contributes, and padding."""


class Axis(Protocol):
    """Reductions over everything that shares one optimizer step: one process, or all shards of a model."""

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the axis; same shape and dtype."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """Return the maximum of ``value`` over the axis, element by element."""
        ...


class Local:
    """The axis of a single process, over which a reduction returns its argument.

    The class itself is the axis, without instances: compilers trace a default that is a class, and not a default that is an object.
    """

    @staticmethod
    def sum(value: Tensor) -> Tensor:
        """Return ``value``: there is no other process."""
        return value

    @staticmethod
    def max(value: Tensor) -> Tensor:
        """Return ``value``: there is no other process."""
        return value


class Request(Generic[A]):
    """Base class of requests: reductions over all elements that share a step.

    Subclasses define ``kind``, :meth:`here`, :meth:`partial`, and :meth:`answer` if the result is not the total.

    Attributes:
        kind: ``"sum"`` or ``"max"``.
        each: Whether it is for a number of each leaf: slices of one parameter share it, and other parameters do not.
    """

    kind: Kind = "sum"
    each: ClassVar[bool] = False

    def here(self) -> A:
        """Return the result where all elements of the step are present."""
        raise NotImplementedError

    def partial(self, owned: Owned) -> Tensor:
        """Return the contribution of the elements at hand, of any shape; contributions are summed, or their greatest is taken."""
        raise NotImplementedError

    def answer(self, total: Any) -> A:
        """Return the result, given the total over all pieces and ranks."""
        found: A = total
        return found


@dataclass(frozen=True)
class Sum(Request[Tensor]):
    """The sum of a tensor over all pieces and ranks, element by element.

    Args:
        value: Any shape. Computed from ``ctx.owned(...)``, so that each element of the model contributes once.
    """

    value: Tensor
    kind: Kind = field(default="sum", init=False, repr=False)

    def here(self) -> Tensor:
        """Return the value."""
        return self.value

    def partial(self, owned: Owned) -> Tensor:  # noqa: ARG002  # its author has applied it
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class Max(Request[Tensor]):
    """The greatest value of a tensor over all pieces and ranks, element by element.

    Args:
        value: Any shape.
    """

    value: Tensor
    kind: Kind = field(default="max", init=False, repr=False)

    def here(self) -> Tensor:
        """Return the value."""
        return self.value

    def partial(self, owned: Owned) -> Tensor:  # noqa: ARG002  # an element that counts twice changes no maximum
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class SumOfSquares(Request[Tensor]):
    """The sum of the squares of all elements of a tree: float64, 0-d.

    Args:
        values: A tree of the parameters' structure and shapes.
    """

    values: Any
    kind: Kind = field(default="sum", init=False, repr=False)

    def here(self) -> Tensor:
        """Return the sum over the tree."""
        return tree.sum_of_squares(self.values)

    def partial(self, owned: Owned) -> Tensor:
        """Return the sum over the elements at hand."""
        return tree.sum_of_squares(owned(self.values))


@dataclass(frozen=True)
class Pending:
    """A step that waits for the total of a request.

    Attributes:
        request: The request.
        owned: Applied to the elements that contribute to it.
        resume: A function of the total to the result or the next :class:`Pending`. It changes no argument, and may be called again.
    """

    request: Request[Any]
    owned: Owned
    resume: Callable[[Any], Any]

    @property
    def kind(self) -> Kind:
        """``"sum"`` or ``"max"``."""
        return self.request.kind

    def partial(self) -> Tensor:
        """Return the contribution of the elements at hand."""
        return self.request.partial(self.owned)


def then(result: Any, after: Callable[[Any], R]) -> R:
    """Return ``after(result)``, or a pending step that does so once its requests are met. For combinators.

    The type is that of the result: only a driver that passes ``Context(pending=True)`` sees :class:`Pending`.
    """
    if isinstance(result, Pending):
        resume = result.resume
        waiting: Any = replace(result, resume=lambda total: then(resume(total), after))
        return waiting  # type: ignore[no-any-return]
    return after(result)


def advance(result: Any, totals: Sequence[Tensor], *, holds_wholes: bool = False) -> Any:
    """Resume a step with the totals of its first requests, in order.

    Args:
        result: What ``step`` or ``update`` returned under ``Context(pending=True)``.
        totals: The totals.
        holds_wholes: Whether each leaf is a whole parameter, so that requests for numbers of each are met here, and have no total.

    Returns:
        The result, or the step that waits for the next request.
    """
    given = iter(totals)
    while isinstance(result, Pending):
        total = result.partial() if holds_wholes and result.request.each else next(given, None)
        if total is None:
            break
        result = result.resume(total)
    return result


def fulfil(result: Any, axis: Axis) -> Any:
    """Meet all requests of a step by reductions over an axis, and return its result. Collective.

    Args:
        result: What ``step`` or ``update`` returned under ``Context(pending=True)``.
        axis: Sums and maxima over all processes.

    Examples:
        >>> import torch, everybit as eb
        >>> clip, grads = eb.clip_by_global_norm(1.0), torch.tensor([3.0, 4.0])
        >>> pending = clip.update(grads, clip.init(grads), grads, eb.Context(pending=True))
        >>> eb.fulfil(pending, eb.Local)[0]
        tensor([0.6000, 0.8000])
    """
    while isinstance(result, Pending):
        partial = result.partial()
        result = result.resume(axis.sum(partial) if result.kind == "sum" else axis.max(partial))
    return result


def require_done(result: Any, who: object) -> Any:
    """Return a result, and refuse a step that still waits.

    Raises:
        RuntimeError: More requests than totals were given for.
    """
    if isinstance(result, Pending):
        raise RuntimeError(
            f"{who}: waits for {type(result.request).__name__}, of which no total is given; accepted is a transform with the same requests"
            " whenever its update is called with the same inputs."
        )
    return result
