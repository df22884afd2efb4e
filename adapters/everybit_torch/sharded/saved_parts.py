"""The parts of a stepper's model and optimizer that a rank saves, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everybit.entries import Entry
from everybit_torch.dtensors import local
from everybit_torch.sharded.layout import Slice
from everybit_torch.sharded.saved_fit import elements
from everybit_torch.sharded.shard_optimizer import ShardOptimizer
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.stepper import FlatStepper

Flat = dict[str, Tensor]


def model_parts(stepper: FlatStepper) -> Flat:
    """This rank's parts of the model, by name in a checkpoint."""
    found: Flat = {}
    laid_out: set[str] = set()
    for weights in stepper.buffers.weights.values():
        low, high = stepper.buffers.own_range(weights.group)
        laid_out.update(name for placement in weights.group.placements for name in placement.spec.names)
        for s in weights.group.slices(low, high):
            part = ShardTensor(weights.own[s.offset : s.offset + s.high - s.low], s.placement.spec.shape, s.low)
            found |= {f"model.{name}": part for name in s.placement.spec.names}
        for placement in weights.group.placements:
            if placement.start == placement.stop:
                empty = torch.empty(placement.spec.shape, dtype=placement.spec.dtype)
                found |= {f"model.{name}": empty for name in placement.spec.names}
    for name, tensor in stepper.own_state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(tensor).__name__} here (get_extra_state?), and checkpoints hold tensors only. Save"
                " it beside them."
            )
        if name not in laid_out:
            found[f"model.{name}"] = local(tensor).detach()
    return found


def state_parts(stepper: FlatStepper) -> Flat:
    """This rank's parts of the optimizer's state, by name in a checkpoint."""
    found: Flat = {}
    slices = _slices(stepper)
    for unit in stepper.as_optimizer().engine.units:
        for member in unit.members:
            s = slices[id(member.parameter)]
            for entry, value in unit.entries(member):
                key = f"optimizer.state.{s.placement.spec.name}.{entry.name}"
                if entry.role == "shared":
                    found[key] = value
                else:
                    low, _ = entry.range(s.low, s.high)
                    found[key] = ShardTensor(value, entry.shape(s.placement.spec.shape, value.shape), low)
    return found


def _slices(stepper: FlatStepper) -> dict[int, Slice]:
    """Map the ids of the optimizer's parameters to the slices of the model's parameters that they are."""
    return {
        id(parameter): s
        for shard in stepper.buffers.shards
        for s, parameter in zip(shard.slices, shard.parameters, strict=True)
    }


def labels_of(stepper: FlatStepper) -> dict[str, str]:
    """The label of each parameter that is trained, by name."""
    return {
        placement.spec.name: group.label
        for group in stepper.layout.groups
        if group.requires_grad
        for placement in group.placements
    }


def by_parameter(optimizer: ShardOptimizer, aside: Flat) -> dict[int, dict[str, Tensor]]:
    """This rank's elements of the entries of each parameter, by its id."""
    return {
        id(member.parameter): {
            entry.name: elements(aside[f"optimizer.state.{member.name}.{entry.name}"]) for entry in unit.kept_entries()
        }
        for unit in optimizer.engine.units
        for member in unit.members
    }


def expected_names(stepper: FlatStepper, into: Mapping[str, Tensor]) -> set[str]:
    """Return the names in a checkpoint of this model, transform and policy, over all ranks."""
    kept = kept_entries(stepper)
    names = {key for key in into if key.startswith("model.")}
    for group in stepper.layout.groups:
        for placement in group.placements:
            names |= {f"model.{name}" for name in placement.spec.names}
            name = placement.spec.name
            names |= {f"optimizer.state.{name}.{entry.name}" for entry in kept.get(name, [])}
    return names


def kept_entries(stepper: FlatStepper) -> dict[str, list[Entry]]:
    """Return the entries of each parameter that is trained, by the parameter's name, over all ranks."""
    optimizer = stepper.as_optimizer()
    by_label: dict[str, list[Entry]] = {}
    for unit in optimizer.engine.units:
        label = optimizer.param_groups[unit.group]["label"]
        by_label.setdefault(label, unit.kept_entries())
    return {
        placement.spec.name: by_label.get(group.label, [])
        for group in stepper.layout.groups
        for placement in group.placements
        if group.requires_grad and placement.spec.numel
    }
