"""The parts of a model and its optimizer that a rank saves and loads, by their names in a checkpoint.

A part is a tensor that is whole here, or a :class:`~everybit_torch.checkpoint.shard_tensor.ShardTensor`: a run of the elements of a whole,
or a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everybit.stepping.entries import Entry
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.flat import BufferStepper, Place
from everybit_torch.fsdp2 import FSDP2Stepper
from everybit_torch.optim import TorchOptimizer, load_all
from everybit_torch.torch_internals.dtensors import is_dtensor, local

Flat = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Held:
    """An entry of a parameter's state, of which this rank has some.

    Attributes:
        parameter: The parameter.
        prefix: What its entries' names begin with in a checkpoint.
        entry: The entry.
        shape: The shape of this rank's part in the optimizer.
        saved: The same memory, as a part of the whole.
    """

    parameter: Tensor
    prefix: str
    entry: Entry
    shape: torch.Size
    saved: Tensor

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return self.prefix + self.entry.name


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """A rank's part of a model and its optimizer, at one moment: state that lies with an owner is a copy of this rank's rows.

    Attributes:
        optimizer: A :class:`TorchOptimizer`, or that of a stepper.
        labels: The label of each parameter that is trained, by name; of a stepper.
        model: The tensors of the model, by name in a checkpoint.
        held: The state.
    """

    optimizer: Any
    labels: Mapping[str, str]
    model: Flat
    held: list[Held]

    def tensors(self) -> Flat:
        """Return everything by name in a checkpoint."""
        return self.model | {one.key: one.saved for one in self.held}

    def take_over(self, loaded: Flat) -> None:
        """Copy loaded values into the model and the state. Every rank has to call it if parameters visit their owners."""
        for key, value in self.model.items():
            elements(value).copy_(elements(loaded[key]))
        given: dict[int, dict[str, Tensor]] = {}
        for one in self.held:
            given.setdefault(id(one.parameter), {})[one.entry.name] = elements(loaded[one.key]).view(one.shape)
        load_all(self.optimizer.own, given)


def elements(value: Tensor) -> Tensor:
    """Return this rank's elements of a part."""
    return value.local if isinstance(value, ShardTensor) else value


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
    held: list[Held] = []
    for parameter, entries, values in optimizer.own.kept():
        if id(parameter) not in names:
            raise ValueError(
                "optimizer: has a parameter that is not the model's; accepted is an optimizer of this model."
            )
        prefix = f"optimizer.state.{names[id(parameter)]}."
        for entry in entries if parameter.numel() else ():
            value = values.get(entry.name)
            if value is not None and (entry.cut != "tensor" or value.numel()):
                held.append(Held(parameter, prefix, entry, local(value).shape, _part(value)))
    return CheckpointParts(optimizer, labels, {f"model.{name}": _part(x) for name, x in tensors.items()}, held)


def _part(x: Tensor) -> Tensor:
    return ShardTensor.of(x) if is_dtensor(x) else x


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
    model = {f"model.{name}": x for name, x in _model_tensors(stepper.model).items() if name not in laid_out}
    for own, place in places.values():
        part: Tensor = ShardTensor(own[place.start : place.stop], place.spec.shape, place.offset)
        if not place.spec.numel:
            part = torch.empty(place.spec.shape, dtype=place.spec.dtype)
        if place.numel or not place.spec.numel:
            model |= {f"model.{name}": part for name in names[place.spec.name]}
    held: list[Held] = []
    for one in optimizer.own.own():
        _, place = places[id(one.parameter)]
        # Of a tensor that stays whole, its owner has the state.
        if place.spec.numel and (place.numel or not place.spec.is_whole):
            prefix = f"optimizer.state.{place.spec.name}."
            for entry, value, saved in _entries(place, one.entries()):
                held.append(Held(one.parameter, prefix, entry, value.shape, saved))
    return CheckpointParts(optimizer, stepper.labels, model, held)


def _entries(place: Place, entries: list[tuple[Entry, Tensor]]) -> Iterator[tuple[Entry, Tensor, Tensor]]:
    """Yield the entries of a parameter's state of which this rank has something, as they are and as parts of the whole."""
    for entry, value in entries:
        if entry.role == "shared":
            yield entry, value, value
        elif entry.cut == "tensor":
            if value.numel():
                yield entry, value, ShardTensor(value.reshape(-1), value.shape, 0)
        elif place.numel:
            low, _ = entry.range(place.offset, place.offset + place.numel)
            yield entry, value, ShardTensor(value.reshape(-1), entry.shape(place.spec.shape, value.shape), low)


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
