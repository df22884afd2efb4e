"""The rounded sum of the received parts as one kernel: it reads each part once, and writes the result.

Without a compiler every operation of it is a kernel, with scratch in float64 between two of them (see :mod:`.collectives.reduction`). The
operations and their order are the same, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everybit_torch import notices
from everybit_torch.compiled.compilation import DeclinedError, cause, compile_step, has_compiler, know_whole_lines
from everybit_torch.streams import is_capturing
from everybit_torch.torch_internals.compiler import let_length_vary

TOGETHER = 16
"""Parts that one kernel adds up; of more ranks there are several, with sums in float64 between them."""


class _SumKind(NamedTuple):
    """The properties of a sum, besides dtypes, on which its code depends.

    Attributes:
        ranks: How many parts it adds up.
        adds: Whether the present values are in the sum.
        divides: Whether the sum is divided.
        scale: A factor for the sum of the parts.
        first: Whether there is no earlier sum.
        last: Whether no further sum follows.
    """

    ranks: int
    adds: bool
    divides: bool
    scale: float
    first: bool
    last: bool


_SumKey = tuple[torch.dtype, torch.dtype, _SumKind]


class FusedSums:
    """Compiled sums of parts, one for each kind of sum: by dtypes, number of parts, and operations on the sum.

    Args:
        device: Where the parts lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._usable = device.type != "cpu" and has_compiler(device)
        self._compiled: dict[_SumKey, Callable[..., None]] = {}
        self._began = False

    def __call__(self, main: Tensor, parts: Tensor, *, adds: bool, by: Tensor | None, scale: float) -> bool:
        """``main = (main + scale * parts.sum(0)) / by``, or without ``main`` in the sum, in float64 and in this order.

        Args:
            main: 1-d, of ``n`` elements.
            parts: ``(ranks, n)``, contiguous.
            adds: Whether the values of ``main`` are in the sum.
            by: A divisor, float64, one element; None: there is no division.
            scale: A factor for the sum of the parts.

        Returns:
            Whether it was done. If not, no tensor was written: there is no compiler for it here.
        """
        if not self._usable or main.numel() < 2:
            return False
        ranks = len(parts)
        several = ranks > TOGETHER
        carried = torch.empty(main.numel(), dtype=torch.float64, device=main.device) if several else None
        for low in range(0, ranks, TOGETHER):
            here, first, last = parts[low : low + TOGETHER], low == 0, low + TOGETHER >= ranks
            kind = _SumKind(len(here), adds and last, by is not None and last, scale if last else 1.0, first, last)
            function = self._find((main.dtype, parts.dtype, kind), main, here)
            if function is None:
                return False  # nothing was written but what is carried
            self._began = False
            try:
                function(main, here, by if last else None, carried)
            except Exception as error:
                if self._began:
                    raise
                self._usable = False
                why = (
                    "torch.compile is switched off"
                    if isinstance(error, DeclinedError)
                    else f"the compiler raised {cause(error)}"
                )
                notices.warn(
                    "compile: got True, but sums of gradients on the wire run uncompiled from here on, with the same results and slower:"
                    f" {why}."
                )
                return False
        return True

    def _find(self, key: _SumKey, main: Tensor, parts: Tensor) -> Callable[..., None] | None:
        if key not in self._compiled:
            if is_capturing():
                return None  # compilers load code, which cannot be captured
            let_length_vary(main)
            let_length_vary(parts, 1)
            self._compiled[key] = compile_step(sum_of(key[2]), self._begin)
        return self._compiled[key]

    def _begin(self, *_arguments: Any) -> None:
        self._began = True


def sum_of(kind: _SumKind) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]:
    """The function that is compiled for a kind of sum; earlier sums are carried in float64."""
    ranks, adds, divides, scale, first, last = kind

    def add_up(main: Tensor, parts: Tensor, by: Tensor | None, carried: Tensor | None) -> None:
        know_whole_lines([main])
        total = parts[0].to(torch.float64)
        if not first:
            assert carried is not None
            total = carried + total
        for number in range(1, ranks):
            total = total + parts[number].to(torch.float64)
        if not last:
            assert carried is not None
            carried.copy_(total)
            return
        if scale != 1.0:
            total = total * scale
        if adds:
            total = total + main.to(torch.float64)
        if divides:
            assert by is not None
            total = total / by
        main.copy_(total)

    return add_up
