"""Refuses whatever makes the host wait for a device: reading the values of a tensor that was computed just now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or its shape, the host has to know. ``bool(x)``, ``float(x)``, ``int(x)`` and ``x.item()`` are the first.
READING = {
    "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
}  # fmt: skip


def numbers_on_a_device() -> AbstractContextManager[Any]:
    """A context in which numbers are taken for tensors on a device: of those on the host a step reads the value."""
    return mock.patch("everybit.base.rounding.on_host", lambda number: number)


class ReadBackError(AssertionError):
    """A value was read."""


class Readbacks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, reading a tensor's values raises; but for what was written in an earlier time, and not since.

    An accelerator is done with that long ago, so that nobody waits for it: what was copied to the host's memory in one step may be read in
    the next one.

    Args:
        refuse: False: count what would be refused.

    Attributes:
        read: How often something was read.
        waited: How often the host would have waited for it.
    """

    def __init__(self, *, refuse: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse
        self._before: set[int] = set()
        self._now: set[int] = set()
        self.read = self.waited = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in READING or any(
            isinstance(x, Tensor) and x.dtype is torch.bool for x in _indices(function, args)
        ):
            self.look(function._schema.name, args[0])
        outputs = function(*args, **(kwargs or {}))
        self._now |= {x.untyped_storage().data_ptr() for x in tree_leaves(outputs) if isinstance(x, Tensor)}
        return outputs

    def look(self, what: str, x: Tensor) -> None:
        """A tensor's values are read.

        Raises:
            ReadBackError: They may not be there yet.
        """
        self.read += 1
        where = x.untyped_storage().data_ptr()
        if where not in self._before or where in self._now:
            self.waited += 1
            if self._refuse:
                raise ReadBackError(f"{what}: read a tensor of shape {tuple(x.shape)}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at what is read inside, and remember what was written."""

        def patched(name: str) -> Any:
            original: Callable[..., Any] = getattr(Tensor, name)

            def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.look(name, x)
                return original(x, *args, **kwargs)

            return mock.patch.object(Tensor, name, method, create=True)

        self._now = set()
        # They read the host's memory without an operation that a mode would see.
        with patched("tolist"), patched("numpy"), patched("__array__"), numbers_on_a_device(), self:
            yield
        self._before |= self._now


class Crossings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, whatever waits for an accelerator raises; tensors without memory (``meta``) stand in for those on one.

    That is reading a value, copying to the host, and copying from the host in the way that waits.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = function._schema.name
        if name in READING and any(x.is_meta for x in given):
            raise ReadBackError(f"{name}: read a tensor of shape {tuple(given[0].shape)}")
        outputs = function(*args, **kwargs)
        made = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
        if any(x.is_meta for x in given) and any(not x.is_meta for x in made):
            raise ReadBackError(f"{name}: copied to the host")
        if name in ("aten::copy_", "aten::_to_copy", "aten::_copy_from"):
            into = made[0]
            source = args[1] if name == "aten::copy_" else args[0]
            waits = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            if into.is_meta and not source.is_meta and waits:
                raise ReadBackError(f"{name}: waited while it copied from the host")
        return outputs


def _indices(function: Any, args: Any) -> list[Any]:
    return list(args[1]) if function._schema.name in ("aten::index", "aten::index_put_") else []
