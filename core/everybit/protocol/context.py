"""The inputs of a step beyond gradients, state and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from everybit.base import FirstElement, Key, Numbering, require_count, require_step, stream, tree, without_gaps
from everybit.protocol.per_tensor import PerTensor
from everybit.protocol.requests import Pending, Request, then

P = TypeVar("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A")

_PER_TENSOR = PerTensor()

ONCE = 1 << 62
"""A period that only the first update begins."""


Due = tuple[tuple[int, bool], ...]
"""For some periods whether their work is due; of the others the device decides."""


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of a step beyond gradients, state and parameters.

    Attributes:
        value: The loss, 0-d, for transforms that use it.
        step: Number of this update, 1 at the first; int64, 0-d. Filled in by what counts steps: ``chain``, ``accumulate``,
            ``apply_if_finite``, the optimizer.
        first_element: Global index of the first element of the tree, for shards and flat buffers: random bits are drawn by global index,
            so that a shard draws the same bits as the whole model. Of a buffer with gaps between parameters its :class:`Blocks`.
        seed: Of random draws. An optimizer fills in its own.
        due: For each period (of :meth:`every`) that the host has decided on, whether its work is due at this step; see
            :meth:`everybit.Optimizer.due`. Other periods are decided on the device.
        updates: Number of this update as periodic work and random bits count it: ``step``, unless a combinator inside decides on the
            device which steps count.
        numbering: The indices of each leaf's elements, for random draws. Filled in by the optimizer, of a transform that says that it
            draws; None: through all leaves, in order.
        path: Position of the transform in the chains around it, by which equal transforms draw different bits.
        pending: Whether this tree is one segment of a larger step. Requests are then handed to the driver as :class:`everybit.Pending`
            instead of being met here.
    """

    value: Tensor | None = None
    step: Tensor | None = None
    first_element: FirstElement = 0
    seed: int | Tensor = 0
    due: Due = ()
    updates: Tensor | None = None
    numbering: tuple[Numbering, ...] | None = None
    path: tuple[int, ...] = ()
    pending: bool = False

    @property
    def per_tensor(self) -> PerTensor:
        """Requests for numbers of each whole parameter, for transforms with ``per_tensor = True``."""
        return _PER_TENSOR

    def request(self, request: Request[A], resume: Callable[[A], T]) -> T:
        """Return ``resume(total)``, with the total of a request over all elements that share the step.

        A driver that steps pieces or shards gets :class:`everybit.Pending` in the place of the result.

        Args:
            request: :class:`everybit.Sum`, :class:`everybit.Max`, :class:`everybit.SumOfSquares`, or a result of a method of
                :attr:`per_tensor`.
            resume: The rest of the update. All processes make the same requests, in the same order.

        Examples:
            >>> import torch, everybit as eb
            >>> def normalized(updates, ctx):
            ...     return ctx.request(eb.SumOfSquares(updates), lambda square: eb.tree.map(lambda u: u / square.sqrt(), updates))
            >>> normalized(torch.tensor([3.0, 4.0]), eb.Context())
            tensor([0.6000, 0.8000])
        """
        if not self.pending:
            return resume(request.here())
        waiting: Any = Pending(request, self.owned, lambda total: resume(request.answer(total)))
        return waiting  # type: ignore[no-any-return]

    def owned(self, values: P) -> P:
        """Return a tree with zeros in the place of padding, which contributes to no request."""
        return without_gaps(self.first_element, values) if self.pending else values

    def at(self, step: Tensor) -> Context:
        """Return this context with ``step`` filled in; for those that count every step."""
        return replace(self, step=step, updates=step if self.updates is None else self.updates)

    def counted(self, step: Tensor) -> Context:
        """Return this context with ``step`` filled in; for those that decide on the device which steps count, which no host knows."""
        return replace(self, step=step, updates=step, due=())

    def inside(self, position: int) -> Context:
        """Return the context of the transform at this position of a chain."""
        return replace(self, path=(*self.path, position))

    def of(self, chosen: Sequence[bool]) -> Context:
        """Return the context of some of the leaves, for combinators that leave the others out."""
        if not self.numbering:
            return self
        return replace(self, numbering=tuple(one for one, keep in zip(self.numbering, chosen, strict=True) if keep))

    def keys(self, name: str, like: P) -> P:
        """Return keys that name the random bits of each leaf of a tree: ``key.bits(leaf)`` and ``key.bits16(leaf)`` draw them.

        The bits of an element depend on the optimizer's seed, the number of the update, ``name``, the transform's position in its chain and
        the element's index in the model only: not on layout, sharding or resumption. They are independent of those by which
        formats round. The same name gives the same bits again.

        Args:
            name: Tells apart the draws of one transform.
            like: A tree of the parameters' structure and shapes.

        Returns:
            A tree of the same structure, with an :class:`everybit.Key` for each leaf.

        Raises:
            TypeError: The transform does not say that it draws (``draws = True``).
            ValueError: Steps are not counted, or the tree is not that of the parameters.
        """
        updates = require_step(self.step if self.updates is None else self.updates, "ctx.keys")
        leaves = tree.leaves(like)
        if self.numbering == () and leaves:
            raise TypeError(undeclared("ctx.keys", "draws"))
        numbering = Numbering.through(leaves, self.first_element) if self.numbering is None else self.numbering
        if len(numbering) != len(leaves):
            raise ValueError(
                f"ctx.keys: got {len(leaves)} tensors; accepted is a tree of the {len(numbering)} parameters' structure. A combinator that"
                " leaves some out passes ctx.of(chosen) on."
            )
        # No slot and no part of a parameter has a name with a colon in front.
        place = ".".join(map(str, self.path))
        streams = {kind: stream(f":{place}:{name}:{kind}") for kind in dict.fromkeys(one.kind for one in numbering)}
        found: Any = [Key(self.seed, updates, streams[one.kind], one.first) for one in numbering]
        return tree.replace(like, found)

    def every(self, period: int, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return ``work()`` at the first update and every ``period`` updates after it, and ``otherwise()`` at the others.

        If the host has decided (:attr:`due`), only one branch is called. Otherwise both are, and the device chooses, with the same bits
        and without a wait: inside of ``accumulate`` and ``apply_if_finite``, whose counts are on the device, and in code that is compiled
        without a decision.

        Args:
            period: At least 1. A transform lists its periods in a method: ``def periods(self): return (self.period,)``.
            work: Returns a tree of tensors.
            otherwise: Returns a tree of the same structure, shapes and dtypes.

        Raises:
            ValueError: A period below 1, or steps that are not counted.
        """
        require_count("period", period, "a whole number of updates")
        for known, due in self.due:
            if known == period:
                return work() if due else otherwise()
        if period == 1:
            return work()
        updates = require_step(self.step if self.updates is None else self.updates, "ctx.every")
        is_due = (updates - 1) % period == 0

        def chosen(done: T) -> T:
            found: T = then(otherwise(), lambda kept: tree.where(is_due, done, kept))
            return found

        return then(work(), chosen)


ALONE = Context()
"""The context of a single process that knows nothing but the gradients."""


def undeclared(what: str, promise: str) -> str:
    """The message of an error about something that is for transforms with a promise."""
    return (
        f"{what}: asked by a transform that does not say so, on whose word parameters were cut; accepted is a transform, and"
        f" combinators around it, with {promise}: ClassVar[bool] = True."
    )


def enter(transform: Any, updates: P, state: S, params: P, ctx: Context, after: Callable[[P, S], R]) -> R:
    """Call ``transform.update``, and go on with ``after(updates, state)``, now or when its requests are met.

    Combinators and optimizers call every transform by this function.

    Raises:
        TypeError: The update returned something else than a pair of updates and a state of the same class.
    """

    def checked(returned: Any) -> R:
        _require_pair(transform, returned, state)
        return after(*returned)

    returned: Any = transform.update(updates, state, params, ctx)
    return then(returned, checked) if isinstance(returned, Pending) else checked(returned)


def _require_pair(transform: Any, returned: Any, state: S) -> None:
    if type(returned) is not tuple or len(returned) != 2:
        raise TypeError(
            f"{type(transform).__name__}.update returned a {type(returned).__name__}; accepted is a pair: return updates, state."
        )
    if type(returned[1]) is not type(state):
        raise TypeError(
            f"{type(transform).__name__}.update returned a {type(returned[1]).__name__} as its state; accepted is what init returned, a"
            f" {type(state).__name__}: return updates, {type(state).__name__}(...)."
        )


def in_turn(
    parts: Sequence[Any],
    updates: P,
    states: Sequence[Any],
    params: P,
    ctx: Context,
    after: Callable[[P, tuple[Any, ...]], R],
    done: tuple[Any, ...] = (),
) -> R:
    """Apply the transforms from number ``len(done)`` on, and go on with the updates of the last and the new states."""
    at = len(done)
    if at == len(parts):
        return after(updates, done)

    # A closure that refers to itself would keep its tensors until Python's collector comes.
    def further(updates: P, new: Any) -> R:
        return in_turn(parts, updates, states, params, ctx, after, (*done, new))

    return enter(parts[at], updates, states[at], params, ctx.inside(at), further)
