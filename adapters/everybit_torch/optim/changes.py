"""The weights that changed, by name and index: taken where new weights are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everybit.base import DTYPES
from everybit_torch.optim.param_groups import names_of
from everybit_torch.optim.parameters import Parameters
from everybit_torch.optim.watching import Watch
from everybit_torch.placements import Region
from everybit_torch.torch_internals.dtensors import local

Change = tuple[str, Tensor, Tensor]
"""A parameter's name, the flat indices of the elements that changed, and their values."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A parameter of which changes are taken.

    Attributes:
        name: Its name.
        parameter: The parameter.
        region: Where its elements lie in the whole.
        mask: The mask of its elements; None: it has no state yet.
    """

    name: str
    parameter: Tensor
    region: Region
    mask: Tensor | None


class Changed:
    """The changes of all parameters since they were taken last. Iterating takes them, once: each parameter as it is reached.

    Yields:
        For each parameter, in the order of the param groups, its name, the flat indices in the whole parameter of the elements that changed
        (1-d, in ascending order: int32, or int64 for parameters of more than 2**31 elements), and their values (1-d, in the watched dtype).
        Both lie on the parameter's device. A parameter without changes has empty tensors, so that all ranks have the same names.

    Attributes:
        whole: The names of the parameters of which everything is named: at the first call, after a load, an import, or a write by other
            code.
    """

    def __init__(self, watch: Watch, rows: Sequence[_Taken]) -> None:
        self._watch, self._rows = watch, list(rows)
        self.whole = tuple(one.name for one in rows if not watch.knows(one.parameter))

    def __iter__(self) -> Iterator[Change]:
        rows, self._rows = self._rows, []
        for one in rows:
            yield one.name, *self._take(one)

    def discard(self) -> None:
        """Take all changes without naming them: the receiver has the present weights."""
        rows, self._rows = self._rows, []
        for one in rows:
            self._clear(one)

    def _clear(self, one: _Taken) -> None:
        if one.mask is not None:
            one.mask.zero_()
        self._watch.begin(one.parameter)

    @torch.no_grad()
    def _take(self, one: _Taken) -> tuple[Tensor, Tensor]:
        weights = local(one.parameter).detach().reshape(-1)
        if not self._watch.knows(one.parameter):
            found = torch.arange(weights.numel(), device=weights.device)
        elif one.mask is None:
            found = torch.arange(0, device=weights.device)
        else:
            found = one.mask.reshape(-1).nonzero().view(-1)
        self._clear(one)
        return one.region.in_whole(found), weights[found].to(DTYPES[self._watch.dtype])


def changed(
    own: Parameters, param_groups: Sequence[dict[str, Any]], region_of: Callable[[str, Tensor], Region]
) -> Changed:
    """Return the changes of an optimizer's parameters.

    Args:
        own: The parameters; they are watched.
        param_groups: The param groups, which have their names.
        region_of: Where this rank's elements of a parameter lie.
    """
    assert own.watch is not None
    masks = {id(one.parameter): one.stepped.of.watched(one.number) for one in own.own()}
    masks |= {id(member.parameter): member.visitor.watched for member in own.visited()}
    rows = []
    for number, group in enumerate(param_groups):
        for name, parameter in zip(names_of(number, group), group["params"], strict=True):
            watched = masks.get(id(parameter))
            mask = None if watched is None else watched.mask
            rows.append(_Taken(name, parameter, region_of(name, parameter), mask))
    return Changed(own.watch, rows)
