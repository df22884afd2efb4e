"""The one protocol that every optimizer is built from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from everybit.scalars import Hyperparameter

P = TypeVar("P")
S = TypeVar("S")

Scope = Literal["element", "tensor", "tree"]
_BY_STRICTNESS: tuple[Scope, ...] = ("tree", "tensor", "element")


class Axis(Protocol):
    """Reductions over everything that shares one optimizer step: one process, or all shards of a model."""

    def sum(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over the axis; same shape and dtype."""
        ...

    def max(self, value: Tensor) -> Tensor:
        """The greatest ``value`` over the axis, element by element."""
        ...

    def owned(self, tree: P) -> P:
        """``tree`` with every element that another process counts, or that is padding, set to zero."""
        ...


class Local:
    """The axis of a single process: what is here is all there is.

    The class itself is the axis, there are no instances: compilers trace a default that is a class, not one that is an object.
    """

    @staticmethod
    def sum(value: Tensor) -> Tensor:
        """``value``."""
        return value

    @staticmethod
    def max(value: Tensor) -> Tensor:
        """``value``."""
        return value

    @staticmethod
    def owned(tree: P) -> P:
        """``tree``."""
        return tree


@dataclass(frozen=True, slots=True)
class Context:
    """What a step knows beyond gradients, state and parameters.

    Attributes:
        axis: Reductions over all that shares this step.
        value: The loss, 0-d, for transforms that look at it.
        step: Number of this update, 1 at the first; int64, 0-d. Filled in by whoever counts: ``chain``, ``accumulate``,
            ``apply_if_finite``, the optimizer.
        first_element: Global index of the first element of the tree, for shards and flat buffers: stochastic rounding draws
            its bits by global index, so that a shard rounds as the whole would.
    """

    axis: Axis = Local
    value: Tensor | None = None
    step: Tensor | None = None
    first_element: int | Tensor = 0

    def at(self, step: Tensor) -> Context:
        """This context at ``step``."""
        return replace(self, step=step)


ALONE = Context()
"""One process, nothing known but the gradients."""


class Transform(Protocol[S]):
    """A pure map from gradients to updates that threads its own state.

    ``init`` and ``update`` mutate nothing, draw no hidden random numbers and never wait for the device: ``torch.func`` differentiates
    and batches them, ``torch.compile(fullgraph=True)`` traces them. Mathematics happens in the dtype that comes in; a policy sees to
    it that this is float32 or better. Updates are *added* to the parameters.

    ``scope`` promises how much ``update`` must see at once: single elements (any flat slice of memory will do), whole tensors with
    their shapes, or the whole tree (reduced through ``ctx.axis``).
    """

    @property
    def scope(self) -> Scope:
        """How much ``update`` must see at once."""
        ...

    def init(self, params: P) -> S:
        """The state before the first update, for parameters of these shapes, dtypes and devices."""
        ...

    def update(self, updates: P, state: S, params: P, ctx: Context = ALONE) -> tuple[P, S]:
        """New updates and new state. Trees in and out have one structure."""
        ...


@runtime_checkable
class HasSecondMoments(Protocol):
    """A transform some of whose slots are running means of squares.

    A policy asks, because those are the slots that break when their format is too coarse: a decay of ``1 - beta`` smaller than half
    a unit in the last place is rounded away, and the mean never falls.
    """

    def second_moments(self) -> dict[str, Hyperparameter]:
        """Slot name -> decay rate (``beta2``)."""
        ...


def second_moments(transform: object) -> dict[str, Hyperparameter]:
    """The running squares of a transform and of those inside it."""
    return transform.second_moments() if isinstance(transform, HasSecondMoments) else {}


def strictest(transforms: tuple[Transform[Any], ...]) -> Scope:
    """The scope of several transforms applied together."""
    scopes = [transform.scope for transform in transforms]
    for scope in _BY_STRICTNESS:
        if scope in scopes:
            return scope
    return "element"


def require_transform(value: object, *, who: str) -> None:
    """Refuse what is not a transform, an optimizer made by ``with_policy`` above all.

    Raises:
        TypeError: The message names ``who``, what it got and what it accepts.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{who}: got the class {value.__name__}; accepted are transforms: call it, {value.__name__}(...)."
        )
    missing = [name for name in ("scope", "init", "update") if not hasattr(value, name)]
    if missing:
        hint = (
            " An Optimizer is the last word: build it around the whole chain, with_policy(chain(...), policy)."
            if hasattr(value, "step")
            else ""
        )
        raise TypeError(f"{who}: got {value!r}, which has no {', '.join(missing)}; accepted are transforms.{hint}")
