"""One reduction for every strategy: partial sums in, the sum over the ranks in the main gradient, at the main gradient's precision.

Collectives always sum, and never average: a mean on the wire rounds each summand by ``1 / N`` first, in the wire's dtype, which
for three ranks and bfloat16 is off by 0.2 % every time. The divisor is applied once, to the sum.

With an exact wire every rank receives the others' parts as they are (all-to-all) and adds them up in float64, so that the sum is
rounded once, to the main gradient. The error of a ring in bfloat16 grows with the root of the number of ranks (2.7 % at 512); this error
does not grow. It sends as many bytes as a ring does. On a mesh of two dimensions the sums over the inner ranks are sent on as the main
gradient holds them, and are added up in float64 again: rounded once in each dimension.

Everything happens in chunks with scratch of a fixed size. Mixed-dtype arithmetic in torch would convert whole tensors first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from everybit.base import DTYPES
from everybit.policies import Resolved
from everybit_torch.collectives.communicator import Communicator, PendingCollective

CHUNK = 1 << 16
"""Elements converted at a time, on a CPU: they stay in a core's cache."""

DEVICE_CHUNK = 1 << 24
"""Elements converted at a time on an accelerator, where every operation is a kernel to launch."""


def chunk_size(device: torch.device) -> int:
    """Elements converted at a time on a device."""
    return CHUNK if device.type in ("cpu", "meta") else DEVICE_CHUNK


Mode = Literal["copy", "add"]


def _chunk_of_sums(device: torch.device, numel: int, parts: int, part: torch.dtype) -> int:
    """Elements that are added up at a time: of several parts on an accelerator, so many that scratch is no larger than all parts."""
    if parts == 1 or device.type in ("cpu", "meta"):
        return chunk_size(device)
    return max(min(DEVICE_CHUNK, numel * parts * part.itemsize // (2 * torch.float64.itemsize)), 1)


class FusedSum(Protocol):
    """Adds up parts in one pass over memory; see :class:`everybit_torch.compiled.fused_sums.FusedSums`."""

    def __call__(self, main: Tensor, parts: Tensor, *, adds: bool, by: Tensor | None, scale: float) -> bool:
        """Put the sum of ``parts``, of shape ``(ranks, n)``, into ``main``; return whether it was done."""
        ...


@dataclass(frozen=True, slots=True)
class Wire:
    """How gradients are sent between ranks.

    Attributes:
        dtype: The dtype on the wire.
        exact: Whether they are summed at the receiver, in float64, and not on the way, in ``dtype``.
        prescale: A power of two that gradients are multiplied by before they are sent, and the sum is divided by: a sum of float16 numbers
            on the way overflows at 65504.
    """

    dtype: torch.dtype
    exact: bool
    prescale: float = 1.0

    @classmethod
    def of(cls, resolved: Resolved, ranks: int) -> Wire:
        """Return the wire of a policy between so many ranks. One rank sums no values; the library sums float32 and wider dtypes."""
        dtype = DTYPES[resolved.grads_comm]
        exact = resolved.reduce == "float32" and dtype.itemsize < 4 and ranks > 1
        half = dtype is torch.float16 and not exact
        return cls(dtype, exact, 2.0 ** -math.ceil(math.log2(ranks)) if half else 1.0)

    @classmethod
    def pair(cls, resolved: Resolved, inner: int, outer: int) -> tuple[Wire, Wire]:
        """Return the wires of the inner and of the outer dimension of a mesh with so many ranks.

        The outer ranks send sums over the inner ranks. Exact sums are sent in the main gradient's dtype, and summed
        at the receiver as well: rounding them to the wire's 16 bits would lose the gain of the exact sum. They are
        ``1 / inner`` of the gradient. With one inner rank there is no sum yet, and the outer ranks are treated as ranks of one dimension.
        """
        within = cls.of(resolved, inner)
        if within.exact and outer > 1:
            return within, cls(DTYPES[resolved.grads_main], exact=True)
        return within, cls.of(resolved, outer)


@dataclass(frozen=True, slots=True)
class GradientWires:
    """How gradients are kept and sent.

    Attributes:
        main: The dtype in which they are added up.
        inner: How they are sent between the ranks that hold different parts.
        outer: How their sums are sent between the ranks that hold the same parts.
    """

    main: torch.dtype
    inner: Wire
    outer: Wire

    @classmethod
    def of(cls, resolved: Resolved, inner: int, outer: int) -> GradientWires:
        """Those of a policy, between so many ranks."""
        return cls(DTYPES[resolved.grads_main], *Wire.pair(resolved, inner, outer))


@dataclass(slots=True)
class Reduction:
    """A reduction under way; :meth:`finish` it before the main gradient is looked at.

    Attributes:
        pending: The collective.
        install: Puts the result into the main gradient.
        sent: The sent tensor, if it is not used elsewhere: its memory is given back as early as possible.
        received: The received tensor, if it is not the result.
        after: The next reduction.
    """

    pending: PendingCollective
    install: Callable[[], None]
    sent: Tensor | None = None
    received: Tensor | None = None
    after: Callable[[], None] | None = None

    def is_done(self) -> bool:
        """Whether :meth:`finish` would not wait for another rank."""
        return self.after is None and self.pending.is_done()

    def finish(self) -> None:
        """Wait, and put the sum into the main gradient."""
        self.pending.wait()
        # Explicitly: threads of the communication library may hold on to tensors for a moment longer.
        if self.received is not None:
            _free(self.sent)
        self.install()
        _free(self.sent)
        _free(self.received)
        if self.after is not None:
            self.after()


def _free(x: Tensor | None) -> None:
    """Free a tensor's memory, though a thread of the communication library may still hold the tensor."""
    if x is not None and x.untyped_storage().nbytes():
        x.untyped_storage().resize_(0)


def reduce_scatter_into(
    main: Tensor,
    partial: Tensor,
    communicator: Communicator,
    wire: Wire,
    *,
    mode: Mode,
    divisor: float | None = None,
    owned: bool = False,
    what: str = "gradients",
    fused: FusedSum | None = None,
    lengths: Sequence[int] = (),
) -> Reduction:
    """Sum ``partial`` over the ranks and put this rank's part into ``main``.

    Args:
        main: This rank's part of the main gradient, 1-d. It may be this rank's part of ``partial``.
        partial: This rank's sums for all ranks' parts, in the wire's dtype, prescaled; spoilt.
        communicator: The ranks.
        wire: How ``partial`` travels.
        mode: ``"copy"`` the sum over the present values, or ``"add"`` it to them.
        divisor: A divisor of the result, with the values before it; None if another sum follows.
        owned: Whether ``partial`` is used no more; its memory is given back.
        what: A description for error messages.
        fused: A compiled sum of the parts that an exact wire received.
        lengths: The lengths of the ranks' parts, if they differ.
    """
    count, rank = communicator.size, communicator.rank
    received = None
    if wire.exact:
        received = torch.empty(count * main.numel(), dtype=partial.dtype, device=partial.device)
        pending = communicator.all_to_all(received, partial, what, lengths)
        parts = list(received.view(count, main.numel()))
    else:
        own = communicator.parts(partial, lengths)[rank]
        pending = communicator.reduce_scatter(own, partial, what, lengths)
        parts = [own]
    scale = 1 / wire.prescale

    def put() -> None:
        if received is not None and fused is not None and main.numel():
            by = _by(divisor, torch.float64, main.device)
            if fused(main, received.view(count, main.numel()), adds=mode == "add", by=by, scale=scale):
                return
        install(main, parts, mode=mode, divisor=divisor, scale=scale)

    return Reduction(
        pending,
        put,
        partial if owned else None,
        received,
    )


def all_reduce_into(
    main: Tensor,
    partial: Tensor,
    communicator: Communicator,
    wire: Wire,
    *,
    divisor: float | None = None,
    owned: bool = False,
    what: str = "gradients",
    fused: FusedSum | None = None,
) -> Reduction:
    """Sum ``partial`` over the ranks and copy the sum to ``main``, on every rank. They may be one tensor, if they have one dtype.

    Arguments are those of :func:`reduce_scatter_into`.
    """
    if wire.exact:
        own = main.view(communicator.size, -1)[communicator.rank]
        scattered = reduce_scatter_into(
            own, partial, communicator, wire, mode="copy", divisor=divisor, owned=owned, what=what,
            fused=fused,
        )  # fmt: skip
        scattered.after = lambda: communicator.all_gather(main, own, what).wait()
        return scattered
    pending = communicator.all_reduce(partial, what)
    scale = 1 / wire.prescale
    return Reduction(
        pending,
        lambda: install(main, [partial], mode="copy", divisor=divisor, scale=scale),
        partial if owned else None,
    )


def install(
    main: Tensor,
    parts: list[Tensor],
    *,
    mode: Mode,
    divisor: float | None,
    scale: float = 1.0,
) -> None:
    """``main = (main + scale * sum(parts)) / divisor``, or without ``main`` in the sum; rounded as seldom as can be.

    Several parts are added up in float64, which holds sums of bfloat16 and float16 numbers of like sizes exactly.
    """
    (first, *others) = parts
    in_place = main.numel() > 0 and first.data_ptr() == main.data_ptr() and first.dtype is main.dtype
    if in_place and mode == "add":
        raise ValueError("mode: got 'add' for a sum that is where it would be added to; accepted is 'copy'.")
    if _nothing_to_do(len(parts), in_place, divisor is not None, scale):
        return
    wide = _wide(len(parts), main.dtype)
    by = _by(divisor, wide, main.device)
    if _without_scratch(len(parts), first.dtype, main.dtype, scale):
        _install_one(main, first, mode=mode, by=by)
        return
    size = _chunk_of_sums(main.device, main.numel(), len(parts), first.dtype)
    total, term = torch.empty(2, min(size, main.numel()), dtype=wide, device=main.device)
    for low, high in chunks(main.numel(), size):
        sum, other = total[: high - low], term[: high - low]
        sum.copy_(first[low:high])
        for part in others:
            sum.add_(other.copy_(part[low:high]))
        if scale != 1.0:
            sum.mul_(scale)
        if mode == "add":
            sum.add_(other.copy_(main[low:high]))
        if by is not None:
            sum.div_(by)
        main[low:high].copy_(sum)


def _install_one(main: Tensor, part: Tensor, *, mode: Mode, by: Tensor | None) -> None:
    """Install one part of the dtype in which it would be computed anyway, in one pass over memory."""
    several = mode == "add" and by is not None
    for low, high in chunks(main.numel(), chunk_size(main.device) if several else max(main.numel(), 1)):
        into, given = main[low:high], part[low:high]
        if mode == "add":
            into.add_(given)
            if by is not None:
                into.div_(by)
        elif by is not None:
            torch.div(given, by, out=into)
        elif into.data_ptr() != given.data_ptr():
            into.copy_(given)


def _by(divisor: float | None, wide: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the divisor as a tensor of one element: by a number, torch multiplies with its reciprocal on some devices."""
    return None if divisor is None or divisor == 1 else torch.full((1,), divisor, dtype=wide, device=device)


def _nothing_to_do(parts: int, in_place: bool, divides: bool, scale: float) -> bool:
    return in_place and parts == 1 and not divides and scale == 1.0


def _without_scratch(parts: int, part: torch.dtype, main: torch.dtype, scale: float) -> bool:
    return parts == 1 and part is main is _wide(1, main) and scale == 1.0


def _wide(parts: int, main: torch.dtype) -> torch.dtype:
    return torch.float64 if parts > 1 or main is torch.float64 else torch.float32


def accumulate(into: Tensor, gradient: Tensor, *, mode: Mode, scale: float = 1.0) -> None:
    """Copy or add a gradient into its slice of a buffer, in the wider of the two dtypes, without a temporary of its size.

    Args:
        into: 1-d, contiguous.
        gradient: A tensor of any shape, strides and floating dtype.
        mode: Whether it replaces the present values, or is added to them.
        scale: A factor.
    """
    if scale == 1.0 and (mode == "copy" or gradient.dtype is into.dtype):
        shaped = into.view(gradient.shape)
        if mode == "copy":
            shaped.copy_(gradient)
        else:
            shaped.add_(gradient)
        return
    wide = torch.promote_types(torch.promote_types(into.dtype, gradient.dtype), torch.float32)
    flat = gradient.reshape(-1)
    scratch = torch.empty(min(chunk_size(into.device), flat.numel()), dtype=wide, device=into.device)
    for low, high in chunks(flat.numel(), chunk_size(into.device)):
        term, place = scratch[: high - low], into[low:high]
        term.copy_(flat[low:high])
        if scale != 1.0:
            term.mul_(scale)
        if mode == "add" and place.dtype is wide:
            place.add_(term)
            continue
        if mode == "add":
            term.add_(place)
        place.copy_(term)


def cast(into: Tensor, values: Tensor, scale: float = 1.0) -> None:
    """``into = scale * values``, in the dtype of ``into``."""
    accumulate(into, values, mode="copy", scale=scale)


def as_sent(sums: Tensor, wire: Wire) -> Tensor:
    """Return sums in the wire's dtype and scale: themselves, scaled in place, if they have that dtype."""
    if sums.dtype is wire.dtype:
        return sums if wire.prescale == 1.0 else sums.mul_(wire.prescale)
    sent = torch.empty_like(sums, dtype=wire.dtype)
    cast(sent, sums, wire.prescale)
    return sent


def chunks(numel: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most ``size`` elements."""
    for low in range(0, numel, size):
        yield low, min(low + size, numel)


def divide(main: Tensor, divisor: float) -> None:
    """``main /= divisor``, correctly rounded on every device."""
    if divisor != 1:
        main.div_(torch.full((1,), divisor, dtype=main.dtype, device=main.device))
