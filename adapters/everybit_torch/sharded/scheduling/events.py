"""The events of a cycle."""

from __future__ import annotations

from enum import IntFlag
from typing import Literal, NamedTuple

Kind = Literal[
    # Weights, of a unit: start to gather them; wait until they are gathered, and show them to the model; free them. Copy them out, while
    # they are gathered, for a state dict or a file.
    "gather",
    "wait",
    "free",
    "copy out",
    # Comparisons between the ranks: of what begins (a microbatch, a step), three of forward passes, two of backward passes.
    "compare microbatch",
    "compare step",
    "compare forward",
    "compare again",
    "compare reshard",
    "compare backward",
    "require compared",
    "require alike",
    # Gradients, of a group: allocate the bucket for sending, or the sum of passes that are not reduced, or the main gradient; a parameter's
    # gradient arrives, and is copied or added; zeros for a parameter without one; free what nothing arrived in; start to reduce; divide;
    # forget.
    "open bucket",
    "open unreduced",
    "open main",
    "copy",
    "add",
    "zero",
    "close",
    "reduce",
    "reduce last",
    "finalize",
    "clear",
    # Reductions under way: wait for all of them; take up those that are over; wait for the communication, whatever becomes of the sums.
    "finish",
    "poll",
    "drain",
    # A step: what all ranks have to know alike; the optimizer; begin to hand out a group's weights; wait until they are there; autograd is
    # told that they are others.
    "agree",
    "step",
    "spread",
    "settle",
    "stepped",
]


class PassFlags(IntFlag):
    """The kind of a backward pass, which determines its collectives."""

    REDUCES = 1  # its gradients are summed over the ranks
    CREATES_GRAPH = 2  # autograd records it


class Event(NamedTuple):
    """One thing that happens in a cycle.

    Attributes:
        kind: What happens.
        number: The number of the unit or of the layout's group that it happens to; for a comparison, what is compared.
        place: The number of the parameter in its group; for the comparison of a backward pass, its flags.
    """

    kind: Kind
    number: int = 0
    place: int = 0
