"""The stepper that a model belongs to."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn


class Owner(Protocol):
    """The object that steps a model's parameters."""

    @property
    def closed(self) -> bool:
        """Whether it gave the parameters back."""
        ...


_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Owner]] = weakref.WeakKeyDictionary()


def claim(model: nn.Module, owner: Owner) -> None:
    """Note that a model belongs to a stepper, until that is closed."""
    _OWNERS[model] = weakref.ref(owner)


def require_free(model: nn.Module) -> None:
    """Refuse a model that another stepper steps.

    Raises:
        ValueError: There is one, which is not closed.
    """
    owner = _OWNERS.get(model)
    if owner is not None and (other := owner()) is not None and not other.closed:
        raise ValueError("model: belongs to a stepper already; call that stepper's close() first.")
