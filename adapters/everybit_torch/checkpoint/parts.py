"""The parts of a model and its optimizer that a rank saves and loads: one table, with a row for each tensor of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from everybit_torch.checkpoint.boxes import Box, boxes
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.flat import BufferStepper
from everybit_torch.fsdp2 import FSDP2Stepper
from everybit_torch.optim import TorchOptimizer, load_all
from everybit_torch.torch_internals.dtensors import is_dtensor, local, offset_of_local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Flat = dict[str, Tensor]

MODEL, STATE = "model.", "optimizer.state."
"""The beginnings of the names of a model's tensors, and of an optimizer's state."""


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """This rank's elements of a tensor of a checkpoint.

    Attributes:
        name: The tensor's name in a checkpoint.
        tensor: The elements where the model or the optimizer has them; of a whole tensor in its shape.
        shape: The shape of the whole tensor.
        boxes: The boxes of the whole that are here, in the order of the elements; None: all of it is here.
        entry: Of a state, the parameter's id, and the entry's name.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    boxes: list[Box] | None = None
    entry: tuple[int, str] | None = None


class Room(NamedTuple):
    """Memory for a box of a tensor of a checkpoint.

    Attributes:
        name: The tensor's name.
        offsets: The first corner of the box, by dimension.
        tensor: The memory, in the shape of the box.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """A rank's part of a model and its optimizer, at one moment: state that lies with an owner is a copy of this rank's rows.

    Attributes:
        optimizer: A :class:`TorchOptimizer`, or that of a stepper.
        labels: The label of each parameter that is trained, by name; of a stepper.
        table: A row for each tensor.
    """

    optimizer: Any
    labels: Mapping[str, str]
    table: list[CheckpointPart]

    def tensors(self) -> Flat:
        """Return everything by name, as ``torch.distributed.checkpoint`` takes it."""
        return {
            one.name: one.tensor
            if one.boxes is None
            else ShardTensor(one.tensor.reshape(-1), torch.Size(one.shape), one.boxes)
            for one in self.table
        }

    def rooms(self) -> tuple[Flat, list[Room]]:
        """Allocate memory on the host to load everything into: as one tensor for each part, and as boxes."""
        aside = {one.name: torch.empty(one.tensor.shape, dtype=one.tensor.dtype) for one in self.table}
        found = []
        for one in self.table:
            flat = aside[one.name].view(-1)
            for box in [Box((0,) * len(one.shape), one.shape, 0)] if one.boxes is None else one.boxes:
                here = flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
                found.append(Room(one.name, box.offsets, here))
        return aside, found

    def take_over(self, loaded: Flat) -> None:
        """Copy loaded values into the model and the state. Every rank has to call it if parameters visit their owners."""
        given: dict[int, dict[str, Tensor]] = {}
        for one in self.table:
            if one.entry is None:
                one.tensor.copy_(loaded[one.name])
            else:
                parameter, name = one.entry
                given.setdefault(parameter, {})[name] = loaded[one.name]
        load_all(self.optimizer.own, given)


def parts_of(stepper: BufferStepper | FSDP2Stepper) -> CheckpointParts:
    """Return a stepper's parts. Every rank has to call it."""
    if isinstance(stepper, BufferStepper):
        return _of_buffers(stepper)
    names = {id(p): name for name, p in stepper.stepped.items()}
    return _of_rows(_model_tensors(stepper.model), stepper.as_optimizer(), names, stepper.labels)


def parts_of_model(model: nn.Module, optimizer: TorchOptimizer) -> CheckpointParts:
    """Return the parts of a plain model, or one of FSDP2's, and of its optimizer. Every rank has to call it.

    Raises:
        ValueError: The optimizer has a parameter that is not the model's.
    """
    tensors = {name: x.detach() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return _of_rows(tensors, optimizer, {id(p): name for name, p in model.named_parameters()}, {})


def _of_rows(tensors: Flat, optimizer: Any, names: Mapping[int, str], labels: Mapping[str, str]) -> CheckpointParts:
    """Parts of a model whose parameters lie here whole, or are DTensors."""
    optimizer.place()
    corners: dict[Any, tuple[int, ...]] = {}

    def part(name: str, x: Tensor, shape: tuple[int, ...], like: DTensor | None, entry: Any = None) -> CheckpointPart:
        """This rank's part of a tensor, which is placed as a DTensor is, or lies here whole."""
        if like is None:
            return CheckpointPart(name, x, shape, None, entry)
        if not x.is_contiguous():
            raise ValueError(
                f"a part of shape {tuple(x.shape)} of a DTensor has strides {x.stride()}; accepted are contiguous parts."
            )
        place = (like.device_mesh, like.placements, shape)
        if place not in corners:
            corners[place] = offset_of_local_part(like, shape)
        return CheckpointPart(name, x, shape, [Box(corners[place], tuple(x.shape), 0)] if x.numel() else [], entry)

    table, placed = [], {}
    for name, x in tensors.items():
        like = x if is_dtensor(x) else None
        table.append(part(f"{MODEL}{name}", x if like is None else local(like).detach(), tuple(x.shape), like))
    for parameter, entry, shape, x in optimizer.own.kept():
        if id(parameter) not in placed:
            placed[id(parameter)] = parameter if is_dtensor(parameter) else None
        if id(parameter) not in names:
            raise ValueError(
                "optimizer: has a parameter that is not the model's; accepted is an optimizer of this model."
            )
        if parameter.numel() and (entry.cut != "tensor" or x.numel()):
            like = None if entry.cut == "copy" else placed[id(parameter)]
            name = f"{STATE}{names[id(parameter)]}.{entry.name}"
            table.append(part(name, x, shape, like, (id(parameter), entry.name)))
    return CheckpointParts(optimizer, labels, table)


def _of_buffers(stepper: BufferStepper) -> CheckpointParts:
    """This rank's elements of each trained parameter and of each entry of its state, and all tensors that are in no buffer."""
    optimizer = stepper.as_optimizer()
    optimizer.place()
    places = {
        id(stepper.stepped[place.spec.name]): (buffer.own_weights, place)
        for buffer in stepper.buffers
        for place in buffer.places
    }
    names: dict[str, list[str]] = {}  # of tied parameters there are several
    first = {p: name for name, p in stepper.parameters.items()}
    for name, parameter in stepper.model.named_parameters(remove_duplicate=False):
        if first.get(parameter) in stepper.labels:
            names.setdefault(first[parameter], []).append(name)
    laid_out = {name for several in names.values() for name in several}
    table = [
        CheckpointPart(f"{MODEL}{name}", x, tuple(x.shape))
        for name, x in _model_tensors(stepper.model).items()
        if name not in laid_out
    ]
    for own, place in places.values():
        spec, here = place.spec, own[place.start : place.stop]
        for name in names[spec.name]:
            if not spec.numel:
                table.append(CheckpointPart(f"{MODEL}{name}", here.view(spec.shape), tuple(spec.shape)))
            elif place.numel:
                table.append(_run(f"{MODEL}{name}", here, spec.shape, place.offset))
    for kept in optimizer.own.kept():
        (_, place), entry, x = places[id(kept.parameter)], kept.entry, kept.tensor
        name, key = f"{STATE}{place.spec.name}.{entry.name}", (id(kept.parameter), entry.name)
        # Of a tensor that stays whole, its owner has the state.
        if not place.spec.numel or (place.spec.is_whole and not place.numel):
            continue
        if entry.role == "shared":
            table.append(CheckpointPart(name, x, tuple(x.shape), None, key))
        elif entry.cut == "tensor":
            if x.numel():
                table.append(_run(name, x.reshape(-1), x.shape, 0, key))
        elif place.numel:
            low, _ = entry.range(place.offset, place.offset + place.numel)
            table.append(_run(name, x.reshape(-1), entry.shape(place.spec.shape, x.shape), low, key))
    return CheckpointParts(optimizer, stepper.labels, table)


def _run(name: str, x: Tensor, shape: Sequence[int], low: int, entry: tuple[int, str] | None = None) -> CheckpointPart:
    """The part of a tensor of which this rank has the elements from ``low`` on."""
    return CheckpointPart(name, x, tuple(shape), boxes(shape, low, low + x.numel()), entry)


def _model_tensors(model: nn.Module) -> Flat:
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
