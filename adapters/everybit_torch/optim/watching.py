"""Changes of weights, as they are seen in a dtype: which parameters have all of theirs in a mask.

A step knows the old and the new value of each weight, and adds the elements that it changes to a mask. Writes of other code are found by
the tensor's version and address, and the whole parameter then counts as changed. So no change is missed. A weight that changed and came
back counts as changed, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from everybit.base import require_member, spelled
from everybit_torch.segments import WatchedDType
from everybit_torch.torch_internals.dtensors import local
from everybit_torch.torch_internals.tensors import version

WATCHED: tuple[WatchedDType, ...] = get_args(WatchedDType)


class Watch:
    """The parameters of an optimizer of which all changes are in masks.

    Args:
        dtype: The dtype in which weights are compared.
        sees_writes: Whether writes from outside show in a tensor's version. They do not in a stepper's buffers.
    """

    def __init__(self, dtype: WatchedDType, *, sees_writes: bool = True) -> None:
        self.dtype: WatchedDType = dtype
        self._sees_writes = sees_writes
        self._known: dict[Tensor, tuple[int, int]] = {}  # parameters of which masks have all changes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}}  # a copy was taken by nobody

    def look(self, parameters: Iterable[Tensor]) -> None:
        """Find the parameters that other code has written to, before a step adds writes of its own."""
        for parameter in () if torch.compiler.is_compiling() else parameters:
            if not self.knows(parameter):
                self._known.pop(parameter, None)

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note that the last write to each parameter was that of a step, or left all bits as they were."""
        for parameter in () if torch.compiler.is_compiling() else parameters:
            if parameter in self._known:
                self.begin(parameter)

    def begin(self, parameter: Tensor) -> None:
        """Note that all changes of a parameter are in its mask from here on."""
        self._known[parameter] = self._place(parameter)

    def forget(self) -> None:
        """Let all parameters count as changed."""
        self._known.clear()

    def knows(self, parameter: Tensor) -> bool:
        """Whether the mask has all changes of a parameter."""
        return parameter in self._known and self._known[parameter] == self._place(parameter)

    def _place(self, parameter: Tensor) -> tuple[int, int]:
        here = local(parameter)
        return (version(here), here.data_ptr()) if self._sees_writes else (0, 0)


def require_watched(value: object) -> WatchedDType | None:
    """Return the name of the dtype in which changes are looked for.

    Raises:
        ValueError: None of those in which they can be.
    """
    if value is None:
        return None
    found: Any = spelled(value)
    require_member(found, WATCHED, field="watch")
    name: WatchedDType = found
    return name
