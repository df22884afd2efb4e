"""What ``torch.optim`` calls a hyperparameter, and what the core does: one table for every front end.

torch's name stands for the core's only where nothing goes by torch's name itself: an argument ``lr`` or ``alpha`` of somebody's own
factory, a field ``alpha`` of their transform, are what they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

FIELDS: Mapping[str, tuple[str, ...]] = {"lr": ("learning_rate",), "betas": ("b1", "b2")}
"""torch's names, and the fields of transforms that they stand for."""

ARGUMENTS: Mapping[str, tuple[str, ...]] = {**FIELDS, "alpha": ("decay",)}
"""torch's names, and the arguments of factories. ``decay`` is RMSprop's ``alpha`` there; as a field it may be a momentum's as well."""


def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """What a factory's arguments are called; nothing if it does not tell."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def core_names(name: str, table: Mapping[str, tuple[str, ...]], known: Collection[str]) -> tuple[str, ...]:
    """What is meant by ``name``: itself, if something is called so, or what it stands for in ``table``."""
    return (name,) if name in known else table.get(name, (name,))


def spread(name: str, value: Any, targets: tuple[str, ...]) -> dict[str, Any]:
    """A hyperparameter's value under the core's names.

    Raises:
        ValueError: It stands for several numbers, and is another number of them.
    """
    if len(targets) == 1:
        return {targets[0]: value}
    if not isinstance(value, (tuple, list)) or len(value) != len(targets):
        raise ValueError(f"{name}: got {value!r}; accepted are {len(targets)} numbers.")
    return dict(zip(targets, value, strict=True))
