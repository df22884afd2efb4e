"""What an optimizer saw when it was prepared for a step: while all of it is so, the next step needs no preparation."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from everybit_torch.arguments import is_frozen
from everybit_torch.optim.parameters import Parameters
from everybit_torch.optim.planned import ParamGroups, moves
from everybit_torch.segments import Places
from everybit_torch.torch_internals.dtensors import local


class Seen:
    """Param groups and their values, parameters and their memory, frozen parameters, and the state that is shown.

    Values of hyperparameters are compared as objects, and those that can change in place are never taken for seen. A tensor is, because a
    step reads its number anew.
    """

    def __init__(self) -> None:
        self._objects: list[Any] | None = None
        self._values: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_objects": None, "_values": None}  # a copy looks for itself

    def note(self, own: Parameters, groups: ParamGroups, state: object) -> None:
        """Note that an optimizer is prepared for its param groups, and that this is its state."""
        self._objects = None
        if own.has_lazy():
            return
        self._stepped, self._shows = own.stepped, own.shows
        self._parameters = [parameter for one in own.stepped for parameter in one.of.parameters]
        self._is_sharded = any(one.of.is_sharded for one in own.stepped)
        self._counts = own.counts()
        self._addresses = [count.data_ptr() for count in self._counts]
        self._places, self._waiting = Places(self._here()), own.waiting()
        self._objects = _objects(own, groups, state)
        self.note_values(own, groups)

    def note_values(self, own: Parameters, groups: ParamGroups) -> None:
        """Note that an optimizer follows the values of its param groups."""
        values = _values(own, groups)
        self._values = values if all(map(is_frozen, values[len(own.groups) :])) else None

    def is_in_place(self, own: Parameters, groups: ParamGroups, state: object) -> bool:
        """Whether groups, parameters, memory and state are those that were noted. Fast, as :meth:`has_values`: asked at every step."""
        known = self._objects
        if known is None or self._stepped is not own.stepped or self._shows != own.shows:
            return False
        now = _objects(own, groups, state)
        return (
            len(now) == len(known)
            and all(map(is_, now, known))
            and not any(map(moves, self._waiting))
            and [*map(Tensor.data_ptr, self._counts)] == self._addresses
            and self._places.hold(self._here())
        )

    def has_values(self, own: Parameters, groups: ParamGroups) -> bool:
        """Whether the values of param groups are those that were noted."""
        if self._values is None:
            return False
        now = _values(own, groups)
        return len(now) == len(self._values) and all(map(is_, now, self._values))

    def _here(self) -> list[Tensor]:
        return [*map(local, self._parameters)] if self._is_sharded else self._parameters


def _objects(own: Parameters, groups: ParamGroups, state: object) -> list[Any]:
    found: list[Any] = [state, own.states]
    for values in groups:
        found += (values, values["params"], *values["params"])
    return found


def _values(own: Parameters, groups: ParamGroups) -> list[Any]:
    values = [value for group in groups for name, value in group.items() if name not in ("params", "param_names")]
    return [*(group.arguments for group in own.groups), *values]
