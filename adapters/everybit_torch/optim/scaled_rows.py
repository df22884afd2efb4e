"""Rows of weights times factors, between steps: of stored weights and their residuals together, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import everybit as eb
from everybit_torch.optim.changes import Region
from everybit_torch.optim.parameters import Own, Parameters
from everybit_torch.optim.state_dicts.full_precision import rewrite_at_owners
from everybit_torch.segments import write
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
            _scale(parameters, own, _of_elements(own.parameter, factors[id(own.parameter)], region_of(own.parameter)))
    for visiting in parameters.visiting:
        scaled = {
            id(one.parameter): _of_elements(one.parameter, factors[id(one.parameter)], Region.of(one.parameter))
            for one in visiting.members
            if id(one.parameter) in factors
        }
        if scaled:
            members, watch = [one.parameter for one in visiting.members], parameters.watch
            if watch is not None:
                watch.look(members)
            rewrite_at_owners(visiting, scaled)  # which notes changes
            if watch is not None:
                watch.note(members)


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


def _scale(parameters: Parameters, own: Own, factors: Tensor) -> None:
    segment, watch = own.segment(), parameters.watch
    if watch is not None:
        watch.look([own.parameter])
    ctx = eb.Context(first_element=segment.first)
    state = segment.here().state
    (weights,) = segment.optimizer.export_fp32([segment.tensor], state)
    weights = weights * factors.to(weights.dtype).reshape(weights.shape)
    (stored,), scaled = segment.optimizer.import_fp32([weights], [segment.tensor], state, ctx)
    watched = own.stepped.of.watched(own.number)
    if watched is not None:
        watched.note(segment.tensor.reshape(watched.mask.shape), stored.reshape(watched.mask.shape))
    write(segment.state.extra, scaled.extra)
    own.write(stored)
    if watch is not None:
        watch.note([own.parameter])
