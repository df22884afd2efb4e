"""Parts of updates come together on one rank, which works on the whole, and gives each rank its part of the result.

Each rank has some rows of a parameter, as FSDP2 cuts them, with their state. Where its transform must see whole tensors, every rank
computes what comes in, for its rows, and sends it to the parameter's owner. Parameters travel in buckets: one is under way to its
owners, and the results of another to their rows, while a rank works on a third. Owners are chosen by the work, on every rank alike. Where
replicas hold the same rows, they share the work, and give each other their rows of the results.

No bit is lost on the way: in fewer bits go only numbers that the work rounds so before it does anything else, and results that it rounded.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import everybit as eb
from everybit.atoms import step_cost
from everybit.dtypes import torch_dtype
from everybit.joint_work import NeedsJointWorkError
from everybit.whole_work import Errand, WholeWork
from everybit_torch.collectives.communicator import CPU, Communicator, Done, Pending
from everybit_torch.dtensors import RowShards, row_shards
from everybit_torch.gradients import Grads
from everybit_torch.parted import work_in
from everybit_torch.streams import is_capturing
from everybit_torch.units import Unit

AT_LEAST = 1 << 22
"""Elements for each owner from which on a bucket is full, if it has a parameter for each."""

Step = tuple[tuple[Unit, Grads], list[Tensor]]
"""A unit with its gradients, and the results of its work."""

Ask = Callable[[Unit, Grads], NeedsJointWorkError | None]
"""Runs a unit's transform up to its question."""


class Traveller(NamedTuple):
    """A parameter whose updates travel.

    Attributes:
        unit: With this rank's rows of it.
        work: What its owner does.
        shape: Of the parameter.
        rows: How its rows lie on ranks.
        wide: The dtype of updates.
        edges: The first row of each rank, and the number of rows.
        width: Elements of a row.
    """

    unit: Unit
    work: WholeWork
    shape: torch.Size
    rows: RowShards
    wide: torch.dtype
    edges: list[int]
    width: int

    @classmethod
    def of(cls, unit: Unit, optimizer: eb.Optimizer[Any]) -> Traveller:
        """The parameter of a unit, with what steps it."""
        (parameter,) = unit.parameters
        rows = row_shards(parameter)
        assert rows is not None  # which placement made sure of
        (stored,) = optimizer.formats([unit.tensor])
        shape, wide = parameter.shape, torch_dtype(stored.policy.compute)
        return cls(unit, work_in(optimizer.transform), shape, rows, wide, rows.edges(shape[0]), math.prod(shape[1:]))

    @property
    def kind(self) -> object:
        """What travels together has this in common."""
        return self.rows, self.unit.tensor.device, self.wide, self.sent_as, self.returned_as

    @property
    def sent_as(self) -> torch.dtype:
        """The dtype of updates on their way to the owner."""
        return self.work.sent_as(self.wide)

    @property
    def returned_as(self) -> torch.dtype:
        """The dtype of results on their way back."""
        return self.work.returned_as(self.wide)

    @property
    def cost(self) -> float:
        """Of the work, next to that of others."""
        return sum(step_cost(part, self.shape) for part in self.work.parts)

    def elements(self, rank: int) -> int:
        """How many elements a rank has."""
        return (self.edges[rank + 1] - self.edges[rank]) * self.width


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together.

    Attributes:
        travellers: In order.
        owned: For each replica, and each rank of it, those that it works on, by their numbers.
    """

    travellers: list[Traveller]
    owned: list[list[list[int]]]

    def of(self, replica: int, owner: int) -> list[Traveller]:
        """What a rank works on."""
        return [self.travellers[number] for number in self.owned[replica][owner]]

    def length(self, replica: int, owner: int, rank: int) -> int:
        """How many elements a rank has of what an owner works on."""
        return sum(one.elements(rank) for one in self.of(replica, owner))


def buckets_of(travellers: Sequence[Traveller]) -> list[Bucket]:
    """Distribute parameters over buckets and owners: the same on every rank."""
    kinds: dict[object, list[Traveller]] = {}
    for one in travellers:
        kinds.setdefault(one.kind, []).append(one)
    found: list[Bucket] = []
    for alike in kinds.values():
        ranks, replicas = alike[0].rows.ranks, alike[0].rows.replicas
        loads = [0.0] * (ranks * replicas)
        here: list[Traveller] = []
        for number, one in enumerate(alike, start=1):
            here.append(one)
            full = len(here) >= len(loads) and sum(each.shape.numel() for each in here) >= len(loads) * AT_LEAST
            if full or number == len(alike):
                shared = distributed([each.cost for each in here], loads)
                found.append(Bucket(here, [shared[first : first + ranks] for first in range(0, len(loads), ranks)]))
                here = []
    return found


def distributed(costs: Sequence[float], loads: list[float]) -> list[list[int]]:
    """Distribute work over owners: what costs most first, each to the one with the least to do (Graham 1969).

    Args:
        costs: Of each piece of work.
        loads: What the owners have to do before; the costs are added.

    Returns:
        For each owner the numbers of what it has, in order.
    """
    found: list[list[int]] = [[] for _ in loads]
    waiting = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(waiting)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, owner = heapq.heappop(waiting)
        found[owner].append(number)
        heapq.heappush(waiting, (load + costs[number], owner))
    for load, owner in waiting:
        loads[owner] = load
    return [sorted(numbers) for numbers in found]


@dataclass(slots=True)
class _Journey:
    """A bucket under way.

    Attributes:
        bucket: The bucket.
        shards: The ranks with other rows.
        copies: Those with the same rows; None: there are none.
        work: By id of a unit on whose parameter this rank works, its work.
        pending: What is waited for next.
        into: Where it arrives.
    """

    bucket: Bucket
    shards: Communicator
    copies: Communicator | None
    work: dict[int, Errand] = field(default_factory=dict)
    pending: Pending = field(default_factory=Done)
    into: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def replica(self) -> int:
        """The number of this one."""
        return 0 if self.copies is None else self.copies.rank

    def set_out(self, ask: Callable[[Unit], NeedsJointWorkError | None]) -> None:
        """Send this rank's rows to those who work on them."""
        rows: list[Tensor] = []
        for owner in range(self.shards.size):
            for one in self.bucket.of(self.replica, owner):
                question = ask(one.unit)
                # Which placement made sure of.
                assert question is not None
                assert isinstance(question.work, Errand)
                (update,) = question.batches
                rows.append(update.reshape(-1).to(one.sent_as))
                if owner == self.shards.rank:
                    self.work[id(one.unit)] = question.work
        self._send(rows, self._given(), self._owned(), self.bucket.travellers[0].sent_as)

    def turn_round(self) -> None:
        """Work on what has arrived, and send the results back."""
        self.pending.wait()
        arrived = [taker(part) for part in torch.split(self.into, self._owned())]
        results: list[list[Tensor]] = [[] for _ in arrived]
        for one in self.bucket.of(self.replica, self.shards.rank):
            whole = torch.cat([take(one.elements(rank)) for rank, take in enumerate(arrived)])
            found = self.work.pop(id(one.unit)).run(whole.to(one.wide).view(one.shape))
            parts = torch.split(
                found.reshape(-1).to(one.returned_as), [one.elements(rank) for rank in range(len(arrived))]
            )
            for own, part in zip(results, parts, strict=True):
                own.append(part)
        rows = [part for own in results for part in own]
        self._send(rows, self._owned(), self._given(), self.bucket.travellers[0].returned_as)

    def arrive(self) -> Iterator[tuple[Unit, Tensor]]:
        """Wait for this rank's rows of the results; yield units with theirs."""
        self.pending.wait()
        rows = self.into
        if self.copies is not None and self.copies.size > 1:
            lengths = [sum(self._given(replica)) for replica in range(self.copies.size)]
            every = rows.new_empty(sum(lengths))
            if every.numel():
                self.copies.all_gather(every, rows, "rows of updates", lengths).wait()
            rows = every
        # What waits for a collective holds what was sent.
        self.pending, self.into = Done(), torch.empty(0)
        take, rank = taker(rows), self.shards.rank
        for replica in range(len(self.bucket.owned)):
            for owner in range(self.shards.size):
                for one in self.bucket.of(replica, owner):
                    own = take(one.elements(rank)).to(one.wide)
                    own = own.view(one.edges[rank + 1] - one.edges[rank], *one.shape[1:])
                    yield one.unit, one.work.on_rows(own, one.shape, one.edges[rank]).reshape(one.unit.tensor.shape)

    def _given(self, replica: int | None = None) -> list[int]:
        """How many elements this rank has of what each rank of a replica, its own or another, works on."""
        replica = self.replica if replica is None else replica
        return [self.bucket.length(replica, owner, self.shards.rank) for owner in range(self.shards.size)]

    def _owned(self) -> list[int]:
        """How many elements each rank has of what this one works on."""
        return [self.bucket.length(self.replica, self.shards.rank, rank) for rank in range(self.shards.size)]

    def _send(self, rows: list[Tensor], given: list[int], received: list[int], wire: torch.dtype) -> None:
        device = self.bucket.travellers[0].unit.tensor.device
        whole = torch.cat(rows) if rows else torch.empty(0, dtype=wire, device=device)
        self.into = torch.empty(sum(received), dtype=wire, device=device)
        self.pending = self.shards.exchange(self.into, whole, "rows of updates", received=received, given=given)


def taker(x: Tensor) -> Callable[[int], Tensor]:
    """A function that returns so many elements of a vector at a time, in order."""
    start = 0

    def take(count: int) -> Tensor:
        nonlocal start
        start += count
        return x[start - count : start]

    return take


class Exchange:
    """Exchanges parts of updates; knows the groups of ranks."""

    def __init__(self) -> None:
        self._communicators: dict[tuple[DeviceMesh, int], Communicator] = {}
        self._known: list[tuple[Unit, eb.Optimizer[Any], Traveller]] = []
        self._planned: tuple[list[Traveller], list[Bucket]] = ([], [])

    def steps(
        self,
        work: Sequence[tuple[Unit, Grads]],
        absent: Sequence[Unit],
        optimizer_of: Callable[[Unit], eb.Optimizer[Any]],
        ask: Ask,
        meanwhile: Iterator[Step],
    ) -> Iterator[Step]:
        """Yield units with their gradients and the results of their work. Every rank has to call it, with the same units.

        Args:
            work: Units whose updates travel, with gradients.
            absent: Those without a gradient.
            optimizer_of: What steps a unit.
            ask: Runs a unit's transform up to its question.
            meanwhile: Other units, which are stepped while the first bucket is under way.

        Raises:
            RuntimeError: Ranks have gradients for different parameters, or a CUDA graph is being captured.
        """
        if is_capturing():
            raise RuntimeError(
                "step: a CUDA graph is being captured, and updates of sharded parameters travel between ranks in it; accepted is a step"
                " outside of a capture, or a FlatStepper, in whose step nothing travels."
            )
        self._know([*(unit for unit, _ in work), *absent], optimizer_of)
        travellers = [one for *_, one in self._known[: len(work)]]
        self._agree(travellers, [one for *_, one in self._known])
        grads = {id(unit): own for unit, own in work}
        journeys = [self._journey(bucket) for bucket in self._plan(travellers)]
        try:
            for number, journey in enumerate(journeys):
                journey.set_out(lambda unit: ask(unit, grads[id(unit)]))
                if number == 0:
                    yield from meanwhile
                if number >= 1:
                    journeys[number - 1].turn_round()
                if number >= 2:
                    yield from (((unit, grads[id(unit)]), [own]) for unit, own in journeys[number - 2].arrive())
            for journey in journeys[-1:]:
                journey.turn_round()
            for journey in journeys[-2:]:
                yield from (((unit, grads[id(unit)]), [own]) for unit, own in journey.arrive())
        except BaseException:
            for communicator in self._communicators.values():
                communicator.drain()
            raise
        yield from meanwhile

    def _know(self, units: Sequence[Unit], optimizer_of: Callable[[Unit], eb.Optimizer[Any]]) -> None:
        """Look at units, of which few change from step to step."""
        before = {id(unit): (optimizer, one) for unit, optimizer, one in self._known}
        known = []
        for unit in units:
            optimizer = optimizer_of(unit)
            last, one = before.get(id(unit), (None, None))
            known.append(
                (unit, optimizer, one if one is not None and last is optimizer else Traveller.of(unit, optimizer))
            )
        self._known = known

    def _plan(self, travellers: list[Traveller]) -> list[Bucket]:
        known, buckets = self._planned
        if len(known) != len(travellers) or any(a is not b for a, b in zip(known, travellers, strict=True)):
            buckets = buckets_of(travellers)
            self._planned = travellers, buckets
        return buckets

    # -- ranks ----------------------------------------------------------------------------------------------------------------

    def _journey(self, bucket: Bucket) -> _Journey:
        rows = bucket.travellers[0].rows
        copies = None if rows.copies is None else self._communicator(rows.mesh, rows.copies)
        return _Journey(bucket, self._communicator(rows.mesh, rows.shards), copies)

    def _communicator(self, mesh: DeviceMesh, dimension: int) -> Communicator:
        found = self._communicators.get((mesh, dimension))
        if found is None:
            found = self._communicators[mesh, dimension] = Communicator(mesh.get_group(dimension))
        return found

    def _agree(self, present: Sequence[Traveller], every: Sequence[Traveller]) -> None:
        """Refuse ranks with gradients for different parameters, which would take the rows of one for those of another.

        They ask each other in the host's memory, if their backend takes such messages: no host then has to wait for a device.
        """
        for mesh in dict.fromkeys(one.rows.mesh for one in every):
            names = [one.unit.members[0].name for one in present if one.rows.mesh == mesh]
            told = zlib.crc32("\n".join(names).encode())
            answer = torch.tensor([told, -told])
            for dimension in range(mesh.ndim):
                ranks = self._communicator(mesh, dimension)
                if ranks.device == CPU:
                    ranks.all_reduce(answer, "which parameters have gradients", dist.ReduceOp.MAX).wait()
            highest, lowest = answer.tolist()
            if highest != -lowest:
                raise RuntimeError(
                    f"step: ranks have gradients for different parameters, this one for {', '.join(names[:5]) or 'none'}"
                    f"{' and others' if len(names) > 5 else ''} of those whose updates travel; accepted are gradients for the same"
                    " parameters on all ranks of a mesh, as FSDP2 gives them."
                )
