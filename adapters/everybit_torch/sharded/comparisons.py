"""Compares what ranks are about to do with weights that they gather together: one small all-reduce in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator, Pending
from everybit_torch.sharded.scheduling.events import PassFlags

Turn = Literal["forward", "again", "reshard", "backward"]

_TURNS: dict[Turn, str] = {
    "forward": "begins another forward pass",
    "again": "needs the weights of a unit that it has used in this forward pass already",
    "reshard": "gives back weights by reshard(), which it had gathered by unshard()",
    "backward": "begins its backward pass",
}


_FLAGS: dict[PassFlags, tuple[str, str]] = {
    PassFlags.REDUCES: (
        "sum the gradients of this backward pass over the ranks",
        "`last`, and set_requires_gradient_sync()",
    ),
    PassFlags.CREATES_GRAPH: ("make a graph of this backward pass", "`create_graph`"),
}
_RETAINED = 2 ** len(PassFlags)
"""By so much the digest of the units that stay gathered is multiplied, to be compared together with the flags."""

_ANY = _RETAINED * 2**32  # more than all flags and digests


class DifferentPassesError(RuntimeError):
    """Ranks are in backward passes with different flags, or keep different weights after them. No gradient was sent in them."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The properties that the ways of all ranks have in common.

    Attributes:
        alike: All ranks' units ran in the same order.
        in_order: On every rank units ran once each, in the layout's order; they may have left out different ones.
    """

    alike: bool
    in_order: bool

    @property
    def bounded(self) -> bool:
        """Whether a rank may wait for a reduction inside the backward pass without keeping another from joining it."""
        return self.alike or self.in_order


class Comparison:
    """A comparison that is under way."""

    def __init__(self, turn: Turn, flags: int | None, message: Tensor, pending: Pending) -> None:
        self._turn: Turn = turn
        self._flags, self._message, self._pending = flags, message, pending
        self._result: Agreement | None = None

    def result(self) -> Agreement:
        """Wait for it.

        Raises:
            RuntimeError: Another rank is about to do something else.
            DifferentPassesError: Ranks are in backward passes with different flags; on all ranks, but those that gave none.
        """
        if self._result is None:
            self._pending.wait()
            most, least, digest, other_digest, disordered, all_flags, no_flags = self._message.tolist()
            alike, in_order = digest == -other_digest, not disordered
            turns: list[Turn] = list(_TURNS)
            if most != -least or (turns[most] != "backward" and not alike):
                mine = turns.index(self._turn)
                other = turns[most if mine != most else -least]
                others = _TURNS[other] if other != self._turn else "does so for another unit, or with others gathered"
                raise RuntimeError(
                    f"optim_grads_params: this rank {_TURNS[self._turn]}, and another rank {others}. Between two backward passes all ranks"
                    " run the same number of forward passes, and use a unit equally often in each; accepted next is zero_grad(), on every"
                    " rank."
                )
            if self._flags is not None and all_flags != -no_flags:
                self._refuse(self._flags, all_flags if all_flags != self._flags else -no_flags)
            self._result = Agreement(alike, in_order)
        return self._result

    @staticmethod
    def _refuse(mine: int, others: int) -> None:
        for flag, (what, accepted) in _FLAGS.items():
            if flag & (mine ^ others):
                this, other = ("does", "does not") if flag & mine else ("does not", "does")
                raise DifferentPassesError(
                    f"optim_grads_params: this rank {this} {what}, and another rank {other}. Accepted is the same {accepted} on every rank;"
                    " accepted next is zero_grad(), on every rank."
                )
        raise DifferentPassesError(
            "optim_grads_params: this rank and another one keep the weights of different units after this backward pass. Accepted is the"
            " same set_reshard_after_backward() on every rank; accepted next is zero_grad(), on every rank."
        )


class Comparer:
    """Compares what ranks are about to do, by one small all-reduce in the host's memory.

    Args:
        inner: The inner ranks; for tensors in the host's memory.
        outer: The outer ranks, likewise.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self._inner, self._outer = inner, outer

    def start(
        self, turn: Turn, digest: int, *, in_order: bool = True, flags: PassFlags | None = None, retained: int = 0
    ) -> Comparison:
        """Begin to compare. Every rank has to call it.

        Args:
            turn: What this rank is about to do.
            digest: Of what has to be the same, below 2**62.
            in_order: See :class:`Agreement`.
            flags: Of a backward pass; None: they are not known, and any others' will do.
            retained: With ``flags``, a digest, below 2**32, of the units that stay gathered.
        """
        number = list(_TURNS).index(turn)
        own = None if flags is None else int(flags) + _RETAINED * retained
        most, least = (own, -own) if own is not None else (-_ANY, -_ANY)
        message = torch.tensor([number, -number, digest, -digest, int(not in_order), most, least], dtype=torch.int64)
        pending = self._inner.all_reduce(message, "the order of units", dist.ReduceOp.MAX)
        if self._outer.size > 1:
            # Now, not when the result is wanted: a rank that waits for it has to have done its part.
            pending.wait()
            pending = self._outer.all_reduce(message, "the order of units", dist.ReduceOp.MAX)
        return Comparison(turn, own, message, pending)
