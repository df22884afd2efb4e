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

    Values of hyperparameters are compared as objects, and those that can change in place are not seen: each step prepares for them.
    A tensor is seen, because a step reads its number anew.
    """

    def __init__(self) -> None:
        self._objects: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_objects": None}  # a copy looks for itself

    def note(self, own: Parameters, groups: ParamGroups, state: object) -> None:
        """Note that an optimizer is prepared for its param groups, and that this is its state."""
        values = [x for group in groups for name, x in group.items() if name not in ("params", "param_names")]
        had, self._objects = self._objects, None
        if own.has_lazy() or not all(map(is_frozen, values)):
            return
        if had is None or not self._in_place(own):  # else a number changed, and nothing else: a schedule
            self._stepped, self._shows = own.stepped, own.shows
            self._parameters = [parameter for one in own.stepped for parameter in one.of.parameters]
            self._is_sharded = any(one.of.is_sharded for one in own.stepped)
            self._counts = own.counts()
            self._addresses = [count.data_ptr() for count in self._counts]
            self._places = Places(self._here())
        self._waiting = own.waiting()
        self._objects = _objects(own, groups, state)

    def holds(self, own: Parameters, groups: ParamGroups, state: object) -> bool:
        """Whether nothing has changed since. Fast: called at every step."""
        if self._objects is None:
            return False
        now = _objects(own, groups, state)
        return len(now) == len(self._objects) and all(map(is_, now, self._objects)) and self._in_place(own)

    def _in_place(self, own: Parameters) -> bool:
        """Whether parameters and their state lie where they lay, and no frozen parameter is to be stepped."""
        return (
            self._stepped is own.stepped
            and self._shows == own.shows
            and not any(map(moves, self._waiting))
            and [*map(Tensor.data_ptr, self._counts)] == self._addresses
            and self._places.hold(self._here())
        )

    def _here(self) -> list[Tensor]:
        return [*map(local, self._parameters)] if self._is_sharded else self._parameters


def _objects(own: Parameters, groups: ParamGroups, state: object) -> list[Any]:
    found: list[Any] = [state, own.states, *(group.arguments for group in own.groups)]
    for values in groups:
        found += (values, *values.values(), *values["params"])
    return found
