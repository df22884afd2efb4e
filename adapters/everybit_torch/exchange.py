"""Parts of updates come together on one rank, which works on the whole, and gives each rank its part of the result.

Each rank has some rows of a parameter, as FSDP2 cuts them, with their state. Where its transform must see whole tensors, every rank
computes what comes in, for its rows, and sends it to the parameter's owner. Parameters travel in buckets: one is under way to its
owners, and the results of another to their rows, while a rank works on a third. Owners are chosen by the work, on every rank alike. Where
replicas hold the same rows, they share the work, and give each other their rows of the results.

No bit is lost on the way: in fewer bits go only numbers that the work rounds so before it does anything else, and results that it rounded.

What the work keeps for whole parameters lies on ranks by rows, too (see :mod:`everybit_torch.work_rows`), and travels as it is stored:
with the update to the owner, and as the owner has stored it anew with the result. Weights go to the owner if the work looks at them.
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
from everybit.stored_work import tensors_of
from everybit.whole_work import Errand, WholeWork
from everybit_torch.collectives.communicator import CPU, Communicator
from everybit_torch.dtensors import RowShards, row_shards
from everybit_torch.gradients import Grads
from everybit_torch.parted import work_in
from everybit_torch.round_trip import RoundTrip, taker
from everybit_torch.streams import is_capturing
from everybit_torch.units import Unit
from everybit_torch.work_rows import WorkRows, as_bytes, stored_work

AT_LEAST = 1 << 22
"""Elements for each owner from which on a bucket is full, if it has a parameter for each."""

Step = tuple[tuple[Unit, Grads], list[Tensor]]
"""A unit with its gradients, and the results of its work: of updates, and the rows of the work's new state."""

Ask = Callable[[Unit, Grads], NeedsJointWorkError | None]
"""Runs a unit's transform up to its question."""


class Traveller(NamedTuple):
    """A parameter whose updates travel.

    Attributes:
        unit: With this rank's rows of it.
        optimizer: What steps the unit.
        work: What its owner does.
        shape: Of the parameter.
        rows: How its rows lie on ranks.
        wide: The dtype of updates.
        edges: The first row of each rank, and the number of rows.
        width: Elements of a row.
        state: How the state of the work lies on ranks; None: there is none.
    """

    unit: Unit
    optimizer: eb.Optimizer[Any]
    work: WholeWork
    shape: torch.Size
    rows: RowShards
    wide: torch.dtype
    edges: list[int]
    width: int
    state: WorkRows | None

    @classmethod
    def of(cls, unit: Unit, optimizer: eb.Optimizer[Any]) -> Traveller:
        """The parameter of a unit, with what steps it."""
        (parameter,) = unit.parameters
        rows = row_shards(parameter)
        assert rows is not None  # which placement made sure of
        (stored,) = optimizer.formats([unit.tensor])
        shape, wide = parameter.shape, torch_dtype(stored.policy.compute)
        work, edges = work_in(optimizer.transform), rows.edges(shape[0])
        return cls(unit, optimizer, work, shape, rows, wide, edges, math.prod(shape[1:]), unit.work)

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

    @property
    def size(self) -> int:
        """How many elements travel to the owner; of state and weights as many as there would be of updates in as many bytes."""
        weights = self.shape.numel() * self.wide.itemsize if self.work.reads_weights else 0
        state = 0 if self.state is None else self.state.nbytes
        return self.shape.numel() + (weights + state) // self.sent_as.itemsize

    def elements(self, rank: int) -> int:
        """How many elements a rank has."""
        return (self.edges[rank + 1] - self.edges[rank]) * self.width

    def state_bytes(self, rank: int) -> int:
        """How many bytes a rank has of the work's state."""
        return 0 if self.state is None else sum(self.state.lengths(rank))

    def weights(self, rank: int) -> int:
        """How many elements a rank has of weights that travel."""
        return self.elements(rank) if self.work.reads_weights else 0

    def run(self, errand: Errand, update: Tensor, weights: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Do the work on a whole update, with the whole's state; return the result, and the new state."""
        stored = stored_work(self.optimizer, self.unit.parameters[0], self.unit.first)
        return stored.run(errand, update, state, self.unit.state, weights)

    def whole(self, arrived: Sequence[Callable[[int], Tensor]]) -> Tensor:
        """A tensor of the parameter's shape, of the rows that have arrived from each rank."""
        return torch.cat([take(self.elements(rank)) for rank, take in enumerate(arrived)]).view(self.shape)


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

    def lengths(self, count: Callable[[Traveller, int], int]) -> Callable[[int, int, int], int]:
        """A function that says how much a rank has of what an owner in a replica works on, by how much it has of one parameter."""
        return lambda replica, owner, rank: sum(count(one, rank) for one in self.of(replica, owner))


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
            full = len(here) >= len(loads) and sum(each.size for each in here) >= len(loads) * AT_LEAST
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
        rank: The number of this rank, among those with other rows.
        updates: The rows of updates, and of results.
        weights: The rows of weights, which do not come back; None: nobody looks at them.
        state: The rows of the work's state, in bytes; None: there is none.
        work: By id of a unit on whose parameter this rank works, its work.
    """

    bucket: Bucket
    rank: int
    updates: RoundTrip
    weights: RoundTrip | None
    state: RoundTrip | None
    work: dict[int, Errand] = field(default_factory=dict)

    @classmethod
    def of(cls, bucket: Bucket, shards: Communicator, copies: Communicator | None) -> _Journey:
        """A bucket before it sets out."""
        travellers = bucket.travellers

        def trip(what: str, count: Callable[[Traveller, int], int]) -> RoundTrip:
            return RoundTrip(what, shards, copies, travellers[0].unit.tensor.device, bucket.lengths(count))

        updates = trip("rows of updates", Traveller.elements)
        weights = trip("rows of weights", Traveller.weights) if any(x.work.reads_weights for x in travellers) else None
        state = trip("rows of state", Traveller.state_bytes) if any(x.state is not None for x in travellers) else None
        return cls(bucket, shards.rank, updates, weights, state)

    def set_out(self, ask: Callable[[Unit], NeedsJointWorkError | None]) -> None:
        """Send this rank's rows to those who work on them."""
        rows: list[Tensor] = []
        weights: list[Tensor] = []
        state: list[Tensor] = []
        for owner, travellers in enumerate(self.bucket.owned[self.updates.replica]):
            for one in (self.bucket.travellers[number] for number in travellers):
                question = ask(one.unit)
                # Which placement made sure of.
                assert question is not None
                assert isinstance(question.work, Errand)
                update, *others = (x.reshape(-1) for x in question.batches)
                rows.append(update.to(one.sent_as))
                weights += others
                state += [as_bytes(x) for x in tensors_of(one.unit.state.inner)]
                if owner == self.rank:
                    self.work[id(one.unit)] = question.work
        self.updates.set_out(rows, self.bucket.travellers[0].sent_as)
        if self.weights is not None:
            self.weights.set_out(weights, self.bucket.travellers[0].wide)
        if self.state is not None:
            self.state.set_out(state, torch.uint8)

    def turn_round(self) -> None:
        """Work on what has arrived, and send the results back."""
        updates, weights, state = (
            [] if trip is None else [taker(part) for part in trip.arrived()]
            for trip in (self.updates, self.weights, self.state)
        )
        self.weights = None  # they were of use here alone
        results: list[list[Tensor]] = [[] for _ in updates]
        stored: list[list[Tensor]] = [[] for _ in updates]
        for one in self.bucket.of(self.updates.replica, self.rank):
            whole = one.whole(updates).to(one.wide)
            looked_at = one.whole(weights) if one.work.reads_weights else None
            held = None if one.state is None else one.state.together(state)
            found, new = one.run(self.work.pop(id(one.unit)), whole, looked_at, held)
            parts = torch.split(
                found.reshape(-1).to(one.returned_as), [one.elements(rank) for rank in range(len(updates))]
            )
            for rank, part in enumerate(parts):
                results[rank].append(part)
                stored[rank] += [] if one.state is None else one.state.apart(new, rank)
        rows = [part for own in results for part in own]
        self.updates.turn_round(rows, self.bucket.travellers[0].returned_as)
        if self.state is not None:
            self.state.turn_round([part for own in stored for part in own], torch.uint8)

    def arrive(self) -> Iterator[tuple[Unit, list[Tensor]]]:
        """Wait for this rank's rows of the results; yield units with theirs, and with their rows of the work's state."""
        take = taker(self.updates.back())
        state = None if self.state is None else taker(self.state.back())
        for replica, owners in enumerate(self.bucket.owned):
            for owner in range(len(owners)):
                for one in self.bucket.of(replica, owner):
                    own = take(one.elements(self.rank)).to(one.wide)
                    own = own.view(one.edges[self.rank + 1] - one.edges[self.rank], *one.shape[1:])
                    found = one.work.on_rows(own, one.shape, one.edges[self.rank]).reshape(one.unit.tensor.shape)
                    yield one.unit, [found, *([] if state is None or one.state is None else one.state.own(state))]


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
                    yield from (((unit, grads[id(unit)]), own) for unit, own in journeys[number - 2].arrive())
            for journey in journeys[-1:]:
                journey.turn_round()
            for journey in journeys[-2:]:
                yield from (((unit, grads[id(unit)]), own) for unit, own in journey.arrive())
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
        return _Journey.of(bucket, self._communicator(rows.mesh, rows.shards), copies)

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
