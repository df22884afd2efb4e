"""The parts of a stepper on flat buffers that a rank saves: its elements of weights and state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from everybit.stepping import entries
from everybit.stepping.entries import Entry
from everybit_torch.checkpoint.compatibility import elements
from everybit_torch.checkpoint.entries import Flat, model_tensors
from everybit_torch.checkpoint.shard_tensor import ShardTensor
from everybit_torch.flat import BufferStepper, Place
from everybit_torch.optim import Own, load_all


class PieceParts:
    """This rank's elements of each trained parameter and of each entry of its state, and all tensors that are in no buffer."""

    def __init__(self, stepper: BufferStepper) -> None:
        self._stepper, self._optimizer = stepper, stepper.as_optimizer()
        self.labels = stepper.labels
        self._optimizer.place()
        self._places = {
            id(stepper.stepped[place.spec.name]): (buffer.own_weights, place)
            for buffer in stepper.buffers
            for place in buffer.places
        }
        self._names: dict[str, list[str]] = {}  # of tied parameters there are several
        first = {p: name for name, p in stepper.parameters.items()}
        for name, parameter in stepper.model.named_parameters(remove_duplicate=False):
            if first.get(parameter) in self.labels:
                self._names.setdefault(first[parameter], []).append(name)

    def model(self) -> Flat:
        """Return the weights that this rank steps, and the tensors that are in no buffer."""
        found: Flat = {}
        for own, place in self._places.values():
            held: Tensor = ShardTensor(own[place.start : place.stop], place.spec.shape, place.offset)
            if not place.spec.numel:
                held = torch.empty(place.spec.shape, dtype=place.spec.dtype)
            elif not place.numel:
                continue
            found |= {f"model.{name}": held for name in self._names[place.spec.name]}
        laid_out = self.names()
        for name, tensor in model_tensors(self._stepper.model).items():
            if f"model.{name}" not in laid_out:
                found[f"model.{name}"] = tensor
        return found

    def state(self) -> Flat:
        """Return this rank's elements of each entry, and whole factors of tensors that are whole here."""
        found: Flat = {}
        for one, place in self._own():
            for entry, value in one.segment().entries():
                if entry.role == "shared":
                    found[_key(place, entry)] = value
                elif entry.cut == "tensor":
                    if value.numel():
                        found[_key(place, entry)] = ShardTensor(value.reshape(-1), value.shape, 0)
                elif place.numel:
                    low, _ = entry.range(place.offset, place.offset + place.numel)
                    shape = entry.shape(place.spec.shape, value.shape)
                    found[_key(place, entry)] = ShardTensor(value.reshape(-1), shape, low)
        return found

    def kept(self) -> dict[str, list[Entry]]:
        """Return the entries of each parameter that has elements, even if this rank has no elements of it."""
        found: dict[str, list[Entry]] = {}
        for one in self._optimizer.own.own():
            _, place = self._places[id(one.parameter)]
            if not place.spec.numel:
                continue
            segment = one.segment()
            listed = segment.entries()
            if place.spec.is_whole:  # what is kept may depend on the shape, and another rank may have it
                like = torch.empty(place.spec.shape, dtype=place.spec.dtype, device="meta")
                (formats,) = segment.optimizer.formats([like])
                listed = entries(segment.optimizer.init([like]), [like], 0, formats)
            found[place.spec.name] = [entry for entry, _ in listed]
        return found

    def names(self) -> set[str]:
        """Return those of the parameters that lie in buffers."""
        return {f"model.{name}" for names in self._names.values() for name in names}

    def take_over(self, own: Flat, loaded: Flat) -> None:
        """Copy into the buffers, and to the state."""
        for key, value in own.items():
            if key.startswith("model."):
                elements(value).copy_(elements(loaded[key]))
        given: dict[int, dict[str, Tensor]] = {}
        for one, place in self._own():
            given[id(one.parameter)] = {
                entry.name: elements(loaded[key]).view(value.shape) if (key := _key(place, entry)) in loaded else value
                for entry, value in one.segment().entries()
            }
        load_all(self._optimizer.own, given)

    def _own(self) -> Iterator[tuple[Own, Place]]:
        """The parameters of which this rank keeps state, with its part of them: of a tensor that stays whole its owner."""
        for one in self._optimizer.own.own():
            _, place = self._places[id(one.parameter)]
            if place.spec.numel and (place.numel or not place.spec.is_whole):
                yield one, place


def _key(place: Place, entry: Entry) -> str:
    return f"optimizer.state.{place.spec.name}.{entry.name}"
