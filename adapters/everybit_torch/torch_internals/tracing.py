"""Calls that a compiler leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call_untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a function's result; a compiler calls it, too, instead of tracing it.

    ``torch.compiler.disable`` imports the compiler when it is applied, which takes as long as ``import torch``. torch marks methods of its
    own in a way that imports it at the first call, and a call that is not traced needs no mark.
    """
    if torch.compiler.is_compiling():
        return _marked(function, *arguments)
    return function(*arguments)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _mark() -> Callable[..., Any]:
    lazily: Any = getattr(getattr(torch, "_compile", None), "_disable_dynamo", None)
    mark: Any = torch.compiler.disable if lazily is None else lazily
    marked: Callable[..., Any] = mark(_call)
    return marked


_marked = _mark()
