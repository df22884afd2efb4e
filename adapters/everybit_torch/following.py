"""Parameters that were given other memory since they were placed: followed where they went, or brought back.

A parameter of a buffer that was given other memory in the usual order returns to its place there, with its new values. One whose elements
lie in another order now (transposed, channels last), or that shares memory with another parameter, is stepped where it lies from here on.
So is every parameter that is no part of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from everybit_torch.dtensors import local
from everybit_torch.gradients import piece
from everybit_torch.memory import has_repeated_elements, sharing
from everybit_torch.units import Unit, is_shared


def require_followable(units: Sequence[Unit], parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that cannot be followed; nothing is changed.

    Args:
        units: All there are.
        parameters: All there are.

    Raises:
        RuntimeError: A parameter has another dtype, device or shape, memory that cannot be written to or that other processes see, or
            memory of another parameter and a residual of its own.
    """
    tied: set[int] | None = None
    for unit in units:
        if unit.in_place():
            continue
        tied = _tied(parameters) if tied is None else tied
        for index in unit.moved():
            member = unit.members[index]
            tensor, parameter = unit.tensor, local(member.parameter)
            shape = unit.placed_shape(index)
            where = f"param group {unit.group}: a parameter of shape {tuple(parameter.shape)}"
            if (parameter.dtype, parameter.device, parameter.shape) != (tensor.dtype, tensor.device, shape):
                raise RuntimeError(
                    f"{where} is {parameter.dtype} on {parameter.device} now, but was {tensor.dtype} on {tensor.device} with shape"
                    f" {tuple(shape)} when the optimizer first stepped. Change the model first; a state_dict carries the state of"
                    " parameters of the same shapes to a new optimizer."
                )
            if unit.flat and is_shared(parameter):
                raise RuntimeError(
                    f"{where} was moved to shared memory since the optimizer first stepped. Call model.share_memory() before that, or"
                    " send a state_dict instead of the model."
                )
            if has_repeated_elements(parameter):
                raise RuntimeError(
                    f"{where} has strides {parameter.stride()} now: several of its elements are one place in memory (expand), which a"
                    " step cannot write; clone it."
                )
            keeps_rest = unit.stored is not None and len(unit.stored.params.parts()) > 1
            if id(member.parameter) in tied and keeps_rest:
                raise RuntimeError(
                    f"{where} was given memory of another parameter since the optimizer first stepped, and what is kept for it was kept"
                    " for weights of its own. To tie two weights let them be one Parameter, before the first step."
                )


def follow(units: Sequence[Unit], parameters: Sequence[Tensor]) -> tuple[list[Unit], list[Unit]]:
    """Follow every parameter, or bring it back; :func:`require_followable` comes before.

    Args:
        units: All there are; those of parameters that leave a buffer are cut.
        parameters: All there are.

    Returns:
        The units; and those of them whose state is to be shown anew.
    """
    tied = _tied(parameters)
    found: list[Unit] = []
    changed: list[Unit] = []
    returning: list[tuple[Tensor, Tensor]] = []
    for unit in units:
        leaving: set[int] = set()
        state = unit.state
        for index in [] if unit.in_place() else unit.moved():
            member = unit.members[index]
            parameter = member.parameter
            if not unit.flat:
                _step_where_it_lies(unit, local(parameter).detach())
            elif parameter.is_contiguous() and id(parameter) not in tied:
                place = piece(unit.tensor, member.start, member.stop, parameter.shape)
                returning.append((parameter, place))
            else:
                leaving.add(index)
        parts = _without(unit, leaving) if leaving else [unit]
        found += parts
        changed += parts if leaving or unit.state is not state else []
    # Two parameters may have exchanged their places: all are read before any is written.
    exchanged = sharing([parameter.detach() for parameter, _ in returning] + [place for _, place in returning])
    values = [parameter.detach().clone() if exchanged else parameter.detach() for parameter, _ in returning]
    for (parameter, place), value in zip(returning, values, strict=True):
        place.copy_(value)
        parameter.data = place
    for unit in found:
        unit.note_places()
    return found, changed


def _tied(parameters: Sequence[Tensor]) -> set[int]:
    """Parameters, by id, that share memory with another."""
    here = [p for p in parameters if not is_lazy(p)]
    return {id(here[number]) for pair in sharing([local(p) for p in here]) for number in pair}


def _without(unit: Unit, leaving: set[int]) -> list[Unit]:
    """Cut a flat unit: the members with these numbers are units of their own, which lie where they lie."""
    count = len(unit.members)
    edges = sorted({edge for index in leaving for edge in (index, index + 1) if 0 < edge < count})
    out = {id(unit.parameters[index]) for index in leaving}
    parts = list(unit.split(edges)) if edges else [unit]
    for part in parts:
        if id(part.parameters[0]) in out:
            if part.gradients is not None:
                # Its place in a buffer of gradients is no gradient by itself; and autograd expects a gradient in the parameter's order.
                (parameter,), (grad,) = part.parameters, part.collect()
                parameter.grad = None if grad is None else torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
            part.leave_buffer()
            _step_where_it_lies(part, part.parameters[0].detach())
    return parts


def _step_where_it_lies(unit: Unit, tensor: Tensor) -> None:
    """Let a unit's tensor be this memory. State was in the order of the elements' indices, and has their shape from here on."""
    if unit.tensor.ndim == 1 and tensor.is_contiguous():
        unit.tensor = tensor.view(-1)
        return
    if unit.tensor.ndim == 1 and tensor.ndim != 1:
        unit.reshape_state(tensor.shape)
    unit.tensor = tensor
