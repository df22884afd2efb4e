"""The parts of a stepper's model and optimizer that a rank saves, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.stepping import entries
from everybit.stepping.entries import Entry
from everybit_torch.sharded.buffer_stepper import BufferStepper
from everybit_torch.sharded.layout import ParameterSpec, Slice
from everybit_torch.sharded.saved_fit import elements
from everybit_torch.sharded.shard_tensor import ShardTensor

Flat = dict[str, Tensor]


class SavedParts(Protocol):
    """What a rank has of a stepper's model and optimizer."""

    @property
    def labels(self) -> Mapping[str, str]:
        """The label of each parameter that is trained, by name."""
        ...

    def model(self) -> Flat:
        """This rank's parts of the model, by name in a checkpoint."""
        ...

    def state(self) -> Flat:
        """This rank's parts of the optimizer's state, by name in a checkpoint."""
        ...

    def kept(self) -> Mapping[str, list[Entry]]:
        """The entries of each parameter that is trained, by the parameter's name, over all ranks."""
        ...

    def names(self) -> set[str]:
        """The names of the model's tensors in a checkpoint, over all ranks."""
        ...

    def take_over(self, own: Flat, loaded: Flat) -> None:
        """Copy what was loaded to where the stepper has it: ``own`` are model and state, and ``loaded`` the same with other values."""
        ...


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's ``state_dict()``.

    Raises:
        TypeError: It has something that a checkpoint cannot hold.
    """
    found = model.state_dict()
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: the model's state has a {type(tensor).__name__} here (get_extra_state?), and checkpoints hold tensors only. Save"
                " it beside them."
            )
    return {name: tensor.detach() for name, tensor in found.items()}


class BufferParts:
    """The parts of a stepper on flat buffers: this rank's shards of them, and all of what is in none."""

    def __init__(self, stepper: BufferStepper) -> None:
        self._stepper, self._optimizer = stepper, stepper.as_optimizer()
        groups = stepper.layout.groups
        self._specs = [(group, place.spec) for group in groups for place in group.placements if group.requires_grad]
        self.labels = {spec.name: group.label for group, spec in self._specs}

    def model(self) -> Flat:
        """What this rank steps of the weights, and what is in no buffer."""
        found: Flat = {}
        laid_out: set[str] = set()
        for weights in self._stepper.buffers.weights.values():
            laid_out.update(name for place in weights.group.placements for name in place.spec.names)
            for s in weights.group.slices(*weights.own_range):
                spec = s.placement.spec
                held = ShardTensor(weights.own[s.offset : s.offset + s.high - s.low], spec.shape, s.low)
                found |= {f"model.{name}": held for name in spec.names}
            for place in weights.group.placements:
                if not place.spec.numel:
                    empty = torch.empty(place.spec.shape, dtype=place.spec.dtype)
                    found |= {f"model.{name}": empty for name in place.spec.names}
        for name, tensor in model_tensors(self._stepper.model).items():
            if name not in laid_out:
                found[f"model.{name}"] = tensor
        return found

    def state(self) -> Flat:
        """This rank's elements of each entry; whole factors of tensors that are whole here."""
        found: Flat = {}
        slices = self._slices()
        for unit in self._optimizer.engine.units:
            for member in unit.members:
                s = slices[id(member.parameter)]
                spec = s.placement.spec
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
                        found[key] = ShardTensor(value.reshape(-1), entry.shape(spec.shape, value.shape), low)
        return found

    def kept(self) -> dict[str, list[Entry]]:
        """As their optimizers keep them; whole tensors may keep what depends on their shapes."""
        groups = zip(self._optimizer.param_groups, self._optimizer.engine.groups, strict=True)
        stored = {values["label"]: group.optimizers for values, group in groups}
        by_label: dict[str, list[Entry]] = {}
        for unit in self._optimizer.engine.units:
            by_label.setdefault(self._optimizer.param_groups[unit.group]["label"], unit.kept_entries())
        return {
            spec.name: _entries_of(spec, stored[group.label][group.dtype])
            if spec.whole
            else by_label.get(group.label, [])
            for group, spec in self._specs
            if spec.numel
        }

    def names(self) -> set[str]:
        """Of the parameters that lie in buffers."""
        return {f"model.{name}" for _, spec in self._specs for name in spec.names}

    def take_over(self, own: Flat, loaded: Flat) -> None:
        """Copy into the buffers, and to the state."""
        for key, value in own.items():
            if key.startswith("model."):
                elements(value).copy_(elements(loaded[key]))
        self._optimizer.engine.load(
            {
                id(member.parameter): {
                    entry.name: value
                    if entry.cut == "tensor" and not value.numel()
                    else elements(loaded[f"optimizer.state.{member.name}.{entry.name}"]).view(value.shape)
                    for entry, value in unit.entries(member)
                }
                for unit in self._optimizer.engine.units
                for member in unit.members
            }
        )

    def _slices(self) -> dict[int, Slice]:
        """Map the ids of the optimizer's parameters to the slices of the model's parameters that they are."""
        return {
            id(parameter): s
            for shard in self._stepper.buffers.shards
            for s, parameter in zip(shard.slices, shard.parameters, strict=True)
        }


def _entries_of(spec: ParameterSpec, optimizer: eb.Optimizer[Any]) -> list[Entry]:
    """The entries of a whole tensor, which may depend on its shape; another rank may have it."""
    tensor = torch.empty(spec.stepped_as(0, spec.numel), dtype=spec.dtype, device="meta")
    (formats,) = optimizer.formats([tensor])
    return [entry for entry, _ in entries(optimizer.init([tensor]), [tensor], 0, formats)]
