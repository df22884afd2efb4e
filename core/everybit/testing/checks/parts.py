"""The evaluation of a transform's masks and labels on example parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from everybit.base import tree
from everybit.combinators import Masked, Partition
from everybit.protocol import Transform, map_parts

P = TypeVar("P")


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
    return map_parts(lambda part: _decided(part, params), node)


def _chosen(params: P, mask: list[bool]) -> P:
    return tree.replace(params, [leaf if keep else None for leaf, keep in zip(tree.leaves(params), mask, strict=True)])
