"""Random numbers that a transform draws, noted for the formula that has to use the same."""

from __future__ import annotations

from torch import Tensor

import everybit as eb
from everybit.base import random_bits


class Drawn:
    """Stands for ``normal`` in a module, and notes what it draws, in the order of updates and parameters."""

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []
        self.draw = random_bits.normal

    def __call__(self, like: Tensor, radius: eb.Key, angle: eb.Key) -> Tensor:
        self.numbers.append(self.draw(like, radius, angle))
        return self.numbers[-1]
