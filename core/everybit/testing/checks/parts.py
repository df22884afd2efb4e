"""What a transform is made of, and what its masks and labels come out as."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from everybit import tree
from everybit.combinators.chain import Chain, NamedChain
from everybit.combinators.masked import Masked, Partition
from everybit.transform import Transform

P = TypeVar("P")


def needs_whole_tensors(transform: object) -> bool:
    """Whether a transform, or one inside it, says that it must see whole tensors.

    A chain says only the strictest scope of its parts, and a mask says ``"tensor"`` because it must know whose elements it sees.
    """
    return any(
        node.scope == "tensor"
        for node in _nodes(transform)
        if not isinstance(node, (Chain, NamedChain, Masked, Partition))
    )


def decided(transform: Transform[Any], params: object) -> Transform[Any]:
    """``transform`` with its masks and labels as trees, as they come out for whole ``params``: a piece does not know its shape."""
    return _decided(transform, params)  # type: ignore[no-any-return]


def _decided(node: Any, params: Any) -> Any:
    if isinstance(node, Masked):
        mask = tree.label(node.mask, params, name="mask")
        return replace(node, mask=tree.replace(params, mask), transform=_decided(node.transform, _chosen(params, mask)))
    if isinstance(node, Partition):
        labels = tree.label(node.labels, params)
        parts = {
            name: _decided(part, _chosen(params, [label == name for label in labels]))
            for name, part in node.transforms.items()
        }
        return replace(node, labels=tree.replace(params, labels), transforms=parts)
    held = {field.name: getattr(node, field.name) for field in fields(node) if field.init}
    changed = {
        name: _mapped(lambda part: _decided(part, params), value)
        for name, value in held.items()
        if next(_nodes(value), None) is not None
    }
    return replace(node, **changed) if changed else node


def _chosen(params: P, mask: list[bool]) -> P:
    return tree.replace(params, [leaf if keep else None for leaf, keep in zip(tree.leaves(params), mask, strict=True)])


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(function, part) for part in value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, part) for key, part in value.items()}
    return function(value) if _is_transform(value) else value


def _nodes(value: Any) -> Iterator[Any]:
    """A transform and all inside it, in fields, tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        if not hasattr(value, "_fields"):
            for part in value:
                yield from _nodes(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _nodes(part)
    elif _is_transform(value):
        yield value
        for field in fields(value):
            yield from _nodes(getattr(value, field.name))


def _is_transform(value: object) -> bool:
    return (
        is_dataclass(value) and not isinstance(value, type) and all(hasattr(value, name) for name in ("init", "update"))
    )
