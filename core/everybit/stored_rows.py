"""The state of transforms whose work on whole tensors is done elsewhere, where parts of the tensors are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from everybit import tree


@tree.state
@dataclass(frozen=True, slots=True)
class StoredRows:
    """Some rows of what a policy stores of one parameter's slot, in the place of a value: nobody decodes them where they lie.

    Attributes:
        value: As the whole is stored: a tensor, a tuple of parts, or a dict of factors, but of each tensor a vector of the elements of some
            rows; of a number without dimensions all there is. None before rows are given out.
    """

    value: Any = None


@tree.state
@dataclass(frozen=True, slots=True)
class WorkState:
    """The states of neighbours in a chain whose work is done elsewhere, in order.

    Where the work is done, their slots hold what is stored of the whole; where parts are, :class:`StoredRows`.
    """

    states: tuple[Any, ...]


def in_own_places(node: Any) -> Any:
    """A state with those of such neighbours in the places that they have where one process does the work: paths are the same then."""
    if isinstance(node, WorkState):
        return in_own_places(node.states[0]) if len(node.states) == 1 else node
    if isinstance(node, dict):
        return dict(zip(node, _spread(list(node.values())), strict=True))
    if isinstance(node, (tuple, list)) and not hasattr(node, "_fields"):
        return type(node)(_spread(list(node)))
    if tree.slot_fields(node) is None or isinstance(node, StoredRows):
        return node
    return replace(
        cast(Any, node), **{name: in_own_places(getattr(node, name)) for name in tree.slot_fields(node) or ()}
    )


def _spread(children: list[Any]) -> list[Any]:
    for place, child in enumerate(children):
        if isinstance(child, WorkState):
            # What stands in the places of the others is empty.
            children[place : place + len(child.states)] = child.states
    return [in_own_places(child) for child in children]
