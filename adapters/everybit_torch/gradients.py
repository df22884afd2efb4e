"""The gradients of a unit: gathered at each step, or accumulated by autograd straight into one buffer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from everybit.base import barriers
from everybit_torch.torch_internals.tensors import flatten


def piece(buffer: Tensor, start: int, stop: int, shape: torch.Size) -> Tensor:
    """A tensor over a buffer's elements from ``start`` to ``stop``, which is no view of it to anyone but the memory.

    It has a storage and a version of its own, so that whoever saves, copies or counts one parameter does not meet all of them; safetensors
    refuses tensors that are parts of a larger storage. The memory lives as long as one of its tensors (DLPack keeps the buffer).
    """
    part = buffer[start:stop]
    if buffer.device.type in ("cpu", "cuda", "xpu"):
        part = from_dlpack(part)
    return part.view(shape)


class UnitGradients(Protocol):
    """The buffer in which the gradients of a flat unit lie, one after the other."""

    @property
    def buffer(self) -> Tensor:
        """The buffer of all gradients, 1-d."""
        ...

    def collect(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """Return the parameters' gradients; None for one without."""
        ...

    def part(self, low: int, high: int, start: int, stop: int) -> UnitGradients:
        """Return the gradients of parameters ``low`` to ``high``, which are elements ``start`` to ``stop``."""
        ...


# Elements that are gathered at a time: enough for a call of compiled code, and few enough to stay in a cache.
GATHERED = 1 << 20
DEVICE_GATHERED = 1 << 24
# A gradient of so many is stepped by itself: to gather it would take longer than one call more.
ALONE = 1 << 19


def gathered_at_once(device: torch.device) -> int:
    """Elements of gradients that are gathered into one tensor at a time on a device."""
    return GATHERED if device.type in ("cpu", "meta") else DEVICE_GATHERED


class MemberGradients:
    """The gradients of a long flat unit's members, one after the other, without a copy of all of them.

    A range that lies in one gradient is a view of it. One over several gradients is gathered into a buffer that the next range uses
    again, and that is small enough to stay in a cache.

    Args:
        grads: Of at least one element in all; those that are not in the usual order are copied.
    """

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self.dtype = _widest({grad.dtype for grad in grads})
        self._grads = [grad.reshape(-1) for grad in grads]
        self._ends = list(accumulate(grad.numel() for grad in self._grads))
        self._buffer: Tensor | None = None

    def numel(self) -> int:
        """The number of elements of all gradients."""
        return self._ends[-1]

    def __getitem__(self, where: slice, /) -> Tensor:
        """The elements of a range, 1-d; valid until the next one is asked for."""
        start, stop, _ = where.indices(self.numel())
        first = bisect_right(self._ends, start) if start < stop else 0
        parts: list[Tensor] = []
        for end, grad in zip(self._ends[first:], self._grads[first:], strict=True):
            begin = end - grad.numel()
            parts.append(grad[max(start - begin, 0) : stop - begin])
            if end >= stop:
                break
        if len(parts) == 1:
            return parts[0].to(self.dtype)
        if self._buffer is None or self._buffer.numel() < stop - start:
            self._buffer = parts[0].new_empty(stop - start, dtype=self.dtype)
        return torch.cat(parts, out=self._buffer[: stop - start])

    def stops(self) -> Iterator[int]:
        """Where ranges end that are cheap to ask for: long gradients alone, short ones together."""
        together = gathered_at_once(self._grads[0].device)
        alone = min(ALONE, together)
        begun = end = 0
        for grad in self._grads:
            start, end = end, end + grad.numel()
            if start > begun and (grad.numel() >= alone or end - begun > together):
                yield start
                begun = start
            if grad.numel() >= alone:
                yield end
                begun = end
        if end > begun:
            yield end

    def sum_of_squares(self) -> Tensor:
        """The sum of the squares of all elements: 0-d, float64, with the bits of ``tree.sum_of_squares``."""
        scratch = barriers.scratch_for(self._grads)
        sums = [barriers.sum_of_squares(grad, scratch) for grad in self._grads]
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


Grads = list[Tensor | None]
"""The gradients of members; None for one without."""

Gathered = Tensor | MemberGradients
"""The gradients of a unit's members as one vector, which is cut like a tensor."""


def gather(grads: Sequence[Tensor]) -> Tensor:
    """One flat tensor of several gradients, in the widest of their dtypes."""
    if len(grads) == 1:
        return grads[0].reshape(-1)
    dtypes = {grad.dtype for grad in grads}
    return flatten(grads if len(dtypes) == 1 else [grad.to(_widest(dtypes)) for grad in grads])


def gather_with_gaps(tensors: Sequence[Tensor], ranges: Sequence[tuple[int, int]], numel: int) -> Tensor:
    """One vector of several tensors, each in its range, in the widest of their dtypes; zeros are in the gaps between them."""
    dtype = _widest({tensor.dtype for tensor in tensors})
    zeros = tensors[0].new_zeros(
        max((b - a for (_, a), (b, _) in pairwise([*ranges, (numel, numel)])), default=0), dtype=dtype
    )
    parts: list[Tensor] = []
    for tensor, (_, stop), (begin, _) in zip(tensors, ranges, [*ranges[1:], (numel, numel)], strict=True):
        parts += [tensor.reshape(-1).to(dtype), zeros[: begin - stop]]
    return torch.cat(parts)


def _widest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype that holds the numbers of all of them exactly."""
    return reduce(torch.promote_types, dtypes)


def is_cut(grads: Grads) -> bool:
    """Whether some members have a gradient, and some have not."""
    missing = sum(grad is None for grad in grads)
    return 0 < missing < len(grads)


def have_gradients(grads: Grads) -> bool:
    """Whether members have gradients, all of which have one or none."""
    return bool(grads) and grads[0] is not None
