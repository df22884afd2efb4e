"""The parameters that share reductions: their numbers and sizes, and which of them a unit's elements belong to.

A transform that asks for a number of each whole parameter is answered with one vector, which has a place for every parameter that takes
part, on every rank the same one. Each unit adds what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import everybit as eb
from everybit_torch.units import Unit


class ParameterTable:
    """Numbers and sizes of all parameters that share reductions.

    Args:
        numbers: By id of the tensor that a unit has for a parameter, the parameter's number.
        sizes: Number of elements of each whole parameter, in the order of the numbers.
    """

    def __init__(self, numbers: Mapping[int, int], sizes: Sequence[int]) -> None:
        self._numbers, self._sizes = numbers, sizes
        self._on: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> ParameterTable:
        """Number whole parameters in order; one that comes twice has one number."""
        different = list({id(p): p for p in parameters}.values())
        # Those of lazy modules without a shape are numbered; they have no gradient.
        sizes = [0 if is_lazy(p) else p.numel() for p in different]
        return cls({id(p): number for number, p in enumerate(different)}, sizes)

    def describe(self, unit: Unit) -> None:
        """Let a unit say which parameters its elements belong to."""
        if unit.table is self:
            return
        device = unit.tensor.device
        numbers = [self._numbers[id(member.parameter)] for member in unit.members]
        # A gap counts as the parameter's before it: it is zero in every reduction.
        edges = [*(member.start for member in unit.members), unit.tensor.numel()] if unit.members else [0]
        unit.whole = eb.Members(
            torch.tensor(numbers, dtype=torch.int64, device=device),
            torch.tensor(edges, dtype=torch.int64, device=device),
            self._sizes_on(device),
        )
        unit.table = self

    def _sizes_on(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = torch.tensor(self._sizes, dtype=torch.float64, device=device)
        return self._on[device]


def members_of(unit: Unit) -> tuple[eb.Members, ...] | None:
    """The members of a unit, or of a piece of one, as a context has them; None if nobody described it."""
    return None if unit.whole is None else (unit.whole,)


def no_members_of(unit: Unit) -> tuple[eb.Members, ...] | None:
    """Return members that have no elements, in the form of :func:`members_of`."""
    return None if unit.whole is None else (unit.whole.cut(0, 0),)
