"""Short parameters: gathered into one vector for a step, and written back after it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, Scattered
from everybit_torch.segments.segment import Segment
from everybit_torch.torch_internals.tensors import foreach_copy

SHORT = 1 << 16
"""Elements below which a parameter on a CPU is stepped together with others: a call of compiled code takes as long as so many."""

DEVICE_SHORT = 1 << 20
"""Elements below which a parameter on an accelerator is stepped together with others."""


def is_short(parameter: Tensor) -> bool:
    """Whether a parameter is stepped together with others of its kind."""
    return parameter.numel() < (SHORT if parameter.device.type in ("cpu", "meta") else DEVICE_SHORT)


class Bucket:
    """Short parameters of one optimizer, dtype and device, which are stepped as one segment.

    Parameters stay where they are: a step reads them into a vector, and writes the new values back. Their elements have the numbers that
    they have in the model, so that random bits are those of any other layout. If blocks of elements share a number, each parameter begins
    at a multiple of a block, and the gaps before it hold zeros.

    Args:
        optimizer: The optimizer, as masks and labels came out.
        parameters: At least one, in order.
        firsts: Global index of the first element of each.

    Attributes:
        segment: The vector and its state.
    """

    def __init__(self, optimizer: eb.Optimizer[Any], parameters: Sequence[Tensor], firsts: Sequence[int]) -> None:
        self.parameters, self._firsts = list(parameters), list(firsts)
        (stored,) = optimizer.formats([parameters[0].detach()])
        lengths, block = [p.numel() for p in parameters], stored.policy.block
        room = [-(-length // block) * block for length in lengths]
        self._edges = list(accumulate(room, initial=0))
        like = parameters[0].detach()
        vector = like.new_zeros(self._edges[-1])
        indices = _indices(lengths, firsts, block, like.device)
        self._has_gaps, self._is_dense = self._edges[-1] != sum(lengths), False
        self._grad: Tensor | None = None
        self._places: list[tuple[int, tuple[int, ...]]] = []
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._follow(vector)
        self._read(vector)
        self.segment = Segment.new(optimizer, vector, indices)

    def _cut(self, vector: Tensor) -> list[Tensor]:
        """The parameters' elements of a vector."""
        starts = self._edges[:-1]
        return [vector[start : start + p.numel()] for start, p in zip(starts, self.parameters, strict=True)]

    def _follow(self, vector: Tensor) -> None:
        """Find the parameters' memory again, if it has changed since the last step."""
        pointers = map(Tensor.data_ptr, self.parameters)
        places = list(zip(pointers, map(Tensor.stride, self.parameters), strict=True))
        if places == self._places and self._targets:
            return
        self._places, self._targets, self._sources = places, [], []
        for p, piece in zip(self.parameters, self._cut(vector), strict=True):
            target = p.detach()
            self._targets.append(target.view(-1) if target.is_contiguous() else target)
            self._sources.append(piece if target.is_contiguous() else piece.view(target.shape))
        self._is_dense = not self._has_gaps and all(x.ndim == 1 for x in self._targets)

    def _read(self, vector: Tensor) -> None:
        if self._is_dense:
            torch.cat(self._targets, out=vector)
        else:
            foreach_copy(self._sources, self._targets)

    def gather(self, grads: Sequence[Tensor]) -> Tensor:
        """Read the parameters, and return their gradients as one vector.

        Args:
            grads: The gradients of all parameters, in their shapes and of one dtype.
        """
        vector = self.segment.tensor
        self._follow(vector)
        self._read(vector)
        dtype = grads[0].dtype
        if self._grad is None or self._grad.dtype is not dtype:
            self._grad = torch.zeros(vector.numel(), dtype=dtype, device=vector.device)
        flat = [grad if grad.ndim == 1 else grad.reshape(-1) for grad in grads]
        if self._has_gaps:
            foreach_copy(self._cut(self._grad), flat)
        else:
            torch.cat(flat, out=self._grad)
        return self._grad

    def scatter(self) -> None:
        """Write the new values back to the parameters."""
        foreach_copy(self._targets, self._sources)

    def apart(self) -> list[Segment]:
        """Return a segment for each parameter, with views of the present state and counts of its own.

        Its tensor is the parameter as a vector. A parameter that is not contiguous stays in a bucket.

        Raises:
            ValueError: A parameter is not contiguous.
        """
        made = []
        for (start, stop), p, first in zip(pairwise(self._edges), self.parameters, self._firsts, strict=True):
            part = self.segment.cut(start, stop)
            if stop - start != p.numel():
                raise ValueError("apart: got a parameter with a gap after it; accepted are formats without blocks.")
            made.append(Segment(part.optimizer, p.detach().view(-1), part.state, first))
        return made


def _indices(
    lengths: Sequence[int], firsts: Sequence[int], block: int, device: torch.device
) -> int | Blocks | Scattered:
    """The global indices of the elements of a vector of parameters, each of which begins at a multiple of a block."""
    ends = [first + length for first, length in zip(firsts, lengths, strict=True)]
    aligned = all(length % block == 0 for length in lengths[:-1])
    if list(firsts[1:]) == ends[:-1] and aligned and (block == 1 or lengths[-1] % block == 0):
        return firsts[0]
    if block == 1:
        return Scattered.of(firsts, lengths, device)
    every = [torch.arange(0, length, block) for length in lengths]
    first = torch.cat([first + at for first, at in zip(firsts, every, strict=True)])
    count = torch.cat([(length - at).clamp(max=block) for length, at in zip(lengths, every, strict=True)])
    return Blocks(first.to(device), count.to(device, torch.int32), block)
