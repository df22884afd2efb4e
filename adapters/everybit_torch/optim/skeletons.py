"""The structure of transforms and of their state, which hyperparameters that are no numbers may change.

``maximize`` puts a transform before the others, and the state is nested in another way; but it keeps the same slots and counts. Slots and
counts that would begin or end later are refused: a count that begins at zero beside moments that have gone on would correct a bias that is
not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.protocol import fields_of, is_transform
from everybit.stepping import OptimizerState
from everybit.stepping.entries import Entry, entries
from everybit.stepping.layout import Layout

_INDEX = re.compile(r"\[\d+\]")


def skeleton(transform: Any, *, numbers: bool = False) -> Any:
    """Return what determines how a transform nests its state: the types of its parts, and their arguments that are not numbers.

    Two transforms that a factory makes of different numbers have equal skeletons. Functions that it makes anew each time, such as masks,
    are equal if their code is, and the values that it refers to.

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


def renested(state: OptimizerState[Any], optimizer: eb.Optimizer[Any], tensor: Tensor) -> OptimizerState[Any]:
    """Return a state with the same tensors, nested as another optimizer nests it.

    Args:
        state: The state of an optimizer before its hyperparameters changed.
        optimizer: The optimizer with the other hyperparameters.
        tensor: The tensor that is stepped.

    Raises:
        ValueError: A slot or a count would begin, end, or be stored in another way.
    """
    shadow = [torch.empty_like(tensor, device="meta")]
    fresh = optimizer.init(shadow)
    had, needs = (_entries(optimizer, shadow, one) for one in (state, fresh))
    if [_kind(*one) for one in had] != [_kind(*one) for one in needs]:
        raise ValueError(
            f"the state is {[entry.name for entry, _ in had]}, and the new value needs {[entry.name for entry, _ in needs]}, or stores"
            " them in another way; accepted are values that keep the same state. Make a new optimizer, and carry over what it keeps with"
            " full_state_dict() and load_full_state_dict()."
        )
    return OptimizerState(state.step, state.extra, eb.tree.replace(fresh.inner, eb.tree.leaves(state.inner)))


def _entries(
    optimizer: eb.Optimizer[Any], like: list[Tensor], state: OptimizerState[Any]
) -> list[tuple[Entry, Tensor]]:
    return entries(Layout.of(like, optimizer.formats(like), state.inner, state.extra), state)


def _kind(entry: Entry, value: Tensor) -> object:
    """An entry's name without its position in a chain, and how it is stored."""
    stem = _INDEX.sub("", entry.name) if entry.role == "shared" else re.sub(r"#\d+", "", entry.name)
    return stem, entry.role, value.dtype, value.shape
