"""Hooks on modules that outlive neither their owner nor a copy of the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from everybit_torch.torch_internals.tracing import call_untraced


class ModuleHook:
    """A hook on one module that does not keep its owner alive, and does nothing on a copy of the module.

    Args:
        owner: Whose method it calls.
        method: The method's name; it takes ``number`` and the hook's arguments.
        module: The module it is for.
        number: Of the unit.
        compiled: Whether it has to run in compiled models, too, where it divides what is compiled in two.
    """

    def __init__(self, owner: object, method: str, module: nn.Module, number: int, *, compiled: bool = True) -> None:
        self._compiled = compiled
        self._owner, self._module = weakref.ref(owner), weakref.ref(module)
        self._method, self._number = method, number

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Return the result of the owner's method, which replaces inputs or outputs if it is not None; torch calls hooks so."""
        if not self._compiled and torch.compiler.is_compiling():
            return None
        owner = self._owner()
        if owner is not None and module is self._module():
            # What it does to memory is not for a compiler to order.
            return call_untraced(getattr(owner, self._method), self._number, *arguments)
        return None

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Leave no hook in copies of the model, whose weights are not sharded."""
        return no_hook, ()


def _ignore(*arguments: object) -> None:
    """A hook that does nothing."""


def no_hook() -> Callable[..., None]:
    """Return the hook that stands for a hook in copies of its module: one that does nothing."""
    return _ignore
