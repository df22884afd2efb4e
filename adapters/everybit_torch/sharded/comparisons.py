"""Compares what ranks are about to do with weights that they gather together: one small all-reduce in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator, Pending

Turn = Literal["forward", "again", "backward", "deferred"]

_TURNS: dict[Turn, str] = {
    "forward": "begins another forward pass",
    "again": "needs the weights of a unit that it has used in this forward pass already",
    "backward": "begins its backward pass",
    "deferred": "begins a backward pass whose gradients are not summed over the ranks yet",
}


class DifferentReductionsError(RuntimeError):
    """Some ranks sum the gradients of a backward pass over the ranks, and others do not yet."""


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

    def __init__(self, turn: Turn, message: Tensor, pending: Pending) -> None:
        self._turn, self._message, self._pending = turn, message, pending
        self._result: Agreement | None = None

    def result(self) -> Agreement:
        """Wait for it.

        Raises:
            RuntimeError: Another rank is about to do something else.
            DifferentReductionsError: It is about to reduce the gradients of this pass, and this one is not, or the other way around.
        """
        if self._result is None:
            self._pending.wait()
            most, least, digest, other_digest, disordered = self._message.tolist()
            alike, in_order = digest == -other_digest, not disordered
            turns = list(_TURNS)
            if most != -least or (turns[most] not in ("backward", "deferred") and not alike):
                mine = turns.index(self._turn)
                other = turns[most if mine != most else -least]
                if {turns[most], turns[-least]} == {"backward", "deferred"}:
                    raise DifferentReductionsError(
                        f"optim_grads_params: this rank {'sums' if self._turn == 'backward' else 'does not sum'} the gradients of this"
                        f" backward pass over the ranks, and another rank {'does not' if self._turn == 'backward' else 'does'}. Accepted"
                        " are the same `last` and set_requires_gradient_sync() on every rank; accepted next is zero_grad(), on every rank."
                    )
                raise RuntimeError(
                    f"optim_grads_params: this rank {_TURNS[self._turn]}, and another rank"
                    f" {_TURNS[other] if other != self._turn else 'does so for another unit'}. Between two backward passes all ranks run"
                    " the same number of forward passes, and use a unit equally often in each; accepted next is zero_grad(), on every rank."
                )
            self._result = Agreement(alike, in_order)
        return self._result


class Comparer:
    """Compares what ranks are about to do, by one small all-reduce in the host's memory.

    Args:
        inner: The inner ranks; for tensors in the host's memory.
        outer: The outer ranks, likewise.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self._inner, self._outer = inner, outer

    def start(self, turn: Turn, digest: int, *, in_order: bool = True) -> Comparison:
        """Begin to compare. Every rank has to call it.

        Args:
            turn: What this rank is about to do.
            digest: Of what has to be the same, below 2**62.
            in_order: See :class:`Agreement`.
        """
        number = list(_TURNS).index(turn)
        message = torch.tensor([number, -number, digest, -digest, int(not in_order)], dtype=torch.int64)
        pending = self._inner.all_reduce(message, "the order of units", dist.ReduceOp.MAX)
        if self._outer.size > 1:
            # Now, not when the result is wanted: a rank that waits for it has to have done its part.
            pending.wait()
            pending = self._outer.all_reduce(message, "the order of units", dist.ReduceOp.MAX)
        return Comparison(turn, message, pending)
