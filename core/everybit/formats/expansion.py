"""Powers by which numbers in [0, 1] are expanded over the levels of a floating-point map, and roots that bring the levels back.

A power is 1, 2, 4 or 8, and goes by its logarithm. Powers are squarings and roots are square roots, which IEEE 754 rounds correctly, and
:func:`everybit.sqrt` does: no bit depends on a library. The levels of a block are roots of the map's levels, so that all codes
lie in the range that the block has.

Reference:
    Xi et al. 2024, https://arxiv.org/abs/2410.19313 (COAT), section 4, with real numbers as powers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everybit.base import sqrt

POWERS = 4
"""How many powers there are; the greatest is ``2**(POWERS - 1)``."""


def root(level: Tensor, power: Tensor | int) -> Tensor:
    """The root of a number in [0, 1]: a square root as often as the logarithm of the power says."""
    for count in range(1, POWERS):
        level = _where(power, count, sqrt(level), level)
    return level


def raised(x: Tensor, power: Tensor | int) -> Tensor:
    """A number in [0, 1] raised to a power; more, rather than less, than the power that a rounded root comes from.

    Each of three squarings and three square roots is off by 2**-24, times the powers that follow: by 23 * 2**-24 together, relative.
    """
    for count in range(1, POWERS):
        x = _where(power, count, x * x, x)
    return x * (1.0 + 2.0**-18)


def _where(power: Tensor | int, count: int, more: Tensor, less: Tensor) -> Tensor:
    if isinstance(power, int):
        return more if power >= count else less
    return torch.where(power >= count, more, less)
