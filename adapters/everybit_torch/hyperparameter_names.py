"""The names of hyperparameters in ``torch.optim`` and in the core: one table for every front end.

torch's name stands for the core's only where no argument has torch's name itself: an argument ``lr`` or ``alpha`` of a user's factory, or a
field ``alpha`` of a user's transform, keeps its own meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

FIELDS: Mapping[str, tuple[str, ...]] = {"lr": ("learning_rate",), "betas": ("b1", "b2")}
"""torch's names, and the fields of transforms that they stand for."""

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **FIELDS,
    "alpha": ("decay",),
    "eps": ("eps1", "eps2"),
    "etas": ("shrink", "grow"),
    "step_sizes": ("min_step", "max_step"),
}
"""torch's names, and the arguments of factories. ``decay`` is RMSprop's ``alpha`` there; as a field it may be a momentum's as well.
The pairs are Adafactor's and Rprop's."""


def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a factory's arguments; empty if it has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def core_names(name: str, table: Mapping[str, tuple[str, ...]], known: Collection[str]) -> tuple[str, ...]:
    """Return ``name`` itself if it is known, or the names for which it stands in ``table``."""
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


def torch_arguments(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return a factory's arguments by torch's names, where torch has one for them, each with the arguments that it stands for."""
    own = dict.fromkeys(names)
    table = {name: cores for name, cores in ARGUMENTS.items() if name not in own and own.keys() >= set(cores)}
    by_core = {core: name for name, cores in table.items() for core in cores}
    return {name: table.get(name, (name,)) for name in dict.fromkeys(by_core.get(one, one) for one in own)}


def torch_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a factory's arguments, by torch's names."""
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
    found: dict[str, Any] = {}
    for name, cores in torch_arguments(defaults).items():
        values = tuple(defaults[core] for core in cores)
        found[name] = values[0] if len(values) == 1 else values
    return found
