"""What transforms are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import everybit as eb
from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Partition


def needs_whole_tensors(transform: eb.Transform[Any]) -> bool:
    """Whether a part of a transform must see tensors with their shapes; masks and labels do not count, since they are asked before."""
    return "tensor" in _scopes(transform)


def reduces(transform: eb.Transform[Any]) -> bool:
    """Whether a transform asks its axis for anything."""
    return transform.scope == "tree"


def _scopes(transform: eb.Transform[Any]) -> set[str]:
    parts = [part for part in parts_of(transform) if isinstance(getattr(part, "scope", None), str)]
    return set().union(*map(_scopes, parts)) if parts else {transform.scope}


def parts_of(node: Any) -> list[Any]:
    """The transforms directly inside one."""
    if isinstance(node, Chain):
        return list(node.transforms)
    if isinstance(node, (NamedChain, Partition)):
        return list(node.transforms.values())
    if not is_dataclass(node):
        return []
    return [value for field in fields(node) if is_transform(value := getattr(node, field.name))]


def is_transform(value: Any) -> bool:
    """Whether a value is a transform, and not the class of one."""
    return (
        is_dataclass(value)
        and not isinstance(value, type)
        and all(hasattr(value, n) for n in ("scope", "init", "update"))
    )


def map_parts(node: Any, function: Callable[[Any], Any]) -> Any:
    """A transform with ``function`` of each of the transforms directly inside it."""
    if isinstance(node, Chain):
        return Chain(tuple(function(part) for part in node.transforms))
    if isinstance(node, (NamedChain, Partition)):
        return replace(node, transforms={name: function(part) for name, part in node.transforms.items()})
    if not is_dataclass(node) or isinstance(node, type):
        return node
    changed = {
        field.name: function(value) for field in fields(node) if is_transform(value := getattr(node, field.name))
    }
    return replace(node, **changed) if changed else node


def nodes(node: Any) -> Iterator[Any]:
    """A transform, and all inside it."""
    yield node
    for part in parts_of(node):
        yield from nodes(part)
