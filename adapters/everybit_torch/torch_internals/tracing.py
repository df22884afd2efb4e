"""Calls that a compiler leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call_untraced(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function, which a compiler calls too instead of tracing it.

    ``torch.compiler.disable`` imports the compiler when it is applied, which takes as long as ``import torch``. torch marks methods of its
    own in a way that imports it at the first call, and a call that is not traced needs no mark.
    """
    if torch.compiler.is_compiling():
        _marked(function, *arguments)
    else:
        function(*arguments)


def _call(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)


def _mark() -> Callable[..., None]:
    lazily: Any = getattr(getattr(torch, "_compile", None), "_disable_dynamo", None)
    mark: Any = torch.compiler.disable if lazily is None else lazily
    marked: Callable[..., None] = mark(_call)
    return marked


_marked = _mark()
