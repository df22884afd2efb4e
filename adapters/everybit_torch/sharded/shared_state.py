"""State that parameters share because they are stepped at once: counts, and other single numbers that a transform keeps.

A checkpoint has them for each parameter, since who is stepped with whom differs from run to run. Where what was saved differs between
parameters that are stepped at once here, they are stepped apart from then on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everybit.entries import fields as named_fields
from everybit_torch.optimizer import TorchOptimizer
from everybit_torch.units import Unit

Given = Mapping[int, Mapping[str, Tensor]]
"""State entries, by id of the parameter."""


def shared_names(unit: Unit) -> frozenset[str]:
    """Return the names of entries that are kept once for all members of a unit."""
    return frozenset(name for name, _, is_slot in named_fields(unit.state) if not is_slot)


def split(optimizer: TorchOptimizer, given: Given) -> None:
    """Cut flat units between members to which different numbers were given."""
    units: list[Unit] = []
    for unit in optimizer._units:
        values = _values(unit, given)
        boundaries = [number for number in range(1, len(values)) if values[number] != values[number - 1]]
        units += unit.split(boundaries) if unit.flat and boundaries else [unit]
    optimizer._units = units
    for unit in units:
        optimizer._publish(unit)


def adopt(optimizer: TorchOptimizer, given: Given) -> None:
    """Take over the shared numbers among what is given, of which every parameter has all."""
    split(optimizer, given)
    for unit in optimizer._units:
        for name, value, is_slot in named_fields(unit.state):
            if not is_slot and unit.members:
                value.copy_(given[id(unit.members[0].parameter)][name])


def _values(unit: Unit, given: Given) -> list[tuple[bytes | None, ...]]:
    """Return for each member the bits of the shared values that it is given; None for those that it is not given."""
    names = sorted(shared_names(unit))
    return [
        tuple(_bits(entries[name]) if name in entries else None for name in names)
        for entries in (given.get(id(member.parameter), {}) for member in unit.members)
    ]


def _bits(number: Tensor) -> bytes:
    return bytes(number.detach().reshape(1).view(torch.uint8).tolist())
