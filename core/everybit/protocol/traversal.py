"""The transforms that a transform is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any


def fields_of(value: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a dataclass or of its instance; an empty tuple for a transform of another class."""
    return fields(value) if is_dataclass(value) else ()


def is_transform(value: object) -> bool:
    """Whether a value is a transform, and not the class of one."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("init", "update"))


def transforms_in(value: Any) -> Iterator[Any]:
    """Yield a transform and all inside it, in order, in fields, tuples, lists and mappings. Only dataclasses have known fields."""
    if isinstance(value, (tuple, list)):
        if not hasattr(value, "_fields"):
            for part in value:
                yield from transforms_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from transforms_in(part)
    elif is_transform(value):
        yield value
        for field in fields_of(value):
            yield from transforms_in(getattr(value, field.name))


def holds_transforms(value: Any) -> bool:
    """Whether a value is a transform, or a container of transforms. Trees of labels and masks are not."""
    if isinstance(value, (tuple, list)):
        return not hasattr(value, "_fields") and any(holds_transforms(part) for part in value)
    if isinstance(value, Mapping):
        return any(holds_transforms(part) for part in value.values())
    return is_transform(value)


def map_parts(function: Callable[[Any], Any], node: Any) -> Any:
    """A transform with ``function`` of each of the transforms directly inside it, in order: in fields, tuples, lists and mappings."""
    held = {field.name: getattr(node, field.name) for field in fields_of(node) if field.init}
    changed = {name: _map(function, value) for name, value in held.items() if holds_transforms(value)}
    return replace(node, **changed) if changed else node


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if not holds_transforms(value):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)([_map(function, part) for part in value])
    if isinstance(value, Mapping):
        return {key: _map(function, part) for key, part in value.items()}
    return function(value)
