"""The gradients of a unit: gathered at each step, or accumulated by autograd straight into one buffer."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from everybit.base import barriers
from everybit_torch.torch_internals.tensors import flatten, version


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


class GradientSlot:
    """A parameter's place in a gradient buffer: a tensor that is the parameter's ``.grad`` from one step to the next.

    There is always a gradient, then, and what torch tells by None is told by whether anything was written since it was cleared. Autograd
    says so by a hook. Other writers are seen by the tensor's version, but a zero that somebody scaled, as clipping the norm of all
    gradients does, is still no gradient.

    The tensor may be given other memory (``p.grad.data = ...``, which modules do when they are cast or moved); its values return to their
    place then.
    """

    __slots__ = ("__weakref__", "address", "arrived", "home", "version", "view")

    def __init__(self, parameter: Tensor, buffer: Tensor, start: int) -> None:
        self.arrived = False
        self.lie_in(buffer, start, parameter.shape)
        self.watch(parameter)

    def lie_in(self, buffer: Tensor, start: int, shape: torch.Size) -> None:
        """Make a tensor over the buffer's elements from ``start`` on."""
        self.home = buffer[start : start + shape.numel()].view(shape)
        self._make_view()

    def _make_view(self) -> None:
        self.view = piece(self.home.view(-1), 0, self.home.numel(), self.home.shape)
        self.address = self.view.data_ptr()
        self.version = version(self.view)

    def in_place(self, grad: Tensor | None) -> bool:
        """Whether a gradient is the tensor over the buffer. Fast: it is asked at every step."""
        return grad is self.view and self.view.data_ptr() == self.address

    def watch(self, parameter: Tensor) -> None:
        """Be told of the parameter's gradients."""
        if parameter.requires_grad and parameter.is_leaf:
            # A parameter outlives its optimizer, whose buffer should not live as long.
            reference = weakref.ref(self)

            def arrive(_: Tensor) -> None:
                slot = reference()
                if slot is not None:
                    slot.arrived = True

            parameter.register_post_accumulate_grad_hook(arrive)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # Not the tensor: a copy of it would be memory of its own.
        return {"shape": self.home.shape, "arrived": self.arrived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.arrived = state["arrived"]
        self.view = torch.empty(state["shape"], device="meta")

    def holds_gradient(self, parameter: Tensor) -> bool:
        """Whether there is a gradient to step with. One that lies elsewhere is copied into place, and lies in place from here on.

        Raises:
            TypeError: A sparse gradient.
            ValueError: A gradient that does not fit into the buffer's dtype.
        """
        grad = parameter.grad
        if grad is None:
            return False
        if not self.in_place(grad):
            if grad.layout is not torch.strided:
                raise TypeError(
                    f"flat_gradients: got a {grad.layout} gradient for a parameter of shape {tuple(parameter.shape)}; accepted are dense"
                    " gradients."
                )
            if torch.promote_types(grad.dtype, self.view.dtype) is not self.view.dtype:
                raise ValueError(
                    f"flat_gradients: got a {grad.dtype} gradient for a parameter of shape {tuple(parameter.shape)}, whose gradients"
                    f" are kept as {self.view.dtype}; accepted is that, or what it holds exactly."
                )
            # The tensor that was cleared is a gradient again if something was written to it, wherever it lies now.
            self.arrived = self.arrived or grad is not self.view or bool(grad.count_nonzero())
            self.home.copy_(grad)
            self._make_view()
            parameter.grad = self.view
        elif not self.arrived and version(self.view) != self.version:
            self.arrived = bool(self.view.count_nonzero())
            self.version = version(self.view)
        return self.arrived

    def is_there(self, parameter: Tensor) -> bool:
        """Whether there is a gradient, wherever it lies."""
        if parameter.grad is None:
            return False
        if self.arrived or parameter.grad is not self.view:
            return True
        if version(self.view) == self.version and self.in_place(parameter.grad):
            return False
        return bool(self.view.count_nonzero())

    def put_back(self, parameter: Tensor) -> None:
        """Make the parameter's gradient a view of the buffer again, after the buffer was zeroed."""
        self._make_view()
        if (parameter.shape, parameter.stride()) == (self.home.shape, self.home.stride()):
            parameter.grad = self.view
        else:
            # The parameter will leave the buffer, and autograd expects gradients in the order of their parameters.
            parameter.grad = torch.zeros_like(parameter, dtype=self.home.dtype) if self.arrived else None


class GradientBuffer:
    """The gradients of a flat unit's parameters, one after the other, in the order of the parameters.

    Args:
        parameters: Of one device; gradients they hold already are kept.
        dtype: In which gradients are accumulated.
        starts: Where that of each begins.
        numel: Length of the buffer.
    """

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype, starts: Sequence[int], numel: int) -> None:
        self.buffer = torch.zeros(numel, dtype=dtype, device=parameters[0].device)
        self.slots = [
            GradientSlot(parameter, self.buffer, start) for parameter, start in zip(parameters, starts, strict=True)
        ]

    def collect(self, parameters: list[Tensor]) -> list[Tensor | None]:
        """Return the parameters' gradients; None for one without."""
        views = [slot.view for slot in self.slots if slot.arrived]
        grads = [parameter.grad for parameter in parameters]
        # Fast for what is usual, that every gradient arrived where it should.
        if len(views) == len(grads) and all(map(is_, grads, views)):
            addresses = [slot.address for slot in self.slots]
            if list(map(Tensor.data_ptr, views)) == addresses:
                return grads
        return [
            slot.view if (slot.arrived and slot.in_place(p.grad)) or slot.holds_gradient(p) else None
            for slot, p in zip(self.slots, parameters, strict=True)
        ]

    def part(self, low: int, high: int, start: int, stop: int) -> GradientBuffer:
        """The buffer of parameters ``low`` to ``high``, which are its elements ``start`` to ``stop``."""
        part = object.__new__(GradientBuffer)
        part.buffer, part.slots = self.buffer[start:stop], self.slots[low:high]
        return part

    def clear(self, parameters: list[Tensor], *, absent: bool) -> None:
        """Zero all gradients. With ``absent`` there are none then; else those that were there are zeros."""
        there = [not absent and slot.is_there(p) for p, slot in zip(parameters, self.slots, strict=True)]
        self.buffer.zero_()
        addresses = list(map(Tensor.data_ptr, [slot.view for slot in self.slots]))
        for parameter, slot, one, address in zip(parameters, self.slots, there, addresses, strict=True):
            slot.arrived = one
            if not one and not parameter.requires_grad:
                # No pass will write to it, and to the next optimizer of this parameter a zero would be a gradient.
                parameter.grad = None
            elif parameter.grad is slot.view and address == slot.address:
                slot.version = version(slot.view)
            else:
                slot.put_back(parameter)

    def restore(self, parameters: list[Tensor], starts: Sequence[int]) -> None:
        """Restore the views of this buffer and the hooks after a copy, which does not copy them."""
        for parameter, slot, start in zip(parameters, self.slots, starts, strict=True):
            slot.lie_in(self.buffer, start, slot.view.shape)
            slot.watch(parameter)


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
