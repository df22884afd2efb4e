"""The state of transforms that need whole tensors, in a process that holds rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everybit.base import tree


@tree.state
@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of the stored value of one parameter's slot. They are not decoded where they lie, since a block of a factor may end elsewhere.

    Attributes:
        value: As the whole is stored: a tensor, a tuple of parts, or a dict of factors, but of each tensor a vector of the elements of some
            rows; of a number without dimensions the number. None before rows are given out.
    """

    value: Any = None


def holds_rows(slot: Any) -> bool:
    """Whether a slot holds rows, of one parameter or of several."""
    return any(isinstance(value, StoredRows) for value in (slot if isinstance(slot, list) else [slot]))


def slots_in(state: Any) -> list[Any]:
    """List the values of the slots of a state, in order."""
    found: list[Any] = []
    tree.map_slots(lambda _name, slot: found.append(slot), state)
    return found


def with_slots(state: Any, slots: list[Any]) -> Any:
    """A state with other values in its slots, in order."""
    new = iter(slots)
    return tree.map_slots(lambda *_: next(new), state)
