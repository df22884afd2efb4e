"""Weights and state in full precision: what the stored bits stand for, read out, and stored again under any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, FirstElement
from everybit.stepping import OptimizerState
from everybit.stepping.entries import WEIGHTS
from everybit_torch.dtensors import like, local
from everybit_torch.gradients import gather_with_gaps
from everybit_torch.units import Member, Unit, init_state, write
from everybit_torch.work_rows import stored_work

PIECE = 1 << 18
"""Elements for which :func:`begin_at` is called at a time, where there are many."""


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """The error of storing values in a coarser format.

    Attributes:
        largest: The greatest absolute difference.
        error: Sum of the squared differences.
        total: Sum of the squared values.
    """

    largest: float
    error: float
    total: float

    @property
    def relative(self) -> float:
        """Root of the mean squared difference, relative to that of the values; 0 if nothing was lost."""
        return (self.error / self.total) ** 0.5 if self.error else 0.0

    def __add__(self, other: RoundingLoss) -> RoundingLoss:
        return RoundingLoss(max(self.largest, other.largest), self.error + other.error, self.total + other.total)

    def __str__(self) -> str:
        return f"largest {self.largest:.3g}, relative {self.relative:.3g}" if self.error else "exact"


def rounding_loss(value: Tensor, stored: Tensor) -> RoundingLoss:
    """Measure the error of ``stored`` as a copy of ``value``."""
    difference = stored.double() - value.double()
    # Infinities and NaN that were carried over are no loss.
    difference = torch.where((stored == value) | (stored.isnan() & value.isnan()), 0.0, difference)
    largest = float(difference.abs().max()) if value.numel() else 0.0
    return RoundingLoss(largest, float(difference.square().sum()), float(value.double().square().sum()))


class LoadReport(dict[str, RoundingLoss]):
    """What loading a state dict has lost, by name of the slot (``"param"``: the weights), and which parameters were left out.

    Attributes:
        missing_keys: Names of the optimizer's parameters that the state dict does not have; these keep their state.
        unexpected_keys: Names in the state dict that the optimizer does not have.
    """

    def __init__(self, losses: Mapping[str, RoundingLoss], missing: Iterable[str], unexpected: Iterable[str]) -> None:
        super().__init__(losses)
        self.missing_keys, self.unexpected_keys = list(missing), list(unexpected)


Stepped = Iterable[tuple[Unit, eb.Optimizer[Any]]]
"""Units with their optimizers."""


def decoded(stepped: Stepped) -> dict[int, dict[str, Tensor]]:
    """Return, by id of each parameter, its state and weights in the compute dtype, in its shape."""
    found: dict[int, dict[str, Tensor]] = {}
    for unit, optimizer in stepped:
        weights, wide = _decoded_unit(unit, optimizer)
        for m in unit.members:
            found[id(m.parameter)] = wide.published(m) | {WEIGHTS: like(m.parameter, _share(m, weights))}
    return found


def encode(
    unit: Unit, optimizer: eb.Optimizer[Any], given: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, RoundingLoss]:
    """Store full-precision state, and weights where there are any, in a unit; members without are as before their first step.

    Returns:
        By name, what rounding lost.
    """
    if any(id(parameter) not in given for parameter in unit.parameters):
        write(unit.state, init_state(optimizer, unit.tensor, unit.first, parameters=unit.parameters))
    here = [member for member in unit.members if id(member.parameter) in given]
    if not here:
        return {}
    weights, wide = _decoded_unit(unit, optimizer)
    for member in here:
        into = wide.named_state(member) | {WEIGHTS: _share(member, weights)}
        for name, value in given[id(member.parameter)].items():
            into[name].copy_(local(value))
    params, state = optimizer.encode([weights], wide.state, [unit.tensor], eb.Context(first_element=unit.first))
    if unit.work is not None and wide.work is not None:
        stored = stored_work(optimizer, unit.work.parameter, unit.first).encode(wide.work.gathered(state), state.step)
        state = unit.work.given_out(state, stored)
    moved = any(WEIGHTS in given[id(member.parameter)] for member in here)
    if moved:
        write(([unit.tensor], unit.state), (params, state))
    else:
        write((unit.state.step, unit.state.inner), (state.step, state.inner))
    now, after = _decoded_unit(unit, optimizer)
    losses: dict[str, RoundingLoss] = {}
    for member in here:
        stored = after.named_state(member) | {WEIGHTS: _share(member, now)}
        for name, value in given[id(member.parameter)].items():
            if value.is_floating_point():
                loss = rounding_loss(local(value).to(stored[name].device), stored[name])
                losses[name] = losses[name] + loss if name in losses else loss
    return losses


Export = Callable[[eb.Optimizer[Any], list[Tensor], OptimizerState[Any]], list[Tensor]]
"""Weights in the compute dtype, of an optimizer's parameters and state."""


def export_weights(stepped: Stepped, export: Export = eb.Optimizer.export_fp32) -> dict[int, Tensor]:
    """Return, by id of each parameter, its weights in its shape: with all the precision that is stored, or as ``export`` gives them."""
    found: dict[int, Tensor] = {}
    for unit, optimizer in stepped:
        (weights,) = export(optimizer, [unit.tensor], unit.state)
        found |= {id(m.parameter): like(m.parameter, _share(m, weights)) for m in unit.members}
    return found


def import_weights(stepped: Stepped, given: Mapping[int, Tensor]) -> None:
    """Store full-precision weights, by id of the parameter; state stays as it is, but for residuals."""
    for unit, optimizer in stepped:
        pieces = [local(given[id(p)]).to(unit.tensor.device) for p in unit.parameters]
        ranges = [(member.start, member.stop) for member in unit.members]
        weights = gather_with_gaps(pieces, ranges, unit.tensor.numel()).view(unit.tensor.shape)
        write(
            ([unit.tensor], unit.state),
            optimizer.import_fp32([weights], [unit.tensor], unit.state, eb.Context(first_element=unit.first)),
        )


def export_piece(optimizer: eb.Optimizer[Any], tensor: Tensor, state: OptimizerState[Any], into: Tensor) -> None:
    """Write the weights of a unit, or of a piece of one, with all the precision that is stored.

    Args:
        optimizer: How they are stored.
        tensor: The parameter.
        state: Of it.
        into: Of as many elements.
    """
    (weights,) = optimizer.export_fp32([tensor], state)
    into.view(weights.shape).copy_(weights)


def begin_again(optimizer: eb.Optimizer[Any], tensor: Tensor, state: OptimizerState[Any], first: FirstElement) -> None:
    """Have what is kept beside a parameter be that of its present values; moments and counts stay.

    Args:
        optimizer: How it is stored.
        tensor: The parameter.
        state: Of it, which is written to.
        first: The global indices of the elements.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    write(
        state.extra, optimizer.import_fp32([tensor.to(wide)], [tensor], state, eb.Context(first_element=first))[1].extra
    )


def pieces_of(block: int) -> int:
    """The most elements of a unit whose state is made, or read, at a time, where no block is cut."""
    return max(PIECE // block, 1) * block


def begin_at(
    optimizer: eb.Optimizer[Any], weights: Tensor, like: Tensor, step: Tensor, first: int | Blocks
) -> tuple[list[Tensor], OptimizerState[Any]]:
    """Return the parameter and the state before a first step that begins at these weights, with all of their bits that are kept.

    Args:
        optimizer: How they are stored.
        weights: In the compute dtype.
        like: The parameter, whose values do not matter.
        step: The count of steps.
        first: The global indices of the elements.
    """
    begun = OptimizerState(step, [()], optimizer.transform.init([weights.clone()]))
    return optimizer.encode([weights], begun, [like], eb.Context(first_element=first))


def _decoded_unit(unit: Unit, optimizer: eb.Optimizer[Any]) -> tuple[Tensor, Unit]:
    (weights,), state = optimizer.decode([unit.tensor], unit.state)
    work = unit.work
    if work is not None:
        # What is decoded is the whole: a factor's blocks do not end where rows do.
        whole = stored_work(optimizer, work.parameter, unit.first).decode(work.gathered(unit.state), state.step)
        work = work.of_values(optimizer, state.step)
        state = work.given_out(state, whole)
    return weights, Unit(unit.group, unit.tensor, unit.members, state, unit.first, unit.flat, work=work)


def _share(member: Member, weights: Tensor) -> Tensor:
    """A parameter's share of a unit's weights, in its shape."""
    shape = local(member.parameter).shape
    return weights[member.start : member.stop].view(shape) if weights.ndim == 1 else weights.reshape(shape)
