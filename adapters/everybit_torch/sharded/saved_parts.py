"""The parts of a stepper's model and optimizer that a rank saves, by their names in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.stepping import entries
from everybit.stepping.entries import Entry
from everybit_torch.dtensors import is_dtensor, local
from everybit_torch.sharded.layout import ParameterSpec, Slice
from everybit_torch.sharded.saved_fit import elements
from everybit_torch.sharded.shard_optimizer import ShardOptimizer
from everybit_torch.sharded.shard_tensor import ShardTensor
from everybit_torch.sharded.stepper import FlatStepper
from everybit_torch.sharded.tensor_parallel import part_of

Flat = dict[str, Tensor]


def model_parts(stepper: FlatStepper, *, whole: bool = True) -> Flat:
    """This rank's parts of the model, by name in a checkpoint.

    Args:
        stepper: Of the model.
        whole: As parts of whole tensors. False: of what tensor parallelism has given this rank, as if that were the model.
    """
    found: Flat = {}
    laid_out: set[str] = set()
    for weights in stepper.buffers.weights.values():
        low, high = stepper.buffers.own_range(weights.group)
        laid_out.update(name for placement in weights.group.placements for name in placement.spec.names)
        for s in weights.group.slices(low, high):
            spec = s.placement.spec
            shape, part = (spec.whole_shape, spec.part) if whole else (spec.shape, None)
            held = ShardTensor(weights.own[s.offset : s.offset + s.high - s.low], shape, s.low, part)
            found |= {f"model.{name}": held for name in spec.names}
        for placement in weights.group.placements:
            shape = placement.spec.whole_shape if whole else placement.spec.shape
            if not math.prod(shape):
                empty = torch.empty(shape, dtype=placement.spec.dtype)
                found |= {f"model.{name}": empty for name in placement.spec.names}
    for name, tensor in stepper.own_state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(tensor).__name__} here (get_extra_state?), and checkpoints hold tensors only. Save"
                " it beside them."
            )
        if name not in laid_out:
            own = local(tensor).detach()
            if whole and is_dtensor(tensor):
                own = ShardTensor(own.reshape(-1), tensor.shape, 0, part_of(tensor))
            found[f"model.{name}"] = own
    return found


def take_over_model(stepper: FlatStepper, own: Flat, loaded: Flat) -> None:
    """Copy what was loaded to where a stepper's model has it.

    Args:
        stepper: Of the model.
        own: What :func:`model_parts` returned, with more or without.
        loaded: The same with other values.
    """
    for key, value in own.items():
        if key.startswith("model."):
            elements(value).copy_(elements(loaded[key]))
    in_buffers = {
        name for one in stepper.buffers.weights.values() for place in one.group.placements for name in place.spec.names
    }
    for name, tensor in stepper.own_state_dict().items():
        # Of one that is not contiguous the elements above were a copy.
        if is_dtensor(tensor) and name not in in_buffers and not local(tensor).is_contiguous():
            here = local(tensor).detach()
            here.copy_(elements(loaded[f"model.{name}"]).view(here.shape))


def state_parts(stepper: FlatStepper, *, whole: bool = True) -> Flat:
    """This rank's parts of the optimizer's state, by name in a checkpoint; ``whole`` as :func:`model_parts`'s."""
    found: Flat = {}
    slices = _slices(stepper)
    for unit in stepper.as_optimizer().engine.units:
        for member in unit.members:
            s = slices[id(member.parameter)]
            spec = s.placement.spec
            shape, part = (spec.whole_shape, spec.part) if whole else (spec.shape, None)
            for entry, value in unit.entries(member):
                key = f"optimizer.state.{spec.name}.{entry.name}"
                if entry.role == "shared":
                    found[key] = value
                elif entry.cut == "tensor":
                    # Of a whole tensor, which is here: its factors have shapes of their own. One without elements needs no file.
                    if value.numel():
                        found[key] = ShardTensor(value.reshape(-1), value.shape, 0)
                else:
                    low, _ = entry.range(s.low, s.high)
                    block = 1 if entry.part is None else entry.part.block
                    own = part if part is None or block == 1 else part.blocks(block)
                    found[key] = ShardTensor(value.reshape(-1), entry.shape(shape, value.shape), low, own)
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
            entry.name: value
            if entry.cut == "tensor" and not value.numel()
            else elements(aside[f"optimizer.state.{member.name}.{entry.name}"]).view(value.shape)
            for entry, value in unit.entries(member)
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
    stored = {
        group["label"]: one.optimizers
        for group, one in zip(optimizer.param_groups, optimizer.engine.groups, strict=True)
    }
    for unit in optimizer.engine.units:
        label = optimizer.param_groups[unit.group]["label"]
        by_label.setdefault(label, unit.kept_entries())
    return {
        placement.spec.name: _entries_of(placement.spec, stored[group.label][group.dtype])
        if placement.spec.whole
        else by_label.get(group.label, [])
        for group in stepper.layout.groups
        for placement in group.placements
        if group.requires_grad and placement.spec.whole_numel
    }


def _entries_of(spec: ParameterSpec, optimizer: eb.Optimizer[Any]) -> list[Entry]:
    """The entries of a whole tensor, which may depend on its shape; another rank may have it."""
    tensor = torch.empty(spec.stepped_as(0, spec.numel), dtype=spec.dtype, device="meta")
    (formats,) = optimizer.formats([tensor])
    return [entry for entry, _ in entries(optimizer.init([tensor]), [tensor], 0, formats)]
