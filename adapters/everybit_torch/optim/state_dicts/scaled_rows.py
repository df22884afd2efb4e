"""Rows of weights times factors, between steps: of stored weights and their residuals together, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from everybit.stepping.entries import WEIGHTS
from everybit_torch.optim.parameters import Own, Parameters
from everybit_torch.optim.state_dicts.full_precision import exported, store, store_at_owners
from everybit_torch.optim.visiting import Visiting
from everybit_torch.optim.watching import Watch
from everybit_torch.placements import Region
from everybit_torch.torch_internals.dtensors import local


def scale_rows(parameters: Parameters, factors: Mapping[int, Tensor], region_of: Callable[[Tensor], Region]) -> None:
    """Multiply rows of parameters by factors; every rank has to call it if parameters visit owners.

    Args:
        parameters: All there are.
        factors: A factor for each row of the whole parameter, by the parameter's id.
        region_of: Where this rank's elements of a parameter lie in the whole.
    """
    for own in parameters.own():
        if id(own.parameter) in factors:
            with _noted(parameters.watch, [own.parameter]):
                _scale(own, _of_elements(own.parameter, factors[id(own.parameter)], region_of(own.parameter)))
    for visiting in parameters.visiting:
        if any(id(one.parameter) in factors for one in visiting.members):
            with _noted(parameters.watch, [one.parameter for one in visiting.members]):
                _scale_at_owners(visiting, factors)


@contextmanager
def _noted(watch: Watch | None, written: Sequence[Tensor]) -> Iterator[None]:
    """Let what is written inside count as changes that are in the masks."""
    if watch is not None:
        watch.look(written)
    yield
    if watch is not None:
        watch.note(written)


def _scale_at_owners(visiting: Visiting, factors: Mapping[int, Tensor]) -> None:
    wide = {}
    for one, x in visiting.hand_out(lambda segment: {WEIGHTS: exported(segment)}, weights=True):
        wide[id(one.parameter)] = x[WEIGHTS]
        if id(one.parameter) in factors:
            local(x[WEIGHTS]).mul_(_of_elements(one.parameter, factors[id(one.parameter)], Region.of(one.parameter)))
    store_at_owners(visiting, wide)


def _of_elements(parameter: Tensor, factors: Tensor, region: Region) -> Tensor:
    """The factor of each element of this rank's part, or one for each of its rows, in a shape that multiplies the part."""
    here = local(parameter)
    given = factors.to(here.device)
    if len(region.shape) > 1 and region.shape[1:] == region.whole[1:]:
        rows = given[region.offsets[0] : region.offsets[0] + region.shape[0]]
        return rows.reshape(-1, *(1,) * (here.ndim - 1)).expand(here.shape)
    indices = region.in_whole(torch.arange(here.numel(), device=here.device)).long()
    length = torch.Size(region.whole).numel() // max(len(given), 1)
    return given[indices // max(length, 1)].reshape(here.shape)


def _scale(own: Own, factors: Tensor) -> None:
    segment = own.segment()
    weights = exported(segment)
    stored = store(segment, weights * factors.to(weights.dtype).reshape(weights.shape))
    watched = own.stepped.of.watched(own.number)
    if watched is not None:
        watched.note(segment.tensor.reshape(watched.mask.shape), stored.reshape(watched.mask.shape))
    own.write(stored)
