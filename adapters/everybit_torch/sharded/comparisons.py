"""Compares what ranks are about to do together: one small all-reduce in the host's memory, of the same size for whatever they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator, Pending
from everybit_torch.sharded.host_bytes import bytes_of
from everybit_torch.sharded.scheduling.events import Event, Kind, PassFlags

Turn = Literal["forward", "again", "reshard", "backward", "microbatch", "step"]

_TURNS: dict[Turn, str] = {
    "forward": "begins another forward pass",
    "again": "needs the weights of a unit that it has used in this forward pass already",
    "reshard": "gives back weights by reshard(), which it had gathered by unshard()",
    "backward": "begins its backward pass",
    "microbatch": "begins a microbatch",
    "step": "begins step(), or finish_gradients()",
}
_PHASES: tuple[Turn, ...] = ("microbatch", "step")


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


class DifferentPhasesError(RuntimeError):
    """Ranks are in different phases of a cycle: one begins a step, say, and another one a further microbatch. Nothing of it was sent."""


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
            DifferentPhasesError: That is a step or a microbatch, on one of the two; on all ranks.
            DifferentPassesError: Ranks are in backward passes with different flags; on all ranks, but those that gave none.
        """
        if self._result is None:
            self._pending.wait()
            # Read from the host's memory, in which it lies: no device is waited for.
            most, least, digest, other_digest, disordered, all_flags, no_flags = bytes_of(self._message).cast("q")
            alike, in_order = digest == -other_digest, not disordered
            turns: list[Turn] = list(_TURNS)
            if most != -least or (turns[most] != "backward" and not alike):
                mine = turns.index(self._turn)
                other = turns[most if mine != most else -least]
                if self._turn in _PHASES or other in _PHASES:
                    self._refuse_phase(other)
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

    def _refuse_phase(self, other: Turn) -> None:
        if other == self._turn:
            raise DifferentPhasesError(
                "microbatch: this rank's backward pass is the last one before a step, and another rank's is not, or the reverse. Accepted"
                " is the same `last` on every rank; accepted next is zero_grad(), on every rank."
            )
        raise DifferentPhasesError(
            f"{self._turn}: this rank {_TURNS[self._turn]}, and another rank {_TURNS[other]}. Accepted is the same number of microbatches"
            " in a step on every rank: a rank without data takes part in one by a microbatch() with a loss of no parameter. Accepted next"
            " is zero_grad(), on every rank."
        )

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

    Attributes:
        apart: Ranks were found in different phases of a cycle, so that none takes part in what another one had begun.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self._inner, self._outer = inner, outer
        self.apart = False

    @property
    def handlers(self) -> dict[Kind, Callable[[Event], None]]:
        """The method that carries out each kind of event."""
        return {
            "compare microbatch": partial(self._compare, "microbatch"),
            "compare step": partial(self._compare, "step"),
            "compare forward": partial(self._compare, "forward"),
            "compare again": partial(self._compare, "again"),
            "compare reshard": partial(self._compare, "reshard"),
        }

    def _compare(self, turn: Turn, event: Event) -> None:
        self.result(self.start(turn, event.number))

    def result(self, comparison: Comparison) -> Agreement:
        """Wait for a comparison; see :meth:`Comparison.result`."""
        try:
            return comparison.result()
        except DifferentPhasesError:
            self.apart = True
            raise

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
