"""The sum of the squares of gradients in float64, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from everybit.base import sum_of_all_squares
from everybit_torch import notices
from everybit_torch.compiled import DeclinedError, DirectFunction, cause, has_compiler


class Squares:
    """Adds up the squares of all elements, uncompiled or in one pass over memory.

    Squares of float32 and narrower numbers always fit into float64, so that the sum is finite if and only if all of them are.

    Args:
        device: Where the sum is wanted.
        compile: Whether it is compiled. Squares are then added up in another order: the sum may differ in its last bits.
    """

    def __init__(self, device: torch.device, *, compile: bool) -> None:
        self._device, self._compiles = device, compile
        self._squares = DirectFunction(_squares)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the sum: float64, 0-d.

        Args:
            gradients: 1-d, of any floating dtypes and devices.
        """
        sums, left = list[Tensor](), dict[torch.device, list[Tensor]]()
        for gradient in gradients:
            own = self._in_one_pass(gradient)
            if own is None:
                left.setdefault(gradient.device, []).append(gradient)
            else:
                sums.append(own)
        sums += [sum_of_all_squares(several) for several in left.values()]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return reduce(torch.add, [own.to(self._device) for own in sums])

    def _in_one_pass(self, gradient: Tensor) -> Tensor | None:
        """The sum by compiled code, if there is any."""
        if not self._compiles or gradient.numel() < 2 or not has_compiler(gradient.device):
            return None
        try:
            return self._squares(gradient)
        except DeclinedError:  # switched off, as steps say, or inside of a dispatch mode
            return None
        except Exception as error:
            self._compiles = False
            notices.warn(
                "compile: got True, but the norm of gradients is found uncompiled from here on, which is slower: the compiler raised"
                f" {cause(error)}."
            )
            return None


def _squares(gradient: Tensor) -> Tensor:
    wide = gradient.to(torch.float64)
    return (wide * wide).sum()
