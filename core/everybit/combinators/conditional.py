"""Updates only while a condition holds, and parameters that are frozen for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from everybit.base import Scalar, require, require_step, tree
from everybit.combinators.chain import zero_step
from everybit.combinators.masked import Partition, PartitionState
from everybit.combinators.wrapping import Wrapping, gated
from everybit.protocol import ALONE, Context, Transform, then

P = TypeVar("P")

Condition = Scalar | Callable[[Tensor], Tensor]
"""A number or a 0-d tensor, which holds unless it is zero; or a function from the number of updates done before this one (0 at the first)
to a 0-d tensor, of bools or numbers."""

Judge = Callable[[Any, Context], Tensor]
"""A function from the updates that come in and the context to a 0-d tensor, which is the same on all shards."""

Otherwise = Literal["zero", "pass"]
"""The updates where a condition does not hold: zero, or those that came in."""


@tree.state
class ConditionallyState:
    """``step`` counts the updates made while the condition held (int64, 0-d)."""

    step: Tensor
    inner: Any


@tree.state
class FreezableState:
    """``frozen``, a 0-d bool, says whether updates are zero; ``step`` counts the updates made (int64, 0-d)."""

    frozen: Tensor
    step: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class Conditionally(Wrapping):
    """A transform that runs while a condition holds; made by :func:`conditionally`."""

    transform: Transform[Any]
    when: Condition = 1.0
    judge: Judge | None = None
    otherwise: Otherwise = "zero"

    def __post_init__(self) -> None:
        Wrapping.__post_init__(self)
        if not isinstance(self.when, Tensor) or self.when.dtype is not torch.bool or self.when.ndim:
            require("when", float(self.when) if isinstance(self.when, bool) else self.when)

    @property
    def reduces(self) -> bool:
        """Whether the inner transform reduces, or the condition depends on the updates, so that all shards have to agree on it."""
        return self.judge is not None or self.transform.reduces

    def init(self, params: P) -> ConditionallyState:
        """Return the inner transform's state, and a count of zero."""
        return ConditionallyState(zero_step(params), self.transform.init(params))

    def update(
        self, updates: P, state: ConditionallyState, params: P, ctx: Context = ALONE
    ) -> tuple[P, ConditionallyState]:
        """Return the inner update, or zeros or the input where the condition does not hold."""
        found: Any = self.when
        if callable(found):
            found = found(require_step(ctx.step, "conditionally") - 1)
        when = _truth(found, "when", state.step)

        def judged(found: object) -> tuple[P, ConditionallyState]:
            holds = when if found is None else when & _truth(found, "judge", state.step)

            def after(moves: P, inner: Any) -> tuple[P, ConditionallyState]:
                return moves, ConditionallyState(state.step + holds, inner)

            passed = updates if self.otherwise == "pass" else None
            counted = ctx.counted(state.step + 1)
            return gated(holds, self.transform, updates, state.inner, params, counted, after, passed)

        return then(None if self.judge is None else self.judge(updates, ctx), judged)


@dataclass(frozen=True, slots=True)
class Freezable(Wrapping):
    """A transform of parameters that can be frozen; made by :func:`freezable`."""

    transform: Transform[Any]
    frozen: bool = False

    def init(self, params: P) -> FreezableState:
        """Return the inner transform's state, a count of zero, and whether the parameters are frozen from the start."""
        step = zero_step(params)
        return FreezableState(torch.full_like(step, self.frozen, dtype=torch.bool), step, self.transform.init(params))

    def update(self, updates: P, state: FreezableState, params: P, ctx: Context = ALONE) -> tuple[P, FreezableState]:
        """Return the inner update, or zeros while frozen."""
        moving = ~state.frozen

        def after(moves: P, inner: Any) -> tuple[P, FreezableState]:
            return moves, FreezableState(state.frozen.clone(), state.step + moving, inner)

        return gated(moving, self.transform, updates, state.inner, params, ctx.counted(state.step + 1), after)


def conditionally(
    transform: Transform[Any],
    when: Condition | None = None,
    *,
    judge: Judge | None = None,
    otherwise: Otherwise = "zero",
) -> Conditionally:
    """Run ``transform`` at the updates at which a condition holds; at the others its state stays as it is, its count of steps too.

    The condition is decided on the device, and the host never waits: the inner update is computed each time, and kept where it counts.

    Args:
        transform: What runs.
        when: A function from the number of updates done before this update (0 at the first) to a 0-d tensor, such as
            ``lambda done: done >= 100``; or a number or a 0-d tensor, which holds unless it is zero. A number or tensor is a
            hyperparameter: :func:`everybit.inject_hyperparameters` keeps it in the state under the name ``"when"``, and if it is an
            argument that a ``TorchOptimizer`` was given for its factory, it is switched in the param groups.
        judge: A function from the updates that come in and the :class:`everybit.Context` to a 0-d tensor. It has to be the same on all
            shards, so that sums are requested:
            ``lambda updates, ctx: ctx.request(eb.SumOfSquares(updates), lambda square: square < 1)``. If ``when`` is given, too, both
            have to hold.
        otherwise: The updates where the condition does not hold. ``"zero"``: zeros (optax's ``conditionally_mask``). ``"pass"``:
            the updates that came in (optax's ``conditionally_transform``).

    Raises:
        TypeError: ``transform`` is not a transform, neither ``when`` nor ``judge`` is given, or they do not return a 0-d tensor.
        ValueError: ``otherwise`` is not among these names; a function of steps where steps are not counted.

    Examples:
        >>> import torch, everybit as eb
        >>> every_second = eb.conditionally(eb.sgd(1.0), lambda done: done % 2 == 0)
        >>> opt = eb.with_policy(every_second, eb.policies.FP32)
        >>> params, state = torch.zeros(1), opt.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     params, state = opt.step(params, torch.ones(1), state)
        ...     print(params.item(), int(eb.tree.get(state, "inner.step")))
        -1.0 1
        -1.0 1
        -2.0 2
    """
    if when is None and judge is None:
        raise TypeError(
            "conditionally: give when=, a 0-d tensor or a function of the number of updates done, judge=, a function of (updates, ctx),"
            " or both."
        )
    return Conditionally(transform, 1.0 if when is None else when, judge, otherwise)


def freezable(
    transforms: Mapping[str, Transform[Any]],
    labels: Callable[[str, Tensor], str] | object,
    *,
    frozen: tuple[str, ...] = (),
) -> Partition:
    """As :func:`everybit.partition`, and the parameters of each label can be frozen and unfrozen in the middle of a run.

    :func:`freeze` and :func:`unfreeze` take the optimizer's state and return another state, without a recompilation. While parameters are
    frozen they keep their bits, are not decayed, and keep their state, as parameters without a gradient do in torch; their updates are
    not counted, so that bias corrections and schedules go on where they were. All others get the bits that they get in any case. Gradients
    of frozen parameters still count in norms over everything that come before: give zeros in their place.

    Args:
        transforms: A whole optimizer for each label, since parameters must not be moved after it.
        labels: As for :func:`everybit.partition`; :func:`everybit.by_name` makes them from names.
        frozen: Labels that are frozen from the start.

    Raises:
        TypeError: A value that is no transform.
        ValueError: A name in ``frozen`` that is no label.

    Examples:
        >>> import torch, everybit as eb
        >>> tx = eb.freezable({"body": eb.adamw(0.1), "head": eb.adamw(0.1)}, {"w": "body", "out": "head"}, frozen=("body",))
        >>> opt = eb.with_policy(tx, eb.policies.FP32)
        >>> params = {"w": torch.ones(1), "out": torch.ones(1)}
        >>> state = opt.init(params)
        >>> params, state = opt.step(params, params, state)
        >>> params, state = opt.step(params, params, eb.unfreeze(state, "body"))
        >>> {name: round(value.item(), 2) for name, value in params.items()}
        {'w': 0.9, 'out': 0.8}
    """
    unknown = [name for name in frozen if name not in transforms]
    if unknown or isinstance(frozen, str):
        raise ValueError(
            f"frozen: got {frozen!r}; accepted are labels, of {', '.join(map(repr, transforms))}, in a tuple."
        )
    return Partition({name: Freezable(part, name in frozen) for name, part in transforms.items()}, labels)


def freeze(state: P, *labels: str) -> P:
    """Return a state in which the parameters of these labels are frozen; see :func:`freezable`.

    Args:
        state: The state of an optimizer or a transform with :func:`freezable` inside.
        *labels: The labels; all if no label is given.

    Raises:
        ValueError: The state has no label of that name; the message lists those that it has.
    """
    return _set_frozen(state, labels, True)


def unfreeze(state: P, *labels: str) -> P:
    """Return a state in which the parameters of these labels are updated again; see :func:`freezable` and :func:`freeze`."""
    return _set_frozen(state, labels, False)


def _set_frozen(state: P, labels: tuple[str, ...], value: bool) -> P:
    partitions = {
        place: node for place, node in {"": state, **tree.places(state)}.items() if isinstance(node, PartitionState)
    }
    found = [
        (label, f"{place}.by_label[{label!r}].frozen".lstrip("."), inner.frozen)
        for place, node in partitions.items()
        for label, inner in node.by_label.items()
        if isinstance(inner, FreezableState)
    ]
    known = [label for label, _, _ in found]
    unknown = [label for label in labels if label not in known]
    if unknown or not known:
        raise ValueError(
            f"labels: got {', '.join(map(repr, unknown)) or 'none'}; accepted are those of freezable(...) in this state:"
            f" {', '.join(map(repr, known)) or 'there are none'}."
        )
    for label, place, frozen in found:
        if not labels or label in labels:
            state = tree.set(state, place, torch.full_like(frozen, value))
    return state


def _truth(value: object, name: str, like: Tensor) -> Tensor:
    """A 0-d bool, where the counters are."""
    if isinstance(value, (bool, int, float)):
        return torch.full_like(like, value, dtype=torch.float64) != 0
    if not isinstance(value, Tensor) or value.ndim:
        raise TypeError(f"conditionally, {name}: gave {value!r}; accepted is a 0-d tensor, of bools or numbers.")
    return value.to(like.device, non_blocking=True) != 0
