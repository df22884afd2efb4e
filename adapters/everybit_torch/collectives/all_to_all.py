"""All-to-all of the parts of vectors to their owners, and of new parts back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everybit_torch.collectives.communicator import Communicator, Done, PendingCollective


@dataclass(slots=True)
class AllToAll:
    """An all-to-all of vectors, of which each rank has a part, to their owners, and one back.

    Where other ranks hold the same parts, the owners are spread over all of these replicas: parts are exchanged inside of a replica, and
    replicas give each other the results by an all-gather.

    Attributes:
        what: The name of the vectors, for messages.
        shards: The ranks with other parts.
        copies: The ranks with the same parts; None: no rank has them.
        device: The device of the vectors.
        length: The number of elements that a rank sends to an owner: of the owner's replica, the owner, and the rank.
    """

    what: str
    shards: Communicator
    copies: Communicator | None
    device: torch.device
    length: Callable[[int, int, int], int]
    _pending: PendingCollective = field(default_factory=Done)
    _into: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return 0 if self.copies is None else self.copies.rank

    def send(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Send this rank's parts, owner by owner; all of ``dtype``."""
        self._send(parts, dtype, self._given(self.replica), self._owned())

    def received(self) -> list[Tensor]:
        """Wait for the parts of this rank's vectors; return them, rank by rank."""
        self._pending.wait()
        found = list(torch.split(self._into, self._owned()))
        # The handle of a collective holds the memory that was sent.
        self._pending, self._into = Done(), torch.empty(0)
        return found

    def send_back(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Send new parts back, rank by rank; all of ``dtype``."""
        self._send(parts, dtype, self._owned(), self._given(self.replica))

    def received_back(self) -> Tensor:
        """Wait for this rank's new parts; return them, replica by replica and owner by owner."""
        self._pending.wait()
        found = self._into
        if self.copies is not None and self.copies.size > 1:
            lengths = [sum(self._given(replica)) for replica in range(self.copies.size)]
            every = found.new_empty(sum(lengths))
            if every.numel():
                self.copies.all_gather(every, found, self.what, lengths).wait()
            found = every
        # The handle of a collective holds the memory that was sent.
        self._pending, self._into = Done(), torch.empty(0)
        return found

    def _given(self, replica: int) -> list[int]:
        """The number of elements that this rank sends to each rank of a replica."""
        return [self.length(replica, owner, self.shards.rank) for owner in range(self.shards.size)]

    def _owned(self) -> list[int]:
        """The number of elements that each rank sends to this rank."""
        return [self.length(self.replica, self.shards.rank, rank) for rank in range(self.shards.size)]

    def _send(self, parts: Sequence[Tensor], dtype: torch.dtype, given: list[int], received: list[int]) -> None:
        whole = torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype, device=self.device)
        self._into = torch.empty(sum(received), dtype=dtype, device=self.device)
        self._pending = self.shards.exchange(self._into, whole, self.what, received=received, given=given)
