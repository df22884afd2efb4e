"""Parameters that cannot be cut visit an owner for a step: one rank, which steps them whole.

Ranks hold rows of a parameter, and its transform, or a block of its format, needs more. Its rows and gradients travel to the owner by
all-to-all. The owner steps an ordinary segment, and each rank's new rows travel back. Neither the transform nor its state knows of ranks.
Parameters travel in rounds of bounded size: while the owners step one, the next is on its way. State stays at the owner.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.combinators import step_cost
from everybit_torch.all_to_all import AllToAll
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.dtensors import local, row_edges
from everybit_torch.segments.segment import Segment

ROUND = 1 << 24
"""Elements for each owner that travel in a round, or one parameter, if that is larger."""


@dataclass(slots=True, eq=False)
class Visitor:
    """A parameter that visits its owner.

    Attributes:
        parameter: The parameter; this rank has rows of it.
        optimizer: The optimizer, as masks and labels came out.
        first: Global index of its first element.
        owner: The replica and the rank of the owner.
        segment: The whole parameter at its owner, between steps without its weights; None at other ranks.
    """

    parameter: Tensor
    optimizer: eb.Optimizer[Any]
    first: int
    owner: tuple[int, int] = (0, 0)
    segment: Segment | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole."""
        return self.parameter.shape

    def count(self, rank: int, ranks: int) -> int:
        """The number of elements that a rank has."""
        edges = row_edges(self.shape[0], ranks)
        return (edges[rank + 1] - edges[rank]) * math.prod(self.shape[1:])


@dataclass(slots=True)
class Arrived:
    """A whole parameter at its owner, for a step.

    Attributes:
        segment: With the present weights.
        grad: The gradient, in the tensor's shape.
    """

    segment: Segment
    grad: Tensor


class Visits:
    """Parameters whose rows lie alike on some ranks, and which are stepped whole.

    Every rank makes it with the same parameters, in the same order, and calls its methods alike.

    Args:
        visitors: The parameters, at least one.
        shards: The ranks that have other rows.
        copies: The ranks that have the same rows; None: there are none. The owners are spread over all of these replicas.
        elements: Elements for each owner that travel in a round.
    """

    def __init__(
        self,
        visitors: Sequence[Visitor],
        shards: Communicator,
        copies: Communicator | None = None,
        *,
        elements: int = ROUND,
    ) -> None:
        self.visitors, self._shards, self._copies = list(visitors), shards, copies
        self._here = (0 if copies is None else copies.rank, shards.rank)
        replicas = 1 if copies is None else copies.size
        owners = [(replica, rank) for replica in range(replicas) for rank in range(shards.size)]
        costs = [step_cost(one.optimizer.transform, one.shape) for one in self.visitors]
        for one, number in zip(self.visitors, shared_out(costs, len(owners)), strict=True):
            one.owner = owners[number]
        self._rounds = _rounds(self.visitors, elements)
        with torch.no_grad():
            for together in self._rounds:
                sent = _Travel(self, together, "weights")
                sent.send([local(one.parameter).detach() for one in together])
                for one, whole in sent.received():
                    one.segment = Segment.new(one.optimizer, whole, one.first)
                    one.segment.tensor = whole[:0]

    # -- a step ---------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, grads: Sequence[Tensor | None]) -> Iterator[Arrived]:
        """Bring weights and gradients to the owners, and yield those of this rank. Nothing travels back.

        It serves totals, which have to be known before anything is stepped.

        Args:
            grads: Of this rank's rows, in their shapes. All ranks have one for the same parameters.
        """
        for _, arrived in self._arrivals(grads):
            yield from arrived
            for one in arrived:
                one.segment.tensor = one.segment.tensor[:0]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], step: Callable[[Segment, Tensor], object]) -> None:
        """Step the parameters that have a gradient, each at its owner.

        Args:
            grads: Of this rank's rows, in their shapes. All ranks have one for the same parameters.
            step: Steps a whole parameter in place.
        """
        for together, arrived in self._arrivals(grads):
            for one in arrived:
                step(one.segment, one.grad)
            back = _Travel(self, together, "new weights")
            back.send_back([one.segment.tensor for one in arrived])
            for one in arrived:
                one.segment.tensor = one.segment.tensor[:0]
            for visitor, rows in back.received_back():
                local(visitor.parameter).detach().copy_(rows)

    def _arrivals(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[list[Visitor], list[Arrived]]]:
        """The rounds, one after the other: while one is worked on, the next is on its way."""
        of = {id(one): grad for one, grad in zip(self.visitors, grads, strict=True)}
        rounds = [[one for one in together if of[id(one)] is not None] for together in self._rounds]
        pending: list[tuple[list[Visitor], _Travel, _Travel]] = []
        for together in [*filter(None, rounds), None]:
            if together is not None:
                weights, sent = _Travel(self, together, "weights"), _Travel(self, together, "gradients")
                weights.send([local(one.parameter).detach() for one in together])
                sent.send([grad for one in together if (grad := of[id(one)]) is not None])
                pending.append((together, weights, sent))
            if pending and (together is None or len(pending) > 1):
                before, weights, sent = pending.pop(0)
                arrived = []
                for (one, whole), (_, grad) in zip(weights.received(), sent.received(), strict=True):
                    assert one.segment is not None
                    one.segment.tensor = whole
                    arrived.append(Arrived(one.segment, grad))
                yield before, arrived

    def _is_mine(self, one: Visitor) -> bool:
        return one.owner == self._here


class _Travel:
    """One tensor of each parameter of a round, on its way to the owners or back."""

    def __init__(self, visits: Visits, together: Sequence[Visitor], what: str) -> None:
        self._visits, self._together = visits, together
        self._ranks, self._rank = visits._shards.size, visits._shards.rank
        self._exchange = AllToAll(
            what, visits._shards, visits._copies, local(together[0].parameter).device, self._count
        )

    def _count(self, replica: int, owner: int, rank: int) -> int:
        return sum(one.count(rank, self._ranks) for one in self._of((replica, owner)))

    def _of(self, owner: tuple[int, int]) -> list[Visitor]:
        return [one for one in self._together if one.owner == owner]

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send this rank's rows of each parameter to its owner."""
        replica = self._exchange.replica
        of = {id(one): tensor for one, tensor in zip(self._together, tensors, strict=True)}
        parts = [of[id(one)].reshape(-1) for owner in range(self._ranks) for one in self._of((replica, owner))]
        self._exchange.send(parts, tensors[0].dtype)

    def received(self) -> Iterator[tuple[Visitor, Tensor]]:
        """Yield this rank's parameters with the whole tensors."""
        mine = self._of(self._visits._here)
        by_rank = [
            torch.split(whole, [one.count(rank, self._ranks) for one in mine])
            for rank, whole in enumerate(self._exchange.received())
        ]
        for number, one in enumerate(mine):
            yield one, torch.cat([parts[number] for parts in by_rank]).view(one.shape)

    def send_back(self, tensors: Sequence[Tensor]) -> None:
        """Send every rank its rows of this rank's parameters."""
        mine = self._of(self._visits._here)
        cut = [
            torch.split(whole.reshape(-1), [one.count(rank, self._ranks) for rank in range(self._ranks)])
            for one, whole in zip(mine, tensors, strict=True)
        ]
        parts = [rows[rank] for rank in range(self._ranks) for rows in cut]
        self._exchange.send_back(parts, self._together[0].parameter.dtype)

    def received_back(self) -> Iterator[tuple[Visitor, Tensor]]:
        """Yield all parameters of the round with this rank's rows."""
        found = self._exchange.received_back()
        replicas = 1 if self._visits._copies is None else self._visits._copies.size
        owners = [(replica, rank) for replica in range(replicas) for rank in range(self._ranks)]
        order = [one for owner in owners for one in self._of(owner)]
        parts = torch.split(found, [one.count(self._rank, self._ranks) for one in order])
        for one, part in zip(order, parts, strict=True):
            yield one, part.view(local(one.parameter).shape)


def _rounds(visitors: Sequence[Visitor], elements: int) -> list[list[Visitor]]:
    """The parameters that travel together: of one dtype, about so many elements for the owner that has most."""
    found: list[list[Visitor]] = []
    loads: dict[tuple[int, int], int] = {}
    for one in visitors:
        load = loads.get(one.owner, 0) + one.parameter.numel()
        if not found or load > elements or found[-1][0].parameter.dtype is not one.parameter.dtype:
            found.append([])
            loads, load = {}, one.parameter.numel()
        found[-1].append(one)
        loads[one.owner] = load
    return found


def shared_out(costs: Sequence[float], owners: int) -> list[int]:
    """Give each piece of work an owner: what costs most first, to the owner with the least to do (Graham 1969).

    The result is the same on every rank.

    Args:
        costs: The cost of each piece.
        owners: The number of owners.

    Returns:
        The number of each piece's owner.
    """
    waiting = [(0.0, owner) for owner in range(owners)]
    found = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, owner = heapq.heappop(waiting)
        found[number] = owner
        heapq.heappush(waiting, (load + costs[number], owner))
    return found
