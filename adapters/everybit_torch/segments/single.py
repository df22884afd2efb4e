"""A parameter that is stepped by itself, where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.stepping.entries import Entry
from everybit_torch.segments.segment import HostMemory, Segment, Watched
from everybit_torch.torch_internals.dtensors import is_cut, is_dtensor, local


class Single:
    """A parameter that is stepped by itself, where it lies.

    Args:
        segment: The parameter's segment. Its tensor is the memory of the parameter: a vector, or of its shape.
        parameter: The parameter. Of a DTensor this rank's part is stepped.

    Attributes:
        places: Where the parameter lay at the last step.
        is_sharded: Whether the parameter is a DTensor.
    """

    def __init__(self, segment: Segment, parameter: Tensor) -> None:
        self.segment, self.parameters, self.is_sharded = segment, [parameter], is_dtensor(parameter)
        self.places = Places([local(parameter)])

    @classmethod
    def new(
        cls,
        optimizer: eb.Optimizer[Any],
        parameter: Tensor,
        first: int | Blocks,
        is_part: bool = False,
        host: HostMemory | None = None,
    ) -> Single:
        """Return a parameter before its first step. It has to be contiguous, unless its transform needs whole tensors.

        Args:
            optimizer: The optimizer, as masks and labels came out.
            parameter: The parameter.
            first: Global index of its first element here, or the indices of its rows.
            is_part: Whether a plain tensor is a part of a parameter, with other elements elsewhere.
            host: The host's memory in which its state lies.
        """
        is_part, vector = shares_numbers(parameter, optimizer, is_part), as_stepped(parameter, optimizer)
        return cls(Segment.new(optimizer, vector, on_device(first, vector.device), is_part, host), parameter)

    @property
    def numel(self) -> int:
        """The number of elements here."""
        return local(self.parameters[0]).numel()

    def in_place(self) -> bool:
        """Whether the parameter has the memory that it had at the last step."""
        return self.places.hold([local(self.parameters[0])])

    def relocate(self) -> None:
        """Step the memory that the parameter has now."""
        self.segment.tensor = as_stepped(self.parameters[0], self.segment.optimizer)
        self.places = Places([local(self.parameters[0])])

    def gather(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the gradient in the shape of the segment's tensor."""
        (grad,), shape = grads, self.segment.tensor.shape
        return grad if grad.shape == shape else grad.reshape(shape)

    def scatter(self) -> None:
        """A no-op: the new values are in the parameter's memory."""

    def renumber(self, firsts: Sequence[int | Blocks]) -> None:
        """Give the elements other global indices, from which they draw their random bits."""
        self.segment = replace(self.segment, first=on_device(firsts[0], self.segment.tensor.device))

    def own(self, number: int) -> Segment:  # noqa: ARG002  # there is one
        """Return the parameter's segment."""
        return self.segment

    def watched(self, number: int) -> Watched | None:  # noqa: ARG002  # there is one
        """Return where steps note which weights of the parameter they change; None: nowhere."""
        return self.segment.watched

    def weights(self) -> Tensor:
        """Return the present weights in the shape of the segment's tensor, wherever they lie."""
        return local(self.parameters[0]).detach().reshape(self.segment.tensor.shape)

    def entries(self, number: int) -> list[tuple[Entry, Tensor]]:  # noqa: ARG002  # there is one
        """List the tensors of the parameter's state with their names and roles."""
        return self.segment.entries()


def as_stepped(parameter: Tensor, optimizer: eb.Optimizer[Any]) -> Tensor:
    """Return the memory of a parameter as it is stepped: in its shape, if its transform needs whole tensors, or else as a vector."""
    here = local(parameter).detach()
    whole = optimizer.needs_whole
    return here if whole or not here.is_contiguous() else here.view(-1)


def on_device(first: int | Blocks, device: torch.device) -> int | Blocks:
    """Return the indices of rows on the device of their elements; the index of a first element as it is."""
    return first if isinstance(first, int) else eb.tree.map(lambda x: x.to(device), first)


def shares_numbers(parameter: Tensor, optimizer: eb.Optimizer[Any], is_part: bool) -> bool:
    """Return whether ranks hold parts of a parameter of which its transform requests numbers.

    Args:
        parameter: The parameter.
        optimizer: Its optimizer.
        is_part: Whether a plain tensor is a part.
    """
    if not optimizer.per_tensor or optimizer.needs_whole:
        return False
    return any(map(is_cut, parameter.placements)) if is_dtensor(parameter) else is_part


_KIND = attrgetter("shape", "dtype", "device")
dtype_of = attrgetter("dtype")


class Places:
    """Where tensors lie in memory, which changes when a tensor is given other memory.

    Every step asks for all parameters. So each tensor has a twin, which torch compares with it in one call: sizes and strides as objects of
    Python take three times as long.

    Args:
        tensors: The tensors.

    Attributes:
        twins: A tensor over the same memory for each, without a gradient. A copy of this object has none.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.twins = [x.detach() for x in tensors]
        self._lies = Tensor.is_set_to if all(x.is_cpu or x.is_cuda for x in self.twins) else _lies_as
        self._addresses, self._dtypes = [*map(Tensor.data_ptr, tensors)], [*map(dtype_of, tensors)]
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = [*map(_KIND, tensors)]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"twins": []}

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors lie there, each as it did."""
        return (
            len(tensors) == len(self.twins)
            and [*map(Tensor.data_ptr, tensors)] == self._addresses  # which change where a storage is resized
            and [*map(dtype_of, tensors)] == self._dtypes
            and all(map(self._lies, tensors, self.twins))
        )

    def moved(self, tensors: Sequence[Tensor]) -> Iterator[int]:
        """Yield the numbers of the tensors that lie elsewhere, or are of another kind."""
        for number, (one, address, kind) in enumerate(zip(tensors, self._addresses, self._kinds, strict=True)):
            lies = bool(self.twins) and one.data_ptr() == address and self._lies(one, self.twins[number])
            if not lies or _KIND(one) != kind:
                yield number

    def kind(self, number: int) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Return the shape, the dtype and the device that a tensor had."""
        return self._kinds[number]


def _lies_as(one: Tensor, other: Tensor) -> bool:
    """Whether tensors at one address are the same elements, on devices for which torch does not compare them."""
    return (one.shape, one.stride()) == (other.shape, other.stride())
