"""State that is carried over when hyperparameters change its slots: a chain becomes longer, momentum begins or ends.

A transform made with other hyperparameters may nest its state differently (``maximize`` puts a transform before the others) and may keep
other slots. Entries correspond by name, as in checkpoints, not by the nesting: each entry of the new state takes the values of the entry
with its name. Slots may begin, with the values that ``init`` gives them, and may end. Counts may not: they tell how far the slots beside
them are, and a count that begins at zero next to moments that have gone on would correct a bias that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import fields_of, is_transform
from everybit.stepping import OptimizerState
from everybit.stepping.entries import STEP, WEIGHTS, Field
from everybit.stepping.entries import fields as named_fields
from everybit_torch.segments import Segment

_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class Migration:
    """The new state of a segment after a change of its slots.

    Attributes:
        state: The new state; tensors that are carried over keep their memory.
        begun: Names of slots that are new.
        ended: Names of slots that are dropped.
    """

    state: OptimizerState[Any]
    begun: list[str]
    ended: list[str]


def skeleton(transform: Any, *, numbers: bool = False) -> Any:
    """Return what determines how a transform nests its state: the types of its parts, and their arguments that are not numbers.

    Two transforms that a factory makes of different numbers have equal skeletons. Functions that it makes anew each time, such as masks,
    are equal if their code is, and what it refers to.

    Args:
        transform: A transform, or an argument of one.
        numbers: Whether arguments that are numbers count as well.
    """

    def of(part: Any) -> Any:
        if is_transform(part):
            return type(part), tuple(of(getattr(part, field.name)) for field in fields_of(part))
        if isinstance(part, Mapping):
            return tuple((key, of(value)) for key, value in part.items())
        if isinstance(part, (tuple, list)):
            return tuple(map(of, part))
        if isinstance(part, (set, frozenset)):
            return frozenset(part)
        if isinstance(part, (str, bool)) or part is None:
            return part
        if isinstance(part, (int, float, Tensor)):
            return (id(part) if isinstance(part, Tensor) else part) if numbers else float
        if isinstance(part, FunctionType):
            held = tuple(one.__code__ if isinstance(one, FunctionType) else of(one) for one in _held(part))
            return part.__code__, held
        if isinstance(part, MethodType):
            return part.__func__.__code__, id(part.__self__)
        if isinstance(part, partial):
            return of(part.func), of(part.args), of(part.keywords)
        if not is_dataclass(part) or isinstance(part, type):
            return id(part)
        return type(part), tuple(of(getattr(part, field.name)) for field in fields(part) if numbers)

    return of(transform)


def _held(function: FunctionType) -> Iterator[Any]:
    """Yield a function's defaults, and the values that it was made around."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a value that is not there yet
            yield cell.cell_contents


class Held(Protocol):
    """A tensor that is stepped, its state, and the index of its first element."""

    tensor: Tensor
    state: OptimizerState[Any]
    first: Any


def plan_migration(segment: Held, optimizer: eb.Optimizer[Any], weights: Callable[[], Tensor]) -> Migration:
    """Plan a segment's state for an optimizer with other hyperparameters; the present state is not changed.

    Args:
        segment: The segment, whose tensor may have the weights of the last step.
        optimizer: The other optimizer.
        weights: Returns the present weights, with which slots begin.

    Raises:
        ValueError: It cannot be told which of several entries of one name is which, or a count would begin or end.
    """
    shadow = shadow_state(segment, optimizer)
    old, new = named_fields(segment.state), named_fields(shadow)
    left: dict[tuple[str, bool], list[tuple[str, Any]]] = {}
    for name, value, is_slot in old:
        left.setdefault(_key(name, is_slot), []).append((name, value))
    wanted: dict[tuple[str, bool], int] = {}
    for name, _, is_slot in new:
        wanted[_key(name, is_slot)] = wanted.get(_key(name, is_slot), 0) + 1
    for key in left.keys() | wanted.keys():
        had, needs = len(left.get(key, [])), wanted.get(key, 0)
        if had != needs and (not key[1] or (had and needs)):
            raise ValueError(
                f"the state is {[name for name, _, _ in old]}, the new value needs {[name for name, _, _ in new]}, and of {key[0]!r} there"
                f" would be {needs} where there were {had}: it cannot be told what is carried over. Make a new optimizer."
            )
    carried: dict[str, Any] = {}
    begun = []
    for name, value, is_slot in new:
        there = left.get(_key(name, is_slot))
        if there:
            carried[name] = there.pop(0)[1]
            _require_alike(name, carried[name], value)
        else:
            begun.append(name)
    ended = [name for entries in left.values() for name, _ in entries]
    if begun:
        fresh = {name: value for name, value, _ in named_fields(Segment.new(optimizer, weights(), segment.first).state)}
        carried |= {name: fresh[name] for name in begun}
    return Migration(_assemble(shadow, new, carried), begun, ended)


def shadow_state(segment: Held, optimizer: eb.Optimizer[Any]) -> OptimizerState[Any]:
    """Return the state that an optimizer would keep for a segment, without its memory."""
    return optimizer.init([torch.empty_like(segment.tensor, device="meta")])


def _key(name: str, is_slot: bool) -> tuple[str, bool]:
    """Return an entry's name without its position in a chain."""
    return (name.split("#")[0] if is_slot else _INDEX.sub("", name)), is_slot


def _assemble(shadow: OptimizerState[Any], named: Sequence[Field], values: Mapping[str, Any]) -> OptimizerState[Any]:
    """A state nested as ``shadow`` is, with these entries."""
    slots = iter([values[name] for name, _, is_slot in named if is_slot and name != WEIGHTS])
    counts = iter([values[name] for name, _, is_slot in named if not is_slot and name != STEP])
    inner = eb.tree.map_slots(
        lambda _, slot: next(slots) if eb.tree.leaves(slot) else slot, shadow.inner, lambda _: next(counts)
    )
    return OptimizerState(values[STEP], values.get(WEIGHTS, shadow.extra), inner)


def _require_alike(name: str, old: Any, new: Any) -> None:
    kinds = [[(leaf.dtype, leaf.shape) for leaf in eb.tree.leaves(value)] for value in (old, new)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name!r} is stored differently with the new value; make a new optimizer.")
