"""The tensors of a model that need memory and values, with all of their names; and how they are given memory in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everybit_torch.dtensors import is_dtensor, like
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.model_layout import ModelLayout


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of a model.

    Attributes:
        names: All of its names.
        tensor: The model's.
        spec: Of a parameter; None for a buffer.
        is_saved: Whether the model's ``state_dict`` has it.
        is_absent: Whether it is on the meta device.
    """

    names: tuple[str, ...]
    tensor: Tensor
    spec: ParameterSpec | None
    is_saved: bool
    is_absent: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def tensors_of(model: nn.Module, described: ModelLayout, *, planned: bool = False) -> list[ModelTensor]:
    """List all parameters of a model, and then all buffers, each once.

    Args:
        model: The model.
        described: The same.
        planned: Take it as if all of it were on the meta device, and saved.
    """
    state = {} if planned else model.state_dict(keep_vars=True)
    saved = {id(value) for value in state.values() if isinstance(value, Tensor)}

    def is_absent(tensor: Tensor) -> bool:
        return planned or tensor.device.type == "meta"

    found = [
        ModelTensor(spec.names, parameter, spec, True, is_absent(parameter))
        for spec, parameter in zip(described.specs, described.parameters, strict=True)
    ]
    names: dict[int, list[str]] = {}
    buffers: dict[int, Tensor] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
        buffers[id(buffer)] = buffer
    return found + [
        ModelTensor(tuple(names[key]), buffer, None, planned or key in saved, is_absent(buffer))
        for key, buffer in buffers.items()
    ]


class StandIns:
    """Plain tensors that stand for DTensors in a model's modules while initializers write to them: whole, as if the model were not cut.

    torch cannot make a plain tensor of a DTensor in place, so that for this time modules hold another object.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._whole: dict[int, tuple[ModelTensor, nn.Parameter]] = {}

    def begin(self, one: ModelTensor, memory: Tensor) -> None:
        """Have the model's modules hold a parameter with this memory in the place of a DTensor."""
        whole = nn.Parameter(memory, requires_grad=one.tensor.requires_grad)
        vars(whole).update(vars(one.tensor))
        self._whole[id(one.tensor)] = one, whole
        self._set(one, whole)

    def end(self, one: ModelTensor) -> Tensor:
        """The modules have the DTensor again; returns what stood for it."""
        _, whole = self._whole.pop(id(one.tensor))
        self._set(one, one.tensor)
        return whole.detach()

    def end_all(self) -> None:
        """The modules have all DTensors again."""
        for one, _ in list(self._whole.values()):
            self.end(one)

    def _set(self, one: ModelTensor, tensor: Tensor) -> None:
        for name in one.names:
            module, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(module), attribute, tensor)


class Memory:
    """Gives tensors on the meta device memory, so that they stay the same objects: whoever holds one, or ties to it, has it then, too."""

    def __init__(self) -> None:
        self._given: list[tuple[Tensor, Tensor]] = []

    @staticmethod
    def require_possible(tensors: Sequence[ModelTensor]) -> None:
        """Refuse tensors that cannot be given memory in place.

        Raises:
            ValueError: Somebody has a weak reference to one, or it is a buffer that is a DTensor; the message names it.
        """
        for one in tensors:
            if one.is_absent and one.spec is None and is_dtensor(one.tensor):
                raise ValueError(
                    f"{one.name}: is a buffer on the meta device, and a DTensor; accepted are plain buffers, or ones that have values."
                )
            if one.is_absent and weakref.getweakrefs(one.tensor):
                raise ValueError(
                    f"{one.name}: somebody holds a weak reference to it (weakref.ref), and torch gives such a tensor no memory in place;"
                    " accepted is a model on the meta device to whose tensors nobody does."
                )

    def give(self, tensor: Tensor, memory: Tensor) -> None:
        """``tensor`` has this memory from now on, with its attributes, its class and ``requires_grad`` as before.

        Of a DTensor it is the memory of this rank's part.
        """
        memory = like(tensor, memory)
        made = nn.Parameter(memory, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
        if type(made) is not type(tensor):
            made.__class__ = type(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        vars(made).update(vars(tensor))
        _swap(tensor, made)
        self._given.append((tensor, made))

    def take_back(self) -> None:
        """All tensors are on the meta device again."""
        for tensor, former in reversed(self._given):
            _swap(tensor, former)
        self._given = []

    def keep(self) -> None:
        """Make the changes final: nothing can be undone any more."""
        self._given = []


def _swap(one: Tensor, other: Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]
