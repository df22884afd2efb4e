"""Compares what ranks are about to do together: one small all-reduce in the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from everybit_torch.collectives.communicator import Communicator
from everybit_torch.sharded.host_bytes import bytes_of
from everybit_torch.sharded.scheduling.events import Event, Kind

Turn = Literal["microbatch", "step"]

_TURNS: dict[Turn, str] = {"microbatch": "begins a microbatch", "step": "begins step(), or finish_gradients()"}


class Comparer:
    """Compares which phase of a cycle ranks begin.

    Args:
        inner: The inner ranks; for tensors in the host's memory.
        outer: The outer ranks, likewise.

    Attributes:
        apart: Ranks were found in different phases, so that none takes part in what another one had begun.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self._ranks = inner, outer
        self.apart = False

    @property
    def handlers(self) -> dict[Kind, Callable[[Event], None]]:
        """The method that carries out each kind of event."""
        return {
            "compare microbatch": partial(self._compare, "microbatch"),
            "compare step": partial(self._compare, "step"),
        }

    def _compare(self, turn: Turn, event: Event) -> None:
        """Raise a RuntimeError, on all ranks, unless all begin the same. Every rank has to call it."""
        number = list(_TURNS).index(turn)
        message = torch.tensor([number, -number, event.number, -event.number], dtype=torch.int64)
        for ranks in self._ranks:
            ranks.all_reduce(message, "what ranks begin", dist.ReduceOp.MAX).wait()
        # Read from the host's memory, in which it lies: no device is waited for.
        most, least, last, not_last = bytes_of(message).cast("q")
        if most != -least:
            self.apart = True
            other = list(_TURNS)[most if number != most else -least]
            raise RuntimeError(
                f"{turn}: this rank {_TURNS[turn]}, and another rank {_TURNS[other]}. Accepted is the same number of microbatches"
                " in a step on every rank: a rank without data takes part in one by a microbatch() with a loss of no parameter. Accepted"
                " next is zero_grad(), on every rank."
            )
        if last != -not_last:
            self.apart = True
            raise RuntimeError(
                "microbatch: this rank's backward pass is the last one before a step, and another rank's is not, or the reverse. Accepted"
                " is the same `last` on every rank; accepted next is zero_grad(), on every rank."
            )
