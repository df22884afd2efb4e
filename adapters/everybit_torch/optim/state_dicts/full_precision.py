"""Weights and state in full precision: decoded, and encoded again under any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import DTYPES
from everybit.stepping import OptimizerState
from everybit.stepping.entries import WEIGHTS, Entry, entries
from everybit_torch.optim.parameters import Parameters, shown
from everybit_torch.optim.visiting import Visited, Visiting
from everybit_torch.optim.visits import entries_of
from everybit_torch.placements import like
from everybit_torch.segments import Segment, write
from everybit_torch.torch_internals.dtensors import local


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
        """Root of the mean squared difference, relative to that of the values; 0 without a difference."""
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


Export = Callable[[eb.Optimizer[Any], list[Tensor], OptimizerState[Any]], list[Tensor]]
"""Weights in the compute dtype, of an optimizer's parameters and state."""


def decoded_all(parameters: Parameters) -> dict[int, dict[str, Tensor]]:
    """Return, by id, each parameter's state and weights in the compute dtype, in its shape."""
    found: dict[int, dict[str, Tensor]] = {}
    for own in parameters.own():
        segment = own.segment()
        weights, state = _decode(segment)
        in_shape = like(own.parameter, weights.reshape(local(own.parameter).shape))
        values = entries(segment.layout, state, decoded=True)
        found[id(own.parameter)] = shown(own.parameter, values) | {WEIGHTS: in_shape}
    for visiting in parameters.visiting:
        found |= {id(member.parameter): x for member, x in visiting.hand_out(_decoded, weights=True)}
    return found


Given = Mapping[int, Mapping[str, Tensor]]
"""Entries of state by id of the parameter."""


def load_all(parameters: Parameters, given: Given) -> None:
    """Write entries of state, as stored. Parameters without any are as before their first step."""
    parameters.note_loading()
    parameters.come_apart_by_shared(given)
    for own in parameters.own():
        values = given.get(id(own.parameter))
        if values is None:
            _load(own.segment(), None)
        else:
            fill(own.entries(), values)
    for visiting in parameters.visiting:
        visiting.take(given, _load, entries_of, weights=any(id(one.parameter) not in given for one in visiting.members))


def encode_all(parameters: Parameters, given: Given) -> dict[str, RoundingLoss]:
    """Store full-precision state, and weights (``"param"``) where they are given. Parameters without any are as before their first step.

    Returns:
        The loss by rounding, by name.
    """
    parameters.note_loading()
    parameters.come_apart_by_shared(given)
    total: dict[str, RoundingLoss] = {}

    def store(segment: Segment, values: Mapping[str, Tensor] | None) -> Tensor | None:
        if values is None:
            _load(segment, None)
            return None
        weights, losses = _encode(segment, values)
        for name, loss in losses.items():
            total[name] = total[name] + loss if name in total else loss
        return weights

    def store_at_owner(segment: Segment, values: Mapping[str, Tensor] | None) -> None:
        weights = store(segment, values)
        if weights is not None:
            segment.tensor = weights

    for own in parameters.own():
        weights = store(own.segment(), given.get(id(own.parameter)))
        if weights is not None:
            own.write(weights)
    for visiting in parameters.visiting:
        visiting.take(given, store_at_owner, _decoded, weights=True)
    return total


def export_all(parameters: Parameters, of: Export = eb.Optimizer.export_fp32) -> dict[int, Tensor]:
    """Return, by id, each parameter's weights in its shape: with all the precision that is stored, or as ``of`` gives them."""
    found = {}
    for own in parameters.own():
        weights = exported(own.segment(), of)
        found[id(own.parameter)] = like(own.parameter, weights.reshape(local(own.parameter).shape))
    for visiting in parameters.visiting:
        for member, x in visiting.hand_out(lambda segment: {WEIGHTS: exported(segment, of)}, weights=True):
            found[id(member.parameter)] = x[WEIGHTS]
    return found


def store_all(parameters: Parameters, given: Mapping[int, Tensor]) -> None:
    """Store full-precision weights, by id of the parameter; state stays as it is, but for residuals."""
    parameters.note_loading()
    for own in parameters.own():
        own.write(store(own.segment(), local(given[id(own.parameter)])))
    for visiting in parameters.visiting:
        store_at_owners(
            visiting, {id(one.parameter): _widened(given[id(one.parameter)], one) for one in visiting.members}
        )


def exported(segment: Segment, of: Export = eb.Optimizer.export_fp32) -> Tensor:
    """Return a segment's weights in full precision, or as ``of`` gives them."""
    (weights,) = of(segment.optimizer, [segment.tensor], segment.here().state)
    return weights


def store(segment: Segment, weights: Tensor) -> Tensor:
    """Store the residuals of full-precision weights in a segment's state; return the weights as they are stored."""
    here = weights.to(segment.tensor.device).reshape(segment.tensor.shape)
    ctx = eb.Context(first_element=segment.first)
    params, state = segment.optimizer.import_fp32([here], [segment.tensor], segment.here().state, ctx)
    write(segment.state.extra, state.extra)
    return params[0]


def store_at_owners(visiting: Visiting, given: Mapping[int, Tensor]) -> None:
    """Store full-precision weights of parameters that visit owners, of which ranks have rows, by id. Every rank has to call it."""

    def take(segment: Segment, values: Mapping[str, Tensor] | None) -> None:
        assert values is not None
        segment.tensor = store(segment, values[WEIGHTS])

    steps = [one.step.clone() for one in visiting.members]
    visiting.take({key: {WEIGHTS: x} for key, x in given.items()}, take, _weights, weights=True)
    for one, step in zip(visiting.members, steps, strict=True):
        one.step.copy_(step)


def _widened(weights: Tensor, member: Visited) -> Tensor:
    """Weights in the dtype in which they travel."""
    (stored,) = member.optimizer.formats([torch.empty(0, dtype=member.parameter.dtype)])
    return weights.to(DTYPES[stored.policy.compute])


def _weights(segment: Segment) -> dict[str, Tensor]:
    wide = DTYPES[segment.stored.policy.compute]
    return {WEIGHTS: torch.empty(segment.tensor.shape, dtype=wide, device=segment.tensor.device)}


def _decoded(segment: Segment) -> dict[str, Tensor]:
    weights, state = _decode(segment)
    return {entry.name: value for entry, value in entries(segment.layout, state, decoded=True)} | {WEIGHTS: weights}


def _load(segment: Segment, given: Mapping[str, Tensor] | None) -> None:
    """Write entries of a segment's state, as stored; None: it is as before its first step."""
    if given is None:
        write(segment.state, Segment.new(segment.optimizer, segment.tensor, segment.first).state)
    else:
        fill(segment.entries(), given)


def fill(state: Iterable[tuple[Entry, Tensor]], given: Mapping[str, Tensor]) -> None:
    """Write entries, as stored, into the tensors of a state."""
    for entry, held in state:
        if entry.name in given:
            held.copy_(local(given[entry.name]).reshape(held.shape))


def _encode(segment: Segment, given: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, RoundingLoss]]:
    """Store full-precision state; return stored weights, if weights were given, and what rounding lost."""
    weights, state = _decode(segment)
    into = {entry.name: value for entry, value in entries(segment.layout, state, decoded=True)} | {WEIGHTS: weights}
    for name, value in given.items():
        into[name].copy_(local(value).reshape(into[name].shape))
    ctx = eb.Context(first_element=segment.first)
    (params,), stored = segment.optimizer.encode([weights], state, [segment.tensor], ctx)
    moved = params if WEIGHTS in given else None
    if moved is not None:
        write(segment.state, stored)
    else:
        write((segment.state.step, segment.state.inner), (stored.step, stored.inner))
    tensor = segment.tensor if moved is None else moved
    after = Segment(segment.optimizer, tensor, segment.state, segment.first, host=segment.host)
    found = _decoded(after)
    losses = {
        name: rounding_loss(local(value).to(found[name].device).reshape(found[name].shape), found[name])
        for name, value in given.items()
        if value.is_floating_point()
    }
    return moved, losses


def _decode(segment: Segment) -> tuple[Tensor, OptimizerState[Any]]:
    (weights,), state = segment.optimizer.decode([segment.tensor], segment.here().state)
    return weights, state
