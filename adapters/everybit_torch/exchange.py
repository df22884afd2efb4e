"""Rows of updates, gathered at one rank for each parameter, its owner, which runs the transforms that need whole tensors.

Each rank has some rows of a parameter, as FSDP2 shards them, with their state. A step runs on the rows up to the request for the whole
(:class:`~everybit.protocol.whole_work.Whole`). The rows of the update go to the owner by all-to-all. The owner computes the result, and
sends each rank its rows. Parameters are exchanged in buckets: the rows of one are in flight to their owners, and the results of another to
their ranks, while a rank works on a third. Every rank chooses the same owners, by the cost of the work. Where replicas hold the same rows,
they share the work, and exchange their rows of the results.

No bit is lost on the wire: updates are sent in fewer bits if the work first rounds them so, and results if it rounded them.

The state of whole parameters is sharded by rows, too (see :mod:`everybit_torch.work_rows`). It is sent as it is stored: with the update to
the owner, and as the owner has stored it anew with the result. Weights are sent to the owner if the work reads them.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import everybit as eb
from everybit import tree
from everybit.base import torch_dtype
from everybit.combinators import owner_work, step_cost
from everybit.protocol import Whole, WholeWork
from everybit.stepping.stored_work import rows_of
from everybit_torch.all_to_all import AllToAll, taker
from everybit_torch.collectives.communicator import CPU, Communicator
from everybit_torch.dtensors import RowShards, row_shards
from everybit_torch.gradients import Grads
from everybit_torch.stepping import Begun, Ready
from everybit_torch.streams import is_capturing
from everybit_torch.units import Unit
from everybit_torch.work_rows import WorkRows, as_bytes, stored_work

AT_LEAST = 1 << 22
"""Elements for each owner from which on a bucket is full, if it has a parameter for each."""

Begin = Callable[[Unit, Grads], Begun | None]
"""Runs a unit's step up to its joint work; None if it has none."""


class ShardedParameter(NamedTuple):
    """A parameter of which each rank has rows.

    Attributes:
        unit: With this rank's rows of it.
        optimizer: What steps the unit.
        work: Of its owner.
        shape: Of the parameter.
        rows: The ranks, and the rows of each.
        wide: The dtype of updates.
        edges: The first row of each rank, and the number of rows.
        width: Elements of a row.
        state: How the state of the work is sharded; None: there is none.
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
    def of(cls, unit: Unit, optimizer: eb.Optimizer[Any]) -> ShardedParameter:
        """The parameter of a unit, and the optimizer that steps it."""
        (parameter,) = unit.parameters
        rows = row_shards(parameter)
        assert rows is not None  # which placement made sure of
        (stored,) = optimizer.formats([unit.tensor])
        shape, wide = parameter.shape, torch_dtype(stored.policy.compute)
        work, edges = owner_work(optimizer.transform), rows.edges(shape[0])
        return cls(unit, optimizer, work, shape, rows, wide, edges, math.prod(shape[1:]), unit.work)

    @property
    def kind(self) -> object:
        """Parameters of one kind may share a bucket."""
        return self.rows, self.unit.tensor.device, self.wide, self.sent_as, self.returned_as

    @property
    def sent_as(self) -> torch.dtype:
        """The dtype of updates that are sent to the owner."""
        return self.work.sent_as(self.wide)

    @property
    def returned_as(self) -> torch.dtype:
        """The dtype of results that are sent back."""
        return self.work.returned_as(self.wide)

    @property
    def cost(self) -> float:
        """The cost of the work, in the unit of :func:`~everybit.combinators.atoms.step_cost`."""
        return sum(step_cost(part, self.shape) for part in self.work.parts)

    @property
    def size(self) -> int:
        """Elements sent to the owner; state and weights count as the same number of bytes of updates."""
        weights = self.shape.numel() * self.wide.itemsize if self.work.reads_weights else 0
        state = 0 if self.state is None else self.state.nbytes
        return self.shape.numel() + (weights + state) // self.sent_as.itemsize

    def elements(self, rank: int) -> int:
        """The number of elements of a rank's rows."""
        return (self.edges[rank + 1] - self.edges[rank]) * self.width

    def state_bytes(self, rank: int) -> int:
        """Bytes of a rank's rows of the work's state."""
        return 0 if self.state is None else sum(self.state.lengths(rank))

    def weights(self, rank: int) -> int:
        """The number of weights that a rank sends."""
        return self.elements(rank) if self.work.reads_weights else 0

    def run(self, request: Whole, update: Tensor, weights: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        """Do the work on a whole update, with the whole's state; return the result, and the new state."""
        stored = stored_work(self.optimizer, self.unit.parameters[0], self.unit.first)
        return stored.run(self.work, request, update, state, self.unit.state, weights)

    def whole(self, received: Sequence[Callable[[int], Tensor]]) -> Tensor:
        """A tensor of the parameter's shape, of the rows from each rank."""
        return torch.cat([take(self.elements(rank)) for rank, take in enumerate(received)]).view(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that are exchanged together.

    Attributes:
        parameters: In order.
        owned: For each replica, and each rank of it, the indices of the parameters that it owns.
    """

    parameters: list[ShardedParameter]
    owned: list[list[list[int]]]

    def of(self, replica: int, owner: int) -> list[ShardedParameter]:
        """The parameters that a rank owns."""
        return [self.parameters[number] for number in self.owned[replica][owner]]

    def lengths(self, count: Callable[[ShardedParameter, int], int]) -> Callable[[int, int, int], int]:
        """Return a function that counts what a rank sends to an owner of a replica, given the count for one parameter."""
        return lambda replica, owner, rank: sum(count(one, rank) for one in self.of(replica, owner))


def buckets_of(parameters: Sequence[ShardedParameter]) -> list[Bucket]:
    """Distribute parameters over buckets and owners: the same on every rank."""
    kinds: dict[object, list[ShardedParameter]] = {}
    for one in parameters:
        kinds.setdefault(one.kind, []).append(one)
    found: list[Bucket] = []
    for alike in kinds.values():
        ranks, replicas = alike[0].rows.ranks, alike[0].rows.replicas
        loads = [0.0] * (ranks * replicas)
        here: list[ShardedParameter] = []
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
class _Transfer:
    """The exchange of one bucket.

    Attributes:
        bucket: The bucket.
        rank: The index of this rank, among those with other rows.
        updates: The rows of updates, and of results.
        weights: The rows of weights, which are not sent back; None: no work reads them.
        state: The rows of the work's state, in bytes; None: there is none.
        requests: By id of the unit, of the parameters that this rank owns.
        begun: By id of the unit, steps that wait for their results.
    """

    bucket: Bucket
    rank: int
    updates: AllToAll
    weights: AllToAll | None
    state: AllToAll | None
    requests: dict[int, Whole] = field(default_factory=dict)
    begun: dict[int, Begun] = field(default_factory=dict)

    @classmethod
    def of(cls, bucket: Bucket, shards: Communicator, copies: Communicator | None) -> _Transfer:
        """The exchange of a bucket that was not sent yet."""
        parameters = bucket.parameters

        def rows(what: str, count: Callable[[ShardedParameter, int], int]) -> AllToAll:
            return AllToAll(what, shards, copies, parameters[0].unit.tensor.device, bucket.lengths(count))

        updates = rows("rows of updates", ShardedParameter.elements)
        reads_weights = any(x.work.reads_weights for x in parameters)
        weights = rows("rows of weights", ShardedParameter.weights) if reads_weights else None
        state = (
            rows("rows of state", ShardedParameter.state_bytes)
            if any(x.state is not None for x in parameters)
            else None
        )
        return cls(bucket, shards.rank, updates, weights, state)

    def send(self, begin: Callable[[Unit], Begun | None], restarts: Callable[[Unit], bool]) -> None:
        """Send this rank's rows to the owners."""
        rows: list[Tensor] = []
        weights: list[Tensor] = []
        state: list[Tensor] = []
        for owner, numbers in enumerate(self.bucket.owned[self.updates.replica]):
            for one in (self.bucket.parameters[number] for number in numbers):
                # Placement has made sure that there is a request, for one whole tensor.
                begun = cast(Begun, begin(one.unit))
                request = cast(Whole, begun.pending.request)
                rows.append(tree.leaves(request.updates)[0].reshape(-1).to(one.sent_as))
                weights += [x.reshape(-1) for x in tree.leaves(request.params)] if one.work.reads_weights else []
                state += [as_bytes(x) for x in rows_of(one.unit.state.inner)]
                if owner == self.rank:
                    # The rows themselves are sent, and not held in it.
                    self.requests[id(one.unit)] = replace(request, updates=None, params=None)
                if not restarts(one.unit):
                    self.begun[id(one.unit)] = begun
        self.updates.send(rows, self.bucket.parameters[0].sent_as)
        if self.weights is not None:
            self.weights.send(weights, self.bucket.parameters[0].wide)
        if self.state is not None:
            self.state.send(state, torch.uint8)

    def work(self) -> None:
        """Wait for the rows of the parameters that this rank owns, and send the results back."""
        updates, weights, state = (
            [] if rows is None else [taker(part) for part in rows.received()]
            for rows in (self.updates, self.weights, self.state)
        )
        self.weights = None  # its memory is not needed any more
        results: list[list[Tensor]] = [[] for _ in updates]
        stored: list[list[Tensor]] = [[] for _ in updates]
        for one in self.bucket.of(self.updates.replica, self.rank):
            whole = one.whole(updates).to(one.wide)
            read = one.whole(weights) if one.work.reads_weights else None
            held = None if one.state is None else one.state.together(state)
            found, new = one.run(self.requests.pop(id(one.unit)), whole, read, held)
            parts = torch.split(
                found.reshape(-1).to(one.returned_as), [one.elements(rank) for rank in range(len(updates))]
            )
            for rank, part in enumerate(parts):
                results[rank].append(part)
                stored[rank] += [] if one.state is None else one.state.apart(new, rank)
        rows = [part for own in results for part in own]
        self.updates.send_back(rows, self.bucket.parameters[0].returned_as)
        if self.state is not None:
            self.state.send_back([part for own in stored for part in own], torch.uint8)

    def receive(self, grads: Mapping[int, Grads]) -> Iterator[Ready]:
        """Wait for this rank's rows of the results; yield units with theirs, and with their rows of the work's state."""
        take = taker(self.updates.received_back())
        state = None if self.state is None else taker(self.state.received_back())
        for replica, owners in enumerate(self.bucket.owned):
            for owner in range(len(owners)):
                for one in self.bucket.of(replica, owner):
                    own = take(one.elements(self.rank)).to(one.wide)
                    own = own.view(one.edges[self.rank + 1] - one.edges[self.rank], *one.shape[1:])
                    found = one.work.on_rows(own, one.shape, one.edges[self.rank]).reshape(one.unit.tensor.shape)
                    results = [found, *([] if state is None or one.state is None else one.state.own(state))]
                    yield Ready(one.unit, grads[id(one.unit)], results, self.begun.pop(id(one.unit), None))


class Exchange:
    """Exchanges parts of updates; knows the groups of ranks."""

    def __init__(self) -> None:
        self._communicators: dict[tuple[DeviceMesh, int], Communicator] = {}
        self._known: list[tuple[Unit, eb.Optimizer[Any], ShardedParameter]] = []
        self._planned: tuple[list[ShardedParameter], list[Bucket]] = ([], [])

    def steps(
        self,
        work: Sequence[tuple[Unit, Grads]],
        absent: Sequence[Unit],
        optimizer_of: Callable[[Unit], eb.Optimizer[Any]],
        begin: Begin,
        restarts: Callable[[Unit], bool],
        meanwhile: Iterator[Ready],
    ) -> Iterator[Ready]:
        """Yield units with the results of their work. Collective, with the same units.

        Args:
            work: Units of which this rank has rows, with gradients.
            absent: Those without a gradient.
            optimizer_of: What steps a unit.
            begin: Runs a unit's step up to its joint work.
            restarts: Whether a unit's step begins anew with its results. Others are held until these arrive.
            meanwhile: Other units, which are stepped while the first bucket is in flight.

        Raises:
            RuntimeError: Ranks have gradients for different parameters, or a CUDA graph is being captured.
        """
        if is_capturing():
            raise RuntimeError(
                "step: a CUDA graph is being captured, and updates of sharded parameters travel between ranks in it; accepted is a step"
                " outside of a capture, or a FlatStepper, in whose step nothing travels."
            )
        self._know([*(unit for unit, _ in work), *absent], optimizer_of)
        parameters = [one for *_, one in self._known[: len(work)]]
        self._agree(parameters, [one for *_, one in self._known])
        grads = {id(unit): own for unit, own in work}
        transfers = [self._transfer(bucket) for bucket in self._plan(parameters)]
        try:
            for number, transfer in enumerate(transfers):
                transfer.send(lambda unit: begin(unit, grads[id(unit)]), restarts)
                if number == 0:
                    yield from meanwhile
                if number >= 1:
                    transfers[number - 1].work()
                if number >= 2:
                    yield from transfers[number - 2].receive(grads)
            for transfer in transfers[-1:]:
                transfer.work()
            for transfer in transfers[-2:]:
                yield from transfer.receive(grads)
        except BaseException:
            for communicator in self._communicators.values():
                communicator.drain()
            raise
        yield from meanwhile

    def _know(self, units: Sequence[Unit], optimizer_of: Callable[[Unit], eb.Optimizer[Any]]) -> None:
        """Describe units anew whose optimizer has changed since the last step."""
        before = {id(unit): (optimizer, one) for unit, optimizer, one in self._known}
        known = []
        for unit in units:
            optimizer = optimizer_of(unit)
            last, one = before.get(id(unit), (None, None))
            known.append(
                (
                    unit,
                    optimizer,
                    one if one is not None and last is optimizer else ShardedParameter.of(unit, optimizer),
                )
            )
        self._known = known

    def _plan(self, parameters: list[ShardedParameter]) -> list[Bucket]:
        known, buckets = self._planned
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            buckets = buckets_of(parameters)
            self._planned = parameters, buckets
        return buckets

    # -- ranks ----------------------------------------------------------------------------------------------------------------

    def _transfer(self, bucket: Bucket) -> _Transfer:
        rows = bucket.parameters[0].rows
        copies = None if rows.copies is None else self._communicator(rows.mesh, rows.copies)
        return _Transfer.of(bucket, self._communicator(rows.mesh, rows.shards), copies)

    def _communicator(self, mesh: DeviceMesh, dimension: int) -> Communicator:
        found = self._communicators.get((mesh, dimension))
        if found is None:
            found = self._communicators[mesh, dimension] = Communicator(mesh.get_group(dimension))
        return found

    def _agree(self, present: Sequence[ShardedParameter], every: Sequence[ShardedParameter]) -> None:
        """Refuse ranks with gradients for different parameters, which would take the rows of one for those of another. Collective.

        The message is in the host's memory, if a backend takes such messages, so that no host waits for a device.
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
