"""The events of a cycle."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    # Comparisons between the ranks, of what begins.
    "compare microbatch",
    "compare step",
    # Gradients, of a group: allocate the bucket for sending; a parameter's gradient arrives, and is copied or added; zeros for a parameter
    # without one; free what nothing arrived in; start to reduce; divide; forget.
    "open bucket",
    "copy",
    "add",
    "zero",
    "close",
    "reduce",
    "reduce last",
    "finalize",
    "clear",
    # Reductions under way: wait for all of them; wait for the communication, whatever becomes of the sums.
    "finish",
    "drain",
    # A step: what all ranks have to know alike; the optimizer; hand out a group's weights; wait until they are there; autograd is told that
    # they are others.
    "agree",
    "step",
    "spread",
    "settle",
    "stepped",
]


class Event(NamedTuple):
    """One thing that happens in a cycle.

    Attributes:
        kind: What happens.
        number: The number of the layout's group that it happens to; for a comparison, what is compared.
        place: The number of the parameter in its group.
    """

    kind: Kind
    number: int = 0
    place: int = 0
