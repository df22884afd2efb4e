"""What a transform asks of its axis, answered over everything that is stepped: piece by piece, without a tree of all parameters.

A transform that reduces works element by element (or tensor by tensor) but for what it asks of ``ctx.axis``. So it is run on every part
until it asks, the answers are added up, and it is run again with the total: as often as it asks. No part needs to see another. While it
is run for what it asks, nothing is decoded but what the answer is computed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import everybit as eb
from everybit.hyperparameters import hyperparameters
from everybit.parts import needs_whole_tensors
from everybit_torch.units import Unit, map_state

P = TypeVar("P")

# Elements of which a contribution is computed at a time: the temporaries are those of a few operations, and there are few calls.
PIECE = 1 << 20
DEVICE_PIECE = 1 << 24

WEIGHTS = "params"
"""What an answer is computed from beside slots, by name: the weights."""


class UnansweredError(Exception):
    """A transform asked for a reduction that is not known yet.

    Args:
        kind: ``"sum"`` or ``"max"``.
        value: What the part that was looked at contributes.
    """

    def __init__(self, kind: Literal["sum", "max"], value: Tensor) -> None:
        super().__init__(kind)
        self.kind, self.value = kind, value


class Replay:
    """An axis that answers a transform's reductions, in order, with totals that were found before."""

    def __init__(self, totals: Sequence[Tensor], *, counted: bool = True) -> None:
        self._totals, self._counted = totals, counted
        self._asked = 0

    def sum(self, value: Tensor) -> Tensor:
        """The total, if it is known."""
        return self._answer("sum", value)

    def max(self, value: Tensor) -> Tensor:
        """The greatest, if it is known."""
        return self._answer("max", value)

    def owned(self, tree: P) -> P:
        """``tree``; zeros, if another process counts this part."""
        return tree if self._counted else eb.tree.zeros_like(tree)

    def _answer(self, kind: Literal["sum", "max"], value: Tensor) -> Tensor:
        if self._asked == len(self._totals):
            raise UnansweredError(kind, value)
        self._asked += 1
        return self._totals[self._asked - 1]


class Part(NamedTuple):
    """A unit of one tensor that takes part in reductions.

    Attributes:
        optimizer: Its own.
        unit: The unit.
        grad: In the shape of its tensor; None if it only takes part in asking.
        counted: Whether this process is the one that counts it.
    """

    optimizer: eb.Optimizer[Any]
    unit: Unit
    grad: Tensor | None
    counted: bool = True


class Reads:
    """From which slots, and whether from the weights, a transform computes what it asks next; found out once for each optimizer.

    Found by running it on tensors without elements, and following which tensors are computed from which.
    """

    def __init__(self) -> None:
        self._known: list[tuple[eb.Optimizer[Any], int, frozenset[str]]] = []

    def of(self, optimizer: eb.Optimizer[Any], unit: Unit, totals: Sequence[Tensor]) -> frozenset[str]:
        """The names, for the reduction after those that ``totals`` answer."""
        for known, asked, names in self._known:
            if known is optimizer and asked == len(totals):
                return names
        names = self._find(optimizer, _without_elements(unit), totals)
        # Optimizers are made anew when hyperparameters change; the present ones stay.
        self._known = [*self._known[-15:], (optimizer, len(totals), names)]
        return names

    @staticmethod
    def _find(optimizer: eb.Optimizer[Any], empty: Unit, totals: Sequence[Tensor]) -> frozenset[str]:
        params, state = optimizer.decode(empty.tensors, empty.state)
        grads = [torch.empty_like(x) for x in params]
        ctx = eb.Context(axis=Replay(totals), first_element=empty.first).at(state.step + 1)
        numbers = [value for _, value in hyperparameters(optimizer.transform) if isinstance(value, Tensor)]
        following = _Origins(
            {id(x): frozenset() for x in (*totals, *numbers, *eb.tree.leaves(state), *grads, ctx.step)}
        )

        def note(name: str, slot: Any) -> Any:
            following.origins.update({id(x): frozenset({name}) for x in eb.tree.leaves(slot)})
            return slot

        eb.tree.map_slots(note, state.inner)
        following.origins.update({id(x): frozenset({WEIGHTS}) for x in eb.tree.leaves(params)})
        try:
            with following:
                optimizer.transform.update(grads, state.inner, params, ctx)
        except UnansweredError as question:
            return following.of(question.value)
        return frozenset()


class _Origins(TorchFunctionMode):
    """Follows which tensors are computed from which, by id.

    A tensor that comes from elsewhere may have been computed from anything.
    """

    def __init__(self, origins: dict[int, frozenset[str]]) -> None:
        super().__init__()
        self.origins = origins
        self._held: list[Any] = []  # so that no id comes twice

    def of(self, tensor: Tensor) -> frozenset[str]:
        everything: frozenset[str] = frozenset().union(*self.origins.values())
        return self.origins.get(id(tensor), everything)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in eb.tree.leaves([args, kwargs or {}]) if isinstance(x, Tensor)]
        names: frozenset[str] = frozenset().union(*map(self.of, given))
        for x in eb.tree.leaves([made]):
            if isinstance(x, Tensor):
                self.origins[id(x)] = names | self.origins.get(id(x), frozenset())
                self._held.append(x)
        return made


def find_totals(parts: Sequence[Part], axis: eb.Axis, reads: Reads) -> list[Tensor]:
    """The totals, over all parts and processes, of what a transform asks of its axis, in order; none if it asks nothing.

    Every process has to call it, with one part at least: all ask the same, in the same order, also one that has nothing to step.

    Raises:
        RuntimeError: Parts that reduce differently.
    """
    totals: list[Tensor] = []
    while (question := _next_question(parts[0], totals)) is not None:
        total = question.value.double()
        for part in parts:
            if part.grad is None:
                continue
            for one in _contributions(part, totals, reads):
                if one.kind != question.kind:
                    raise RuntimeError(
                        f"{part.optimizer.transform}: reduces differently for different parameters; accepted is a transform whose"
                        " reductions go over all of its parameters."
                    )
                value = one.value.double().to(total.device)
                total = total + value if one.kind == "sum" else torch.maximum(total, value)
        total = axis.sum(total) if question.kind == "sum" else axis.max(total)
        totals.append(total.to(question.value.dtype))
    return totals


def _contributions(part: Part, totals: Sequence[Tensor], reads: Reads | None) -> Iterator[UnansweredError]:
    """What a part contributes to the first reduction that ``totals`` do not answer, piece by piece; at least one, if it has no elements.

    Nothing comes if the transform asks for no more.
    """
    optimizer, unit, grad, counted = part
    assert grad is not None
    (tensor,) = unit.tensors
    whole = tensor.ndim != 1 or needs_whole_tensors(optimizer.transform)
    # Where there are no elements it does not matter what is decoded.
    names = None if whole or reads is None else reads.of(optimizer, unit, totals)
    size = unit.piece_size(PIECE if tensor.device.type in ("cpu", "meta") else DEVICE_PIECE)
    for start in range(0, 1 if whole else max(tensor.numel(), 1), size):
        stop = min(start + size, tensor.numel())
        cut = slice(None) if whole else slice(start, stop)
        state = unit.state if whole else unit.cut_state(start, stop, lambda x: x)
        ctx = eb.Context(first_element=unit.first + start, axis=Replay(totals, counted=counted))
        given, gradient = (tensor, grad) if whole else (tensor[cut], grad[cut])
        try:
            optimizer.ask([given], [gradient], state, ctx, reads=names)
        except UnansweredError as question:
            question.__traceback__ = None  # its frames hold what was computed on the way
            yield question
        else:
            return


def _next_question(part: Part, totals: Sequence[Tensor]) -> UnansweredError | None:
    """What a transform asks for next, and what nothing contributes to it."""
    if not part.optimizer.transform.reduces:
        return None
    empty = _without_elements(part.unit)
    none = torch.empty_like(empty.tensors[0], dtype=torch.float32)
    question = _contributions(Part(part.optimizer, empty, none), totals, None)
    return next(question, None)


def _without_elements(unit: Unit) -> Unit:
    tensor = unit.tensors[0].reshape(-1)[:0]
    state = map_state(unit.state, lambda x: x.reshape(-1)[:0], lambda x: x)
    return Unit(unit.group, [tensor], [], state, unit.first, flat=True, stored=unit.stored)
