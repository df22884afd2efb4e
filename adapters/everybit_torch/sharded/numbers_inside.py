"""The numbers inside a transform, by name: read out, and put back changed.

Transforms are frozen dataclasses with hyperparameters as fields, so that a composed transform can be shown to a learning rate
scheduler without having been made by a factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import everybit as eb
from everybit.protocol import fields_of, is_transform, map_hyperparameters, transforms_in
from everybit.protocol import hyperparameters as numbers_in
from everybit_torch.arguments import FIELDS, core_names

RESERVED = ("params", "param_names", "label", "policy")
"""Keys of param groups that are no hyperparameters."""


def hyperparameters(transform: eb.Transform[Any]) -> dict[str, Any]:
    """The numbers and 0-d tensors in a transform's fields, nested fields included, by torch's names.

    A name that comes with two values in different places, that a schedule fills, or that param groups have a use of their own for, is left
    out: there is no way to set it.
    """
    single = _single(transform)
    return {
        name: tuple(single[field] for field in (first, *rest)) if rest else single[first]
        for name, (first, *rest) in hyperparameter_fields(transform).items()
    }


def hyperparameter_fields(transform: eb.Transform[Any]) -> dict[str, tuple[str, ...]]:
    """Under which names :func:`hyperparameters` shows which fields."""
    left = list(_single(transform))
    called = {name for name, _ in numbers_in(transform)} | _scheduled(transform)
    shown: dict[str, tuple[str, ...]] = {}
    for torch_name in FIELDS:
        fields = core_names(torch_name, FIELDS, called)
        if all(field in left for field in fields):
            shown[torch_name] = fields
            left = [field for field in left if field not in fields]
    return shown | {field: (field,) for field in left}


def _single(transform: eb.Transform[Any]) -> dict[str, Any]:
    """The names of the fields to which one number may be given."""
    found: dict[str, list[Any]] = {}
    for name, value in numbers_in(transform):
        found.setdefault(name, []).append(value)
    scheduled = _scheduled(transform)
    return {
        name: values[0]
        for name, values in found.items()
        if name not in scheduled
        and name not in RESERVED
        and all(value is values[0] or value == values[0] for value in values)
    }


def with_hyperparameters(transform: eb.Transform[Any], values: Mapping[str, Any]) -> eb.Transform[Any]:
    """``transform`` with the numbers of these names replaced, wherever in it they are. Names are the fields' own."""
    return map_hyperparameters(lambda name, value: values.get(name, value), transform)


@dataclass(frozen=True, slots=True)
class WithNumbers:
    """Makes a transform with other numbers, by the names of the fields.

    Attributes:
        transform: The transform, with its present numbers.
    """

    transform: eb.Transform[Any]

    def __call__(self, **fields: Any) -> eb.Transform[Any]:
        """The transform with these numbers."""
        return with_hyperparameters(self.transform, fields)


def _scheduled(transform: Any) -> set[str]:
    """Fields that hold a schedule somewhere: their value cannot be set."""
    return {
        field.name
        for node in transforms_in(transform)
        for field in fields_of(node)
        if callable(value := getattr(node, field.name))
        and not isinstance(value, (type, Tensor))
        and not is_transform(value)
    }
