"""Results that an object finds once, because it never changes: the formats of an optimizer's tensors, the promises of its transform."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

MOST = 1024
"""Results that an object keeps."""


class Remembers(Protocol):
    """An object with a table of results, such as a frozen dataclass with a field that takes no part in comparisons."""

    @property
    def found(self) -> dict[Any, Any]:
        """The results by key."""
        ...


def once(owner: Remembers, key: Hashable, find: Callable[[], T]) -> T:
    """Return ``find()``, called once for each key.

    Compiled code calls it while it is traced, and has its result as a constant: a table would be one more thing to guard.
    """
    if torch.compiler.is_compiling():
        return find()
    if key not in owner.found:
        remember(owner, key, find())
    result: T = owner.found[key]
    return result


def remember(owner: Remembers, key: Hashable, result: object) -> None:
    """Keep a result. A table that is full is emptied: shapes that change at every step would fill memory."""
    if len(owner.found) >= MOST:
        owner.found.clear()
    owner.found[key] = result
