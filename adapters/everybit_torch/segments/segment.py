"""A segment: a tensor that is stepped at once, with its state and the places of its elements in the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks, FirstElement, Scattered, rounding
from everybit.formats import PartSpec
from everybit.policies import Resolved
from everybit.protocol import Due, advance, require_done
from everybit.stepping import Metrics, OptimizerState, StepTrace
from everybit.stepping.entries import Entry, cut, entries, map_parts
from everybit.stepping.layout import Layout
from everybit.stepping.metrics import measure
from everybit_torch.streams import is_capturing
from everybit_torch.torch_internals.tensors import version

PIECE = 1 << 18
"""Elements that are stepped at a time on a CPU without a compiler: the temporaries of one operation fit into a core's cache."""

DEVICE_PIECE = 1 << 24
"""Elements that are stepped at a time on an accelerator without a compiler: a kernel is worth its launch, and temporaries stay small."""

CHUNK = 1 << 22
"""Elements of which the state is initialised at a time, so that a first step needs no float32 copy of the model."""


class HostCount:
    """A host-side copy of a count on the device, which is valid as long as no other code writes to the tensor.

    Code that counts a step notes it here as well. A tensor that other code wrote to (a loader, an import, code of the user's) has another
    version than was noted, and is read again. A step that is captured in a CUDA graph, or in code that a user compiles, is repeated
    without notice here, so that such a count is never known again.
    """

    __slots__ = ("_at", "_captured", "_tensor", "_value")

    def __init__(self) -> None:
        self._tensor: weakref.ref[Tensor] | None = None  # weak: counts of units that were cut are freed
        self._at = self._value = 0
        self._captured = False

    def known(self, count: Tensor) -> int | None:
        """The value of a count; None if only the device knows it."""
        if self._captured or self._tensor is None or self._tensor() is not count or self._at != version(count):
            return None
        return self._value

    def note(self, count: Tensor, value: int | None) -> None:
        """Note the count's value; None: it is unknown."""
        if value is None or self._captured:
            self._tensor = None
            return
        self._tensor, self._at, self._value = weakref.ref(count), version(count), value

    def read(self, count: Tensor) -> int | None:
        """The value of a count, for which the host waits if it does not know it; None where it cannot be known."""
        if torch.compiler.is_compiling() or is_capturing():
            self._captured = True
        # Inference tensors have no versions.
        if self._captured or count.is_meta or count.is_inference():
            return None
        value = self.known(count)
        if value is None:
            value = int(count)
            self.note(count, value)
        return value

    def __reduce__(self) -> Any:
        # A copy has another tensor, with versions counted anew.
        return HostCount, ()


WatchedDType = Literal["float32", "bfloat16", "float16"]
"""A dtype in which changes of weights are looked for."""


class Watched(NamedTuple):
    """Which elements changed.

    Attributes:
        mask: -1 where the weight has had other bits since the mask was cleared, else 0: int8, of the shape of the weights.
        dtype: The dtype in which weights are compared.
    """

    mask: Tensor
    dtype: WatchedDType

    @classmethod
    def of(cls, weights: Tensor, dtype: WatchedDType) -> Watched:
        """Return a mask of zeros for these weights."""
        return cls(torch.zeros(weights.shape, dtype=torch.int8, device=weights.device), dtype)

    def note(self, old: Tensor, new: Tensor) -> None:
        """Add the elements in which weights differ."""
        changed = rounding.seen_bits(old, self.dtype) != rounding.seen_bits(new, self.dtype)
        if torch.compiler.is_compiling():
            # In int32, as the rest of the step: a vector of the loop has as many elements of everything.
            self.mask.copy_((self.mask.to(torch.int32) | -changed.to(torch.int32)).to(torch.int8))
        else:
            self.mask.bitwise_or_(changed.to(torch.int8).neg_())

    def cut(self, where: slice) -> Watched:
        """Return that of some elements of a vector, as a view."""
        return Watched(self.mask[where], self.dtype)


class HostMemory(Protocol):
    """The host's memory in which the state of segments lies; see :mod:`everybit_torch.segments.host_state`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory on the host."""
        ...

    def begin(self, segments: Sequence[Segment]) -> None:
        """Let the state of the first of these segments be on its way. They are stepped in this order."""
        ...

    def step(self, segment: Segment, grad: Tensor, step: Callable[[Segment, Tensor], Metrics | None]) -> Metrics | None:
        """Step a segment whose state lies there."""
        ...

    def finish(self) -> None:
        """Wait until the new state is in the host's memory."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Segment:
    """A tensor that is stepped at once.

    It knows no parameter, no model and no rank. Masks and labels are settled before it is made.

    Args:
        optimizer: The optimizer of these elements.
        tensor: The weights, as stored. A step changes them in place.
        state: The optimizer's state for them, which a step changes in place.
        first: Global index of the first element, which the others follow; or the indices of a vector with elements from several places.
        is_part: Whether these are elements of a parameter of which others are elsewhere, and the transform requests numbers of each.
        watched: Where steps note which weights they change; None: nowhere.
        host: The host's memory in which the state lies; None: it lies where the tensor does.

    Attributes:
        stored: The formats of the weights and of the state.
        is_whole: Whether it must not be cut, because its transform must see whole tensors.
        first_tensor: ``first`` on the device: int64, 0-d, or the other indices as they are.
        count: The host's copy of ``state.step``.
    """

    optimizer: eb.Optimizer[Any]
    tensor: Tensor
    state: OptimizerState[Any]
    first: int | Blocks | Scattered = 0
    is_part: bool = False
    watched: Watched | None = None
    host: HostMemory | None = None
    stored: Resolved = field(init=False)
    is_whole: bool = field(init=False)
    first_tensor: Tensor | Blocks | Scattered = field(init=False)
    count: HostCount = field(init=False, default_factory=HostCount)
    pieces_on_host: tuple[tuple[Any, ...], list[Any]] | None = field(init=False, default=None, repr=False)
    _entries: list[tuple[Entry, Tensor]] = field(init=False, default_factory=list, repr=False)
    _layout: tuple[OptimizerState[Any], Layout] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        (self.stored,) = self.optimizer.formats([self.tensor])
        self.is_whole = self.optimizer.needs_whole
        first, device = self.first, self.tensor.device
        self.first_tensor = torch.full((), first, dtype=torch.int64, device=device) if isinstance(first, int) else first

    @classmethod
    def new(
        cls,
        optimizer: eb.Optimizer[Any],
        tensor: Tensor,
        first: int | Blocks | Scattered = 0,
        is_part: bool = False,
        host: HostMemory | None = None,
    ) -> Segment:
        """Return a segment before its first step. The state of a long vector is computed piece by piece."""
        if tensor.ndim != 1 or tensor.numel() <= CHUNK or optimizer.needs_whole:
            made = cls(optimizer, tensor, optimizer.init([tensor], eb.Context(first_element=first)), first, is_part)
            if host is not None:
                moved = map_parts(
                    made.layout, made.state, lambda x, _: host.empty(x.shape, x.dtype).copy_(x), torch.clone
                )
                made = cls(optimizer, tensor, moved, first, is_part, host=host)
            return made
        (stored,) = optimizer.formats([tensor])

        def room(x: Tensor, part: PartSpec) -> Tensor:
            shape = (part.count(tensor.numel()),)
            return x.new_empty(shape) if host is None else host.empty(shape, x.dtype)

        none = tensor[:0]
        empty = optimizer.init([none])
        layout = Layout.of([none], [stored], empty.inner, empty.extra, is_checked=False)
        made = cls(optimizer, tensor, map_parts(layout, empty, room, torch.clone), first, is_part, host=host)
        size = max(CHUNK // made.block, 1) * made.block
        for start in range(0, tensor.numel(), size):
            part = made.cut(start, min(start + size, tensor.numel()), lambda x: x)
            write(part.state, optimizer.init([part.tensor], eb.Context(first_element=part.first)))
        return made

    def here(self) -> Segment:
        """Return the segment with its state where its tensor lies: itself, or a copy to be read."""
        device = self.tensor.device
        if all(x.device == device for x in eb.tree.leaves(self.state)):
            return self
        state = map_parts(self.layout, self.state, lambda x, _: x.to(device), lambda x: x)
        found = Segment(self.optimizer, self.tensor, state, self.first, self.is_part)
        found._layout = state, self.layout
        return found

    @property
    def block(self) -> int:
        """The number of elements between which it is not cut: those of a format's block, or of a row."""
        return self.first.size if isinstance(self.first, Blocks) else self.stored.block

    # -- cutting --------------------------------------------------------------------------------------------------------------------

    def cut(self, start: int, stop: int, on_shared: Callable[[Tensor], Tensor] = torch.clone) -> Segment:
        """Return the segment of some elements of a vector, as views.

        Args:
            start: The first element; a multiple of :attr:`block`.
            stop: The element after the last.
            on_shared: Makes the counts and other shared state of the part. By default it has copies.

        Raises:
            ValueError: A block of a format lies on both sides of an edge.
        """
        state = cut(self.layout, self.state, start, stop, on_shared)
        first = self.first + start if isinstance(self.first, int) else self.first.cut(start, stop)
        watched = None if self.watched is None else self.watched.cut(slice(start, stop))
        part = Segment(self.optimizer, self.tensor[start:stop], state, first, self.is_part, watched, self.host)
        part._layout = part.state, self.layout
        part.count.note(part.state.step, self.count.known(self.state.step))
        return part

    def pieces(
        self, elements: int, on_shared: Callable[[Tensor], Tensor] = torch.clone
    ) -> Iterator[tuple[slice, Segment]]:
        """Cut a long vector, for work that goes through it a part at a time.

        A tensor that is no vector is one piece, and so is a parameter of which a transform requests numbers, since they are of the whole.

        Args:
            elements: About the length of a piece: pieces begin at multiples of a block.
            on_shared: See :meth:`cut`. Copies: every piece counts from the same step.

        Yields:
            The elements of the piece, and the piece.
        """
        numel = self.tensor.numel()
        if self.tensor.ndim != 1 or self.is_whole or self.optimizer.per_tensor or numel <= elements:
            yield slice(0, numel), self
            return
        size = max(elements // self.block, 1) * self.block
        for start in range(0, numel, size):
            stop = min(start + size, numel)
            yield slice(start, stop), self.cut(start, stop, on_shared)

    # -- state ----------------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Entry, Tensor]]:
        """List the tensors of the state with their names and roles. They stay the same tensors, and are found once."""
        if not self._entries:
            self._entries = entries(self.layout, self.state)
        return self._entries

    def shared(self) -> list[Tensor]:
        """List counts, and other state that is no element's."""
        return [x for entry, x in self.entries() if entry.role == "shared"]

    # -- stepping -------------------------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How the tensor and its state are stored."""
        state = self.state
        if self._layout is not None and self._layout[0] is state:
            return self._layout[1]
        found = Layout.of([self.tensor], [self.stored], state.inner, state.extra, is_checked=False)
        if not torch.compiler.is_compiling():  # one of a trace is of that trace
            self._layout = state, found
        return found

    def due(self) -> Due:
        """Return the periodic work that is due at the next step, as the host counts steps.

        It is empty if there is no such work, or if the host cannot know the count: the device then decides.
        """
        if not self.optimizer.periods:
            return ()
        steps = self.count.read(self.state.step)
        return () if steps is None else self.optimizer.due(steps + 1)

    def note_step(self, before: int | None) -> None:
        """Note a step for the host, which knew this count before it."""
        self.count.note(self.state.step, None if before is None else before + 1)

    def step(
        self, grad: Tensor, totals: Sequence[Tensor] = (), *, due: Due = (), metrics: bool = False
    ) -> Metrics | None:
        """Step in place without a compiler, a piece of a cache's size at a time.

        Args:
            grad: The gradient, in the tensor's shape.
            totals: The totals of the transform's requests, in order; see :mod:`everybit_torch.segments.totals`.
            due: The periodic work that is due.
            metrics: Whether to measure the step.
        """
        measured, part, before = None, self, self.count.known(self.state.step)
        for where, part in self.pieces(piece_size(self.tensor.device)):
            own = grad if part is self else grad[where]
            mask, watch = part.watched or (None, None)
            found = step_in_place(
                self.optimizer, [part.tensor], [own], part.state if mask is None else (part.state, mask), part.first,
                totals=totals, holds_wholes=not part.is_part, due=due, metrics=metrics, layout=self.layout, watch=watch,
            )  # fmt: skip
            measured = found if measured is None or found is None else measured + found
        if part is not self:
            write(self.shared(), part.shared())
        self.note_step(before)
        return measured


def piece_size(device: torch.device) -> int:
    """Elements that are stepped at a time on a device without a compiler."""
    return PIECE if device.type in ("cpu", "meta") else DEVICE_PIECE


def step_in_place(
    optimizer: eb.Optimizer[Any],
    tensors: list[Tensor],
    grads: list[Tensor],
    state: OptimizerState[Any] | tuple[OptimizerState[Any], Tensor],
    first: FirstElement,
    *,
    totals: Sequence[Tensor] = (),
    holds_wholes: bool = True,
    due: Due = (),
    metrics: bool = False,
    layout: Layout | None = None,
    watch: WatchedDType | None = None,
) -> Metrics | None:
    """Take the pure step, and write its results over its arguments. Compiled, the writes become in-place stores.

    If ``watch`` is given, the state is a pair of it and a mask; the step adds the elements that it changes to the mask (:class:`Watched`).
    """
    mask: Tensor | None = None
    if isinstance(state, tuple):
        state, mask = state
    ctx = eb.Context(first_element=first, due=due, pending=len(totals) > 0)
    found: Any = optimizer.step_traced(tensors, grads, state, ctx, layout=layout)
    if not isinstance(found, StepTrace):
        found = require_done(advance(found, totals, holds_wholes=holds_wholes), optimizer.transform)
    trace: StepTrace = found
    measured = measure(optimizer, trace, ctx) if metrics else None
    if mask is not None and watch is not None:
        Watched(mask, watch).note(tensors[0], trace.params[0])
    write((tensors, state), (trace.params, trace.state))
    return measured


def write(into: object, values: object) -> None:
    """Copy the tensors of one tree over those of another."""
    for old, new in zip(eb.tree.leaves(into), eb.tree.leaves(values), strict=True):
        if not old.ndim and old.is_floating_point() and torch.compiler.is_compiling():
            # Dynamo (torch 2.13) makes a number of a 0-d float64 input, and when it traces anew without one it takes a write for unused
            # (OutputGraph.remove_tensorify_specialized_graphargs). It sees no number in a view.
            old, new = old.view(1), new.reshape(1)
        old.copy_(new)
