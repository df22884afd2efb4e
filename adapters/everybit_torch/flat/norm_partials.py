"""The sum of the squares of gradients in float64, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everybit.base import sum_of_squares
from everybit.base.barriers import scratch_for
from everybit_torch import notices
from everybit_torch.compiled import DeclinedError, cause, compile_step, has_compiler, let_length_vary


class Squares:
    """Adds up the squares of all elements, uncompiled or in one pass over memory.

    Squares of float32 and narrower numbers always fit into float64, so that the sum is finite if and only if all of them are.

    Args:
        device: Where the sum is wanted.
        compile: Whether it is compiled. Squares are then added up in another order: the sum may differ in its last bits.
    """

    def __init__(self, device: torch.device, *, compile: bool) -> None:
        self._device, self._compiles = device, compile
        self._compiled: dict[torch.dtype, Callable[[Tensor], Tensor]] = {}

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum: float64, 0-d.

        Args:
            gradients: 1-d, of any floating dtypes and devices.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        scratch = scratch_for(gradients) if len({x.device for x in gradients}) == 1 else None
        for gradient in gradients:
            own = self._in_one_pass(gradient)
            own = sum_of_squares(gradient, scratch) if own is None else own
            total += own.to(self._device)
        return total

    def _in_one_pass(self, gradient: Tensor) -> Tensor | None:
        """The sum by compiled code, if there is any."""
        if not self._compiles or gradient.numel() < 2 or not has_compiler(gradient.device):
            return None
        if gradient.dtype not in self._compiled:
            let_length_vary([gradient])
            self._compiled[gradient.dtype] = compile_step(_squares(), _begin)
        try:
            return self._compiled[gradient.dtype](gradient)
        except DeclinedError:  # switched off, as steps say, or inside of a dispatch mode
            return None
        except Exception as error:
            self._compiles = False
            notices.warn(
                "compile: got True, but the norm of gradients is found uncompiled from here on, which is slower: the compiler raised"
                f" {cause(error)}."
            )
            return None


def _begin(*_arguments: Any) -> None:
    """A no-op: a failed call may be repeated."""


def _squares() -> Callable[[Tensor], Tensor]:
    def squares(gradient: Tensor) -> Tensor:
        wide = gradient.to(torch.float64)
        return (wide * wide).sum()

    return squares
