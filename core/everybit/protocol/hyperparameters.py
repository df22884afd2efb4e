"""The hyperparameters inside a transform: found, and replaced by others.

Transforms are frozen dataclasses, and a field that is annotated to accept a tensor (``Hyperparameter``, ``Scalar``, ``Tensor``) is data: a
compiled step reads it, and a scheduler may change it. A field that accepts numbers only may decide what code there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from torch import Tensor

from everybit.base import scalars
from everybit.protocol.traversal import fields_of, holds_transforms

T = TypeVar("T")


def map_hyperparameters(function: Callable[[str, float | Tensor], float | Tensor], transform: T) -> T:
    """``transform`` with every number and 0-d tensor in a field that accepts tensors passed through ``function(name, value)``.

    Transforms inside of it are looked into: in fields, tuples, lists and mappings. Schedules are left alone.
    """
    return _map(function, transform)  # type: ignore[no-any-return]


def hyperparameters(transform: object) -> list[tuple[str, float | Tensor]]:
    """Name and value of every number and 0-d tensor in a field that accepts tensors, those of transforms inside included, in order."""
    found: list[tuple[str, float | Tensor]] = []

    def note(name: str, value: float | Tensor) -> float | Tensor:
        found.append((name, value))
        return value

    map_hyperparameters(note, transform)
    return found


def _map(function: Callable[[str, Any], Any], node: Any) -> Any:
    # Objects are never compared by identity: a compiler that traces this cannot tell all of them apart.
    if not holds_transforms(node):
        return node
    if isinstance(node, (tuple, list)):
        return type(node)([_map(function, part) for part in node])
    if isinstance(node, Mapping):
        return {key: _map(function, part) for key, part in node.items()}
    known = accepting(type(node))
    changed = {}
    for field in fields_of(node):
        value = getattr(node, field.name)
        if field.init and field.name in known and _is_number(value):
            changed[field.name] = function(field.name, value)
        elif field.init and holds_transforms(value):
            changed[field.name] = _map(function, value)
    return replace(node, **changed) if changed else node


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def accepting(cls: Any) -> frozenset[str]:
    """Return the fields of a dataclass that accept a tensor. Compiled code takes the result as a constant."""
    return _annotated_with_tensors(cls)


@cache
def _annotated_with_tensors(cls: Any) -> frozenset[str]:
    try:
        hints = get_type_hints(cls)
    except NameError:
        # Annotations inside of a function cannot be resolved; their names can be read.
        known = {name for name, hint in vars(scalars).items() if _has_tensor(hint)}
        return frozenset(field.name for field in fields_of(cls) if known & set(re.findall(r"\w+", str(field.type))))
    return frozenset(field.name for field in fields_of(cls) if _has_tensor(hints[field.name]))


def _has_tensor(hint: Any) -> bool:
    # A schedule takes and returns tensors, and is no tensor itself.
    if hint is Tensor:
        return True
    return any(_has_tensor(one) for one in get_args(hint)) and not _is_callable(hint)


def _is_callable(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is not None and getattr(hint.__origin__, "__name__", "") == "Callable"
