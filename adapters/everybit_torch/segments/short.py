"""Short parameters: gathered into one vector for a step, and written back after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, Scattered
from everybit.stepping.entries import Entry, cut
from everybit_torch.segments.segment import HostMemory, Segment, Watched
from everybit_torch.segments.single import Places, Single, dtype_of, on_device, shares_numbers
from everybit_torch.torch_internals.dtensors import is_dtensor, local
from everybit_torch.torch_internals.tensors import foreach_copy

SHORT = 1 << 16
"""Elements below which a parameter on a CPU is stepped together with others: a call of compiled code takes as long as so many."""

DEVICE_SHORT = 1 << 20
"""Elements below which a parameter on an accelerator is stepped together with others."""


def most_short(device: torch.device) -> int:
    """Return the number of elements below which parameters on a device are stepped together with others."""
    return SHORT if device.type in ("cpu", "meta") else DEVICE_SHORT


def is_short(parameter: Tensor) -> bool:
    """Whether a parameter is stepped together with others of its kind."""
    return parameter.numel() < most_short(parameter.device)


def upper_words(first: int, length: int) -> tuple[int, int]:
    """Return the upper words of the indices of a parameter's first and last element. Scattered elements of one vector share one word."""
    return first >> 32, (first + max(length, 1) - 1) >> 32


class Bucket:
    """Short parameters of one optimizer, dtype and device, which are stepped as one segment.

    Parameters stay where they are: a step reads them into a vector, and writes the new values back. Their elements have the numbers that
    they have in the model, so that random bits are those of any other layout. If blocks of elements share a number, each parameter begins
    at a multiple of a block, and gaps hold zeros::

        elements | a a a a a . . . | b b b b b b b b | b b . . . . . . |
        blocks   | 0               | 1               | 2               |

    A parameter that is not contiguous is in a bucket, maybe alone.

    Args:
        optimizer: The optimizer, as masks and labels came out.
        parameters: At least one, in order. Of a DTensor this rank's part is stepped.
        firsts: Global index of the first element of each, or the indices of its rows.
        is_part: Whether a single plain tensor is a part of a parameter, with other elements elsewhere.

    Attributes:
        segment: The vector and its state.
        places: Where the parameters lay at the last step.
        is_sharded: Whether parameters are DTensors.
    """

    def __init__(
        self,
        optimizer: eb.Optimizer[Any],
        parameters: Sequence[Tensor],
        firsts: Sequence[int | Blocks],
        is_part: bool = False,
        host: HostMemory | None = None,
    ) -> None:
        vector, first = self._begin(optimizer, parameters, firsts)
        is_part = len(parameters) == 1 and shares_numbers(parameters[0], optimizer, is_part)
        self.segment = Segment.new(optimizer, vector, first, is_part, host)

    @classmethod
    def of(cls, segment: Segment, parameter: Tensor) -> Bucket:
        """Return a parameter by itself, with the state of this segment."""
        made = object.__new__(cls)
        assert not isinstance(segment.first, Scattered)  # of one parameter
        vector, _ = made._begin(segment.optimizer, [parameter], [segment.first])
        made.segment = replace(segment, tensor=vector)
        return made

    def _begin(
        self, optimizer: eb.Optimizer[Any], parameters: Sequence[Tensor], firsts: Sequence[int | Blocks]
    ) -> tuple[Tensor, int | Blocks | Scattered]:
        self.parameters, self._firsts = list(parameters), list(firsts)
        self.is_sharded = any(map(is_dtensor, parameters))
        here = [x.detach() for x in self._here()]
        (stored,) = optimizer.formats(here[:1])
        block, end = stored.block, 0
        self._starts: list[int] = []
        for x in here:
            self._starts.append(-(-end // block) * block)
            end = self._starts[-1] + x.numel()
        if len(here) > 1:
            end = -(-end // block) * block
        self._ranges = [slice(a, a + x.numel()) for a, x in zip(self._starts, here, strict=True)]
        vector = here[0].new_zeros(end)
        self._forget()
        self._find(vector)
        self._read(vector)
        return vector, indices([x.numel() for x in here], firsts, block, vector.device)

    def _forget(self) -> None:
        self.places = Places([])
        self._targets: list[Tensor] = []  # the parameters' memory
        self._sources: list[Tensor] = []  # their parts of the vector
        self._is_dense = False
        self._grad: Tensor | None = None
        self._grads: list[Tensor] = []  # their parts of the gradient
        self._rows: Tensor | None = None  # the gradient as rows, if all parameters have rows of one shape, without gaps

    def __getstate__(self) -> dict[str, Any]:
        # In a copy these would be no views any more.
        gone = {"_targets": [], "_sources": [], "_is_dense": False, "_grad": None, "_grads": [], "_rows": None}
        return self.__dict__ | gone

    def _here(self) -> list[Tensor]:
        """This rank's parts of the parameters."""
        return [local(p) for p in self.parameters] if self.is_sharded else self.parameters

    @property
    def numel(self) -> int:
        """The number of elements here."""
        return sum(x.numel() for x in self._here())

    def in_place(self) -> bool:
        """Whether all parameters have the memory that they had at the last step."""
        return bool(self._targets) and self.places.hold(self._here())

    def relocate(self) -> None:
        """Step the memory that the parameters have now."""
        self._find(self.segment.tensor)

    def _find(self, vector: Tensor) -> None:
        self.places = Places(self._here())
        here = self.places.twins
        has_gaps = vector.numel() != sum(x.numel() for x in here)
        self._is_dense = not has_gaps and all(x.is_contiguous() for x in here)
        self._targets = [x if x.ndim == 1 else x.view(-1) for x in here] if self._is_dense else here
        self._sources = self._parts(vector, self._targets)

    def _parts(self, vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The parts of a vector, in the shapes of these tensors."""
        return [vector[where].view(x.shape) for where, x in zip(self._ranges, like, strict=True)]

    def _read(self, vector: Tensor) -> None:
        if self._is_dense:
            torch.cat(self._targets, out=vector)
        else:
            foreach_copy(self._sources, self._targets)

    def gather(self, grads: Sequence[Tensor]) -> Tensor:
        """Read the parameters, and return their gradients as one vector.

        Args:
            grads: The gradients of all parameters, in their shapes.
        """
        vector = self.segment.tensor
        self._read(vector)
        dtypes = {*map(dtype_of, grads)}
        dtype = dtypes.pop() if len(dtypes) == 1 else reduce(torch.promote_types, dtypes)
        if self._grad is None or self._grad.dtype is not dtype:
            self._grad = torch.zeros(vector.numel(), dtype=dtype, device=vector.device)
            self._grads, self._rows = self._parts(self._grad, grads), None
            shapes = {grad.shape[1:] for grad in grads}
            has_gaps = vector.numel() != sum(map(Tensor.numel, grads))
            if len(shapes) == 1 and all(grad.ndim for grad in grads) and not has_gaps:
                self._rows = self._grad.view(sum(map(len, grads)), *shapes.pop())
        # In their shapes, because a view of each takes as long as its copy.
        if self._rows is None:
            foreach_copy(self._grads, grads)
        else:
            torch.cat([*grads], out=self._rows)
        return self._grad

    def scatter(self) -> None:
        """Write the new values back to the parameters."""
        foreach_copy(self._targets, self._sources)

    def renumber(self, firsts: Sequence[int | Blocks]) -> None:
        """Give the elements other global indices, from which they draw their random bits."""
        old, self._firsts = self.segment, list(firsts)
        lengths = [x.numel() for x in self._here()]
        first = indices(lengths, firsts, old.stored.block, old.tensor.device)
        self.segment = replace(old, first=first)

    def own(self, number: int, on_shared: Callable[[Tensor], Tensor] = lambda x: x) -> Segment:
        """Return the segment of one parameter: its present weights, and views of the state.

        Args:
            number: The parameter's number here.
            on_shared: Makes the counts and other shared state of the segment; by default they are those of all parameters.
        """
        parameter, where, whole = self.parameters[number], self._ranges[number], self.segment
        state = cut(whole.layout, whole.state, where.start, where.stop, on_shared)
        watched, weights = self.watched(number), local(parameter).detach().reshape(-1)
        return Segment(whole.optimizer, weights, state, self._firsts[number], watched=watched, host=whole.host)

    def watched(self, number: int) -> Watched | None:
        """Return where steps note which weights of a parameter they change; None: nowhere."""
        watched = self.segment.watched
        return None if watched is None else watched.cut(self._ranges[number])

    def weights(self) -> Tensor:
        """Return the present weights as a vector, wherever they lie."""
        vector = torch.zeros_like(self.segment.tensor)
        for where, x in zip(self._ranges, self._here(), strict=True):
            vector[where].copy_(x.detach().reshape(-1))
        return vector

    def entries(self, number: int) -> list[tuple[Entry, Tensor]]:
        """List the tensors of one parameter's state with their names and roles: views, and what all parameters share."""
        start, stop = self._ranges[number].start, self._ranges[number].stop
        return [
            (entry, x if entry.cut == "copy" else x[slice(*entry.range(start, stop))])
            for entry, x in self.segment.entries()
        ]

    def apart(self) -> list[Single | Bucket]:
        """Return each parameter by itself, with views of the present state and counts of its own."""
        made: list[Single | Bucket] = []
        steps = self.segment.count.known(self.segment.state.step)
        for number, parameter in enumerate(self.parameters):
            part = self.own(number, torch.clone)
            one = Single(part, parameter) if local(parameter).is_contiguous() else Bucket.of(part, parameter)
            one.segment.count.note(one.segment.state.step, steps)
            made.append(one)
        return made


def indices(
    lengths: Sequence[int], firsts: Sequence[int | Blocks], block: int, device: torch.device
) -> int | Blocks | Scattered:
    """Return the global indices of the elements of a vector of parameters, each of which begins at a multiple of a block.

    Args:
        lengths: The number of elements of each parameter.
        firsts: Global index of the first of them, or the indices of its rows, which are not neighbours.
        block: Elements for which a format stores one number.
        device: The device of the vector.
    """
    here = [(first, length) for first, length in zip(firsts, lengths, strict=True) if length]
    firsts, lengths = [first for first, _ in here] or list(firsts[:1]), [length for _, length in here] or [0]
    starts = [first for first in firsts if isinstance(first, int)]
    if len(firsts) == 1:
        return on_device(firsts[0], device)
    ends = [start + length for start, length in zip(starts, lengths, strict=False)]
    if starts == [*firsts] and starts[1:] == ends[:-1] and all(length % block == 0 for length in lengths):
        return starts[0]
    if block == 1:
        return Scattered.of(firsts, lengths, device)
    # Ranks bring the rows of a part together where a policy has blocks.
    every = [torch.arange(0, length, block) for length in lengths]
    first = torch.cat([start + at for start, at in zip(starts, every, strict=True)])
    count = torch.cat([(length - at).clamp(max=block) for length, at in zip(lengths, every, strict=True)])
    return Blocks(first.to(device), count.to(device, torch.int32), block)
