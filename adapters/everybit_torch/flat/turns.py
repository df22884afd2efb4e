"""Compares the phases of the cycle that ranks begin, so that no rank takes part in a collective of another phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from everybit_torch.collectives import Communicator

Turn = Literal["microbatch", "step"]

_TURNS: dict[Turn, str] = {"microbatch": "begins a microbatch", "step": "begins step(), or finish_gradients()"}


class Turns:
    """Compares which phase of a cycle ranks begin: one small all-reduce in the host's memory, for which no device is waited for.

    Args:
        ranks: The inner and the outer ranks.

    Attributes:
        apart: Ranks were found in different phases, so that no rank takes part in another rank's collective.
    """

    def __init__(self, ranks: Sequence[Communicator]) -> None:
        self._ranks = [one.for_host_memory() for one in ranks if one.size > 1]
        self.apart = False

    def begin(self, turn: Turn, *, last: bool = False, number: int = 0, flags: Sequence[bool] = ()) -> list[bool]:
        """Compare this phase with those that other ranks begin. Every rank has to call it.

        Args:
            turn: The phase.
            last: Whether a microbatch is the last before a step.
            number: How many microbatches of this cycle were summed over the ranks before it.
            flags: Flags, as many on every rank that begins the phase.

        Returns:
            Whether a flag is set on any rank, for each.

        Raises:
            RuntimeError: Another rank begins another phase.
        """
        if not self._ranks:
            return list(flags)
        position = list(_TURNS).index(turn)
        own = [position, -position, int(last), -int(last), number, -number]
        highest = torch.tensor(own, dtype=torch.int64, device="cpu")
        for ranks in self._ranks:
            ranks.all_reduce(highest, "what ranks begin", dist.ReduceOp.MAX).wait()
        most, least, is_last, is_not, count, fewest = highest.tolist()
        self.apart = (most, is_last, count) != (-least, -is_not, -fewest)
        if most != -least:
            other = list(_TURNS)[most if position != most else -least]
            raise RuntimeError(
                f"{turn}: this rank {_TURNS[turn]}, and another rank {_TURNS[other]}. Accepted is the same number of microbatches"
                " in a step on every rank: a rank without data takes part in one by a microbatch() with a loss of no parameter. Accepted"
                " next is zero_grad(), on every rank."
            )
        if is_last != -is_not:
            raise RuntimeError(
                "microbatch: this rank's backward pass is the last one before a step, and another rank's is not, or the reverse. Accepted"
                " is the same `last` on every rank; accepted next is zero_grad(), on every rank."
            )
        if self.apart:
            raise RuntimeError(
                f"{turn}: ranks had {-fewest} to {count} backward passes before in this cycle, whose gradients were summed over the ranks:"
                " zero_grad() was called on some of them only, or one had an error. Accepted next is zero_grad(), on every rank."
            )
        if not flags:
            return []
        found = torch.tensor(list(flags), dtype=torch.uint8, device="cpu")
        for ranks in self._ranks:
            ranks.all_reduce(found, "which parameters have a gradient", dist.ReduceOp.MAX).wait()
        return [flag != 0 for flag in found.tolist()]

    def close(self) -> None:
        """Give back process groups that were made for it. Every rank has to call it."""
        for ranks in self._ranks:
            ranks.close()
