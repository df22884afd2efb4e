"""The host's copy of a count of steps that lies on the device, so that the host need not wait to know which step is next."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from everybit_torch.streams import is_capturing
from everybit_torch.torch_internals.tensors import version

Due = tuple[tuple[int, bool], ...]
"""For some periods whether their work is due, as :class:`everybit.Context` has it; of the others the device decides."""


class HostCount:
    """A host-side copy of a count on the device, which is valid as long as no other code writes to the tensor.

    Code that counts a step notes it here as well. A tensor that other code wrote to (a loader, an import, code of the user's) has another
    version than was noted, and is read again. A step that is captured in a CUDA graph, or in code that a user compiles, is repeated
    without notice here, so that such a count is never known again.
    """

    __slots__ = ("_at", "_captured", "_tensor", "_value")

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None  # weak: counts of units that were cut are freed
        self._at = self._value = 0
        self._captured = False

    def known(self, count: Tensor) -> int | None:
        """The value of a count; None if only the device knows it."""
        if self._captured or self._tensor is None or self._tensor() is not count or self._at != version(count):
            return None
        return self._value

    def note(self, count: Tensor, value: int | None) -> None:
        """Note the count's value; None: it is unknown."""
        if value is None or self._captured:
            self._tensor = None
            return
        self._tensor, self._at, self._value = weakref.ref(count), version(count), value

    def read(self, count: Tensor) -> int | None:
        """The value of a count, for which the host waits if it does not know it; None where it cannot be known."""
        if torch.compiler.is_compiling() or is_capturing():
            self._captured = True
        # Inference tensors have no versions.
        if self._captured or count.is_meta or count.is_inference():
            return None
        value = self.known(count)
        if value is None:
            value = int(count)
            self.note(count, value)
        return value

    def __reduce__(self) -> Any:
        # A copy has another tensor, with versions counted anew.
        return HostCount, ()
