"""Units that were cut because some of their parameters had no gradient are joined again where their counts of steps agree.

A parameter without a gradient is not stepped, so its count of steps falls behind that of its neighbours, and the unit is cut between them.
Where parameters are used at random (experts, layers that are dropped) neighbours have the same count again sooner or later. How often a
unit was stepped is counted here, on the host, so that nothing has to be read from the device. It tells that the state of two units may be
one again only if counts of steps are all that the parameters of a unit share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.stepping import OptimizerState
from everybit.stepping.entries import fields
from everybit_torch.host_counts import HostCount
from everybit_torch.units import map_state


class Cuttable(Protocol):
    """A flat unit.

    Attributes:
        state: The optimizer's state, changed in place.
        first_tensor: The global index of its first element, 0-d, or those of its blocks.
        host_count: What the host knows of ``state.step``.
    """

    state: OptimizerState[Any]
    first_tensor: Tensor | Blocks
    host_count: HostCount

    @property
    def members(self) -> Sequence[Any]:
        """The parameters in it, in order."""
        ...

    @property
    def flat(self) -> bool:
        """Whether it may be cut."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The members' parameters."""
        ...

    def split(self, boundaries: list[int]) -> Iterator[Self]:
        """Cut it before the members with these numbers; states become views, counts become copies."""
        ...


U = TypeVar("U", bound=Cuttable)


@dataclass(slots=True)
class _Part(Generic[U]):
    """A unit that was cut from another.

    Attributes:
        unit: It.
        whole: What it was cut from.
        low: Number of the whole's first member in it.
        high: One past the last.
        steps: How often it was stepped since the whole was cut for the first time.
    """

    unit: U
    whole: U
    low: int
    high: int
    steps: int


class Joining(Generic[U]):
    """Cuts units where members with a gradient meet members without, and joins them again."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part[U]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_parts": {}}  # by id, which a copy does not keep

    @property
    def is_needed(self) -> bool:
        """Whether there are units that were cut."""
        return bool(self._parts)

    def forget(self) -> None:
        """Counts were replaced, or memory was: units that are cut now stay so."""
        self._parts = {}

    @contextmanager
    def stepping(self, units: Sequence[U]) -> Iterator[None]:
        """Count a step of these, which is taken inside. After an error some were stepped and some were not: none is joined then."""
        try:
            yield
        except BaseException:
            self.forget()
            raise
        if self._parts:
            for unit in units:
                if (part := self._parts.get(id(unit))) is not None:
                    part.steps += 1

    def capture(self, units: Sequence[tuple[U, Sequence[bool]]]) -> None:
        """Leave units as they are in a step that is captured in a CUDA graph; those that are cut stay so, for nobody counts replays.

        Args:
            units: All of them, with which of their members have a gradient.

        Raises:
            RuntimeError: A unit would have to be cut, to counts of its own that every replay would set back.
        """
        for unit, has in units:
            if unit.flat and (boundaries := boundaries_between(has)):
                without = unit.members[0 if not has[0] else boundaries[0]].name
                raise RuntimeError(
                    f"{without}: has no gradient, but its neighbours have, while a CUDA graph is being captured; accepted is a step before"
                    " the capture in which the same parameters have gradients."
                )
        self.forget()

    def arrange(self, units: Sequence[U], present: Callable[[U], Sequence[bool]]) -> tuple[list[U], list[U]]:
        """Return units of which all members, or none, have a gradient, in order, as few as may be; and those that were made for it.

        Args:
            units: All of them, in order.
            present: Which members of a unit have a gradient.
        """
        made: list[U] = []
        flagged: list[tuple[U, bool]] = []
        for unit in units:
            has = list(present(unit))
            boundaries = boundaries_between(has)
            if not (unit.flat and boundaries):
                flagged.append((unit, any(has)))
                continue
            parts = list(unit.split(boundaries))
            self._note(unit, parts, boundaries)
            made += parts
            flagged += [(part, has[edge]) for part, edge in zip(parts, [0, *boundaries], strict=True)]
        if not self._parts:
            return [unit for unit, _ in flagged], made
        arranged: list[U] = []
        before = False  # whether the unit before has gradients
        for unit, here in flagged:
            joined = self._joined(arranged[-1], unit) if before and here and self._agree(arranged[-1], unit) else None
            if joined is None:
                arranged.append(unit)
            else:
                arranged[-1] = joined
                made.append(joined)
            before = here
        self._parts = {id(unit): self._parts[id(unit)] for unit in arranged if id(unit) in self._parts}
        for part in self._parts.values():
            if part.unit is not part.whole:
                _keep_no_numbers(part.whole, part.unit)
        there = set(map(id, arranged))
        return arranged, [unit for unit in made if id(unit) in there]

    def _note(self, unit: U, parts: Sequence[U], boundaries: Sequence[int]) -> None:
        known = self._parts.pop(id(unit), None)
        whole, start, steps = (unit, 0, 0) if known is None else (known.whole, known.low, known.steps)
        for part, low, high in zip(parts, [0, *boundaries], [*boundaries, len(unit.members)], strict=True):
            self._parts[id(part)] = _Part(part, whole, start + low, start + high, steps)

    def _agree(self, left: U, right: U) -> bool:
        one, other = self._parts.get(id(left)), self._parts.get(id(right))
        if one is None or other is None:
            return False
        neighbours = one.whole is other.whole and one.high == other.low and one.steps == other.steps
        return neighbours and _shares_counts_only(left.state)

    def _joined(self, left: U, right: U) -> U | None:
        """Both as one unit; None if their memory is no longer that of the whole."""
        one, other = self._parts[id(left)], self._parts[id(right)]
        edges = [edge for edge in (one.low, other.high) if 0 < edge < len(one.whole.members)]
        joined = next(part for number, part in enumerate(one.whole.split(edges)) if number == (one.low > 0))
        if not (_begins_with(joined, left) and _ends_with(joined, right)):
            self.forget()
            return None
        for into, value in zip(_counts(joined.state), _counts(left.state), strict=True):
            into.copy_(value)
        joined.host_count.note(joined.state.step, left.host_count.known(left.state.step))
        self._parts[id(joined)] = _Part(joined, one.whole, one.low, other.high, one.steps)
        return joined


def boundaries_between(present: Sequence[bool]) -> list[int]:
    """The numbers of the members before which a unit is cut, so that of each part all members have a gradient, or none."""
    return [number for number in range(1, len(present)) if present[number] != present[number - 1]]


def _keep_no_numbers(whole: Cuttable, part: Cuttable) -> None:
    """Let what is no unit any more hold a part's numbers instead of some of its own."""
    step, *others = _counts(part.state)
    numbers = iter([*others, step])  # in the order in which they are asked for
    whole.state = map_state(whole.state, lambda x: x, lambda _: next(numbers))
    whole.first_tensor = part.first_tensor


def _counts(state: OptimizerState[Any]) -> list[Tensor]:
    return [one.value for one in fields(state) if not one.is_slot]


def _slots(state: OptimizerState[Any]) -> list[Tensor]:
    return [x for one in fields(state) if one.is_slot for x in eb.tree.leaves(one.value)]


def _shares_counts_only(state: OptimizerState[Any]) -> bool:
    """Whether all that the parameters of a unit share are counts of steps, which are equal for units stepped equally often."""
    shared = [one for one in fields(state) if not one.is_slot]
    return all(one.name.rsplit(".", 1)[-1] == "step" and one.value.dtype is torch.int64 for one in shared)


def _begins_with(joined: Cuttable, left: Cuttable) -> bool:
    pairs = zip(_slots(joined.state), _slots(left.state), strict=True)
    return joined.parameters[0] is left.parameters[0] and all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def _ends_with(joined: Cuttable, right: Cuttable) -> bool:
    pairs = zip(_slots(joined.state), _slots(right.state), strict=True)
    return joined.parameters[-1] is right.parameters[-1] and all(_end(a) == _end(b) for a, b in pairs)


def _end(x: Tensor) -> int:
    return x.data_ptr() + x.nbytes
