"""Normal numbers from addressed random bits."""

from __future__ import annotations

import math

from torch import Tensor

from everybit.base.barriers import cos, log, materialize, sqrt
from everybit.base.random_bits import Key, uniform


def normal(like: Tensor, radius: Key, angle: Key) -> Tensor:
    """A standard normal number for each element of ``like``, float64 (Box and Muller 1958).

    Their greatest possible magnitude is 5.9.

    Args:
        like: A tensor of the shape and device of the numbers.
        radius: Of :meth:`everybit.Context.keys`, as ``angle``; two that draw different bits.
        angle: The other.
    """
    # In the middle of its interval, so that no logarithm of zero is taken.
    share = uniform(radius.bits(like)).double() + 2.0**-25
    turn = uniform(angle.bits(like)).double() * (2 * math.pi)
    return sqrt(materialize(log(materialize(share)) * -2)) * cos(materialize(turn))
