"""Parameters that cannot be cut visit an owner for a step: one rank, which steps them whole.

Ranks hold rows of a parameter, and its transform, or a block of its format, needs more. Its rows and gradients travel to the owner by
all-to-all. The owner steps an ordinary segment, and each rank's new rows travel back. Neither the transform nor its state knows of ranks.
Parameters travel in rounds of bounded size: while the owners step one, the next is on its way. State stays at the owner.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import everybit as eb
from everybit.combinators import step_cost
from everybit_torch.collectives import AllToAll, Communicator
from everybit_torch.placements import row_edges
from everybit_torch.segments import HostMemory, Segment, Watched
from everybit_torch.torch_internals.dtensors import local

ROUND = 1 << 24
"""Elements for each owner that travel in a round, or one parameter, if that is larger."""


@dataclass(slots=True, eq=False)
class Visitor:
    """A parameter that visits its owner.

    Attributes:
        parameter: The parameter, of which this rank has rows.
        optimizer: The optimizer, as masks and labels came out.
        first: Global index of its first element.
        owner: The replica and the rank of the owner.
        segment: The whole parameter at its owner, between steps without its weights; None at other ranks.
        watched: Where steps note which weights of this rank's rows they change; None: nowhere.
        host: The host's memory in which the state lies at the owner; None: on the device.
    """

    parameter: Tensor
    optimizer: eb.Optimizer[Any]
    first: int
    owner: tuple[int, int] = (0, 0)
    segment: Segment | None = None
    watched: Watched | None = None
    host: HostMemory | None = None
    _shadow: Segment | None = None

    def shadow(self) -> Segment:
        """Return the segment as it is at the owner, without its memory."""
        if self._shadow is None or self._shadow.optimizer is not self.optimizer:
            like = torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device="meta")
            self._shadow = Segment.new(self.optimizer, like, self.first)
        return self._shadow

    def leave(self) -> None:
        """Free the whole weights at the owner."""
        assert self.segment is not None
        self.segment.tensor = self.segment.tensor[:0].clone()


@dataclass(slots=True)
class Arrived:
    """A whole parameter at its owner, for a step.

    Attributes:
        segment: The segment, with the present weights.
        grad: The gradient, in the tensor's shape.
    """

    segment: Segment
    grad: Tensor


class Visits:
    """Parameters that are stepped whole, with rows that lie alike on some ranks.

    Every rank makes it with the same parameters, in the same order, and calls its methods alike.

    Args:
        visitors: The parameters, at least one.
        shards: The ranks that have other rows.
        copies: The ranks that have the same rows, if there are any. The owners are spread over all of these replicas.
        elements: Elements for each owner that travel in a round; None: :data:`ROUND`.
    """

    def __init__(
        self,
        visitors: Sequence[Visitor],
        shards: Communicator,
        copies: Communicator | None = None,
        *,
        elements: int | None = None,
    ) -> None:
        self.visitors, self.shards, self.copies = list(visitors), shards, copies
        self.device = local(self.visitors[0].parameter).device
        self.replicas = 1 if copies is None else copies.size
        self.here = (0 if copies is None else copies.rank, shards.rank)
        owners = [(replica, rank) for replica in range(self.replicas) for rank in range(shards.size)]
        costs = [step_cost(one.optimizer.transform, one.parameter.shape) for one in self.visitors]
        for one, number in zip(self.visitors, shared_out(costs, len(owners)), strict=True):
            one.owner = owners[number]
        self._rounds = _rounds(self.visitors, ROUND if elements is None else elements)
        with torch.no_grad():
            for together in self._rounds:
                sent = self._travel(together, "weights", {one: local(one.parameter).detach() for one in together})
                for one, whole in sent.received():
                    one.segment = Segment.new(one.optimizer, whole, one.first, host=one.host)
                    one.leave()

    def _travel(self, together: Sequence[Visitor], what: str, rows: Mapping[Visitor, Tensor]) -> _Travel:
        """Send rows of each parameter, in its shape, to its owner."""
        travel = _Travel(self, [(one, one.parameter.shape) for one in together], rows[together[0]].dtype, what)
        travel.send(rows)
        return travel

    def agree(self, said: str) -> bool:
        """Return whether all ranks say the same. Collective. Backends where the host would have to wait are left out."""
        told = zlib.crc32(said.encode())
        answer = torch.tensor([told, -told])
        for ranks in (self.shards, *([] if self.copies is None else [self.copies])):
            if ranks.device.type == "cpu":
                ranks.all_reduce(answer, "which parameters have gradients", dist.ReduceOp.MAX).wait()
        highest, lowest = answer.tolist()
        return bool(highest == -lowest)

    # -- a step ---------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def look(self, grads: Sequence[Tensor | None]) -> Iterator[Arrived]:
        """Bring weights and gradients to the owners, and yield this rank's. They do not travel back.

        It serves totals, which have to be known before anything is stepped.

        Args:
            grads: Of this rank's rows, in their shapes. All ranks have one for the same parameters.
        """
        for _, arrived in self._arrivals(grads):
            yield from arrived.values()
            for one in arrived:
                one.leave()

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], step: Callable[[Segment, Tensor], object]) -> None:
        """Step the parameters that have a gradient, each at its owner.

        Args:
            grads: Of this rank's rows, in their shapes. All ranks have one for the same parameters.
            step: Steps a whole parameter in place.
        """
        host = self.visitors[0].host
        for together, arrived in self._arrivals(grads):
            if host is not None:
                host.begin([whole.segment for whole in arrived.values()])
            for whole in arrived.values():
                step(whole.segment, whole.grad)
            if host is not None:
                host.finish()
            self._return(together, [*arrived])

    def _arrivals(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[list[Visitor], dict[Visitor, Arrived]]]:
        """Yield the rounds. While the owners work on a round, the next is on its way."""
        rows = {one: grad for one, grad in zip(self.visitors, grads, strict=True) if grad is not None}
        rounds = [found for together in self._rounds if (found := [one for one in together if one in rows])]
        pending: list[tuple[list[Visitor], _Travel, _Travel]] = []
        for number in range(len(rounds) + 1):
            if number < len(rounds):
                together = rounds[number]
                weights = self._travel(together, "weights", {one: local(one.parameter).detach() for one in together})
                sent = self._travel(together, "gradients", {one: rows[one] for one in together})
                pending.append((together, weights, sent))
            if number:
                before, weights, sent = pending.pop(0)
                arrived = {}
                for (one, whole), (_, grad) in zip(weights.received(), sent.received(), strict=True):
                    assert one.segment is not None
                    one.segment.tensor = whole
                    arrived[one] = Arrived(one.segment, grad)
                yield before, arrived

    # -- state ----------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def hand_out(self, of: Of, *, weights: bool) -> list[dict[str, Tensor]]:
        """Compute tensors of each whole parameter at its owner, and return this rank's rows of them. Every rank has to call it.

        A tensor is cut along its own first dimension, as ``torch.chunk`` cuts, so that any number of ranks can put it together. A number
        is whole on every rank.

        Args:
            of: Computes them, by name. It is called for meta tensors, too, to learn their shapes.
            weights: Whether it needs the present weights.
        """
        made: dict[Visitor, Mapping[str, Tensor]] = {}
        for together in self._rounds if weights else [self.visitors]:
            for one in self._visit(together, weights=weights):
                assert one.segment is not None
                made[one] = {name: x.to(self.device) for name, x in of(one.segment).items()}
                if weights:
                    one.leave()
        found: dict[Visitor, dict[str, Tensor]] = {one: {} for one in self.visitors}
        for kind in self._kinds(of):
            travel = kind.travel(self)
            travel.send_back({one: _as_bytes(made[one][kind.name]) for one in kind.shapes if one in made})
            for one, rows in travel.received_back():
                found[one][kind.name] = kind.rows(one, rows, self.shards)
        return list(found.values())

    @torch.no_grad()
    def take(
        self,
        values: Sequence[Mapping[str, Tensor]],
        like: Of,
        into: Callable[[Segment, Mapping[str, Tensor]], object],
        *,
        weights: bool,
    ) -> None:
        """Give the owners tensors of which ranks have rows, as :meth:`hand_out` returns them. Every rank has to call it.

        Args:
            values: This rank's rows of each parameter, by name.
            like: Says which tensors there have to be, and of which shapes and dtypes.
            into: Takes whole tensors over at the owner. It may change the segment's weights, if they are there.
            weights: Whether it needs the present weights, of which the new values then travel back.

        Raises:
            ValueError: A name is missing, or rows have another shape or dtype. No rank's state is changed.
        """
        of = dict(zip(self.visitors, values, strict=True))
        kinds = self._kinds(like)
        for kind in kinds:
            for one, shape in kind.shapes.items():
                expected, value = rows_of(shape, self.shards.rank, self.shards.size), of[one].get(kind.name)
                if value is None or tuple(value.shape) != expected or value.dtype is not kind.dtype:
                    got = "nothing" if value is None else f"{tuple(value.shape)}, {value.dtype}"
                    raise ValueError(
                        f"state of parameter {self.visitors.index(one)}, {kind.name}: got {got}; accepted is {expected}, {kind.dtype}."
                    )
        arrived: dict[Visitor, dict[str, Tensor]] = {one: {} for one in self.visitors if one.segment is not None}
        for kind in kinds:
            travel = kind.travel(self)
            travel.send({one: _as_bytes(of[one][kind.name]) for one in kind.shapes})
            for one, whole in travel.received():
                arrived[one][kind.name] = kind.whole(one, whole)
        for together in self._rounds if weights else [self.visitors]:
            here = self._visit(together, weights=weights)
            for one in here:
                assert one.segment is not None
                into(one.segment, arrived.pop(one))
            if weights:
                self._return(together, here)

    def _visit(self, together: Sequence[Visitor], *, weights: bool) -> list[Visitor]:
        """Bring weights to the owners, if they are needed; return this rank's parameters."""
        if not weights:
            return [one for one in together if one.segment is not None]
        sent = self._travel(together, "weights", {one: local(one.parameter).detach() for one in together})
        here = []
        for one, whole in sent.received():
            assert one.segment is not None
            one.segment.tensor = whole
            here.append(one)
        return here

    def _return(self, together: Sequence[Visitor], here: Sequence[Visitor]) -> None:
        """Send every rank its rows of new weights, and write them."""
        shapes = [(one, one.parameter.shape) for one in together]
        back = _Travel(self, shapes, together[0].parameter.dtype, "new weights")
        back.send_back({one: one.segment.tensor for one in here if one.segment is not None})
        for one in here:
            one.leave()
        for one, rows in back.received_back():
            held = local(one.parameter).detach()
            if one.watched is not None:
                one.watched.note(held, rows)
            held.copy_(rows)

    def _kinds(self, of: Of) -> list[_Sent]:
        """The tensors that are computed of the parameters, the same on every rank."""
        found: dict[tuple[str, torch.dtype, bool], _Sent] = {}
        for one in self.visitors:
            for name, value in of(one.shadow()).items():
                kind = found.setdefault((name, value.dtype, value.ndim > 0), _Sent(name, value.dtype, {}))
                kind.shapes[one] = tuple(value.shape)
        return list(found.values())


Of = Callable[[Segment], Mapping[str, Tensor]]
"""Computes tensors of a whole parameter, by name."""


def entries_of(segment: Segment) -> dict[str, Tensor]:
    """Return the tensors of a whole parameter's state by name."""
    return {entry.name: value for entry, value in segment.entries()}


@dataclass(frozen=True, slots=True)
class _Sent:
    """An entry of the state, of those parameters that have it.

    Tensors travel as bytes, because neither gloo nor NCCL sends int16; numbers travel as they are.

    Attributes:
        name: The entry's name.
        dtype: Its dtype.
        shapes: Its whole shape, by parameter: of numbers alone, or of tensors.
    """

    name: str
    dtype: torch.dtype
    shapes: dict[Visitor, tuple[int, ...]]

    def travel(self, visits: Visits) -> _Travel:
        """Return a way between ranks for it."""
        size = self.dtype.itemsize
        shapes = [(one, (*shape, size) if shape else ()) for one, shape in self.shapes.items()]
        numbers = not all(shape for _, shape in shapes)
        return _Travel(visits, shapes, self.dtype if numbers else torch.uint8, f"state, {self.name}")

    def rows(self, one: Visitor, sent: Tensor, shards: Communicator) -> Tensor:
        """Return received rows in their own dtype and shape."""
        return self._as_sent(sent, rows_of(self.shapes[one], shards.rank, shards.size))

    def whole(self, one: Visitor, sent: Tensor) -> Tensor:
        """Return a received tensor in its own dtype and shape."""
        return self._as_sent(sent, self.shapes[one])

    def _as_sent(self, sent: Tensor, shape: Sequence[int]) -> Tensor:
        return sent.reshape(-1).view(self.dtype).view(tuple(shape)).clone() if sent.ndim else sent.clone()


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8) if x.ndim else x


class _Travel:
    """One tensor of each of some parameters, on its way to the owners or back: the first dimension is cut as ranks hold rows.

    Args:
        visits: The parameters' ranks and owners.
        shapes: The parameters, and the shape of the tensor that travels. A number travels to each rank, and not back.
        dtype: The tensors' dtype.
        what: The tensors' name, for messages.
    """

    def __init__(
        self, visits: Visits, shapes: Sequence[tuple[Visitor, Sequence[int]]], dtype: torch.dtype, what: str
    ) -> None:
        self._shapes, self._dtype = shapes, dtype
        self._shards, self._here = visits.shards, visits.here
        self._replicas = visits.replicas
        self._exchange = AllToAll(what, visits.shards, visits.copies, visits.device, self._length)

    def _of(self, owner: tuple[int, int]) -> list[tuple[Visitor, Sequence[int]]]:
        return [(one, shape) for one, shape in self._shapes if one.owner == owner]

    def _count(self, shape: Sequence[int], rank: int) -> int:
        return math.prod(rows_of(shape, rank, self._shards.size))

    def _length(self, replica: int, owner: int, rank: int) -> int:
        return sum(self._count(shape, rank) for _, shape in self._of((replica, owner)))

    def send(self, rows: Mapping[Visitor, Tensor]) -> None:
        """Send this rank's rows of each parameter to its owner."""
        owners = [(self._exchange.replica, rank) for rank in range(self._shards.size)]
        parts = [rows[one].reshape(-1) for owner in owners for one, _ in self._of(owner)]
        self._exchange.send(parts, self._dtype)

    def received(self) -> Iterator[tuple[Visitor, Tensor]]:
        """Yield this rank's parameters with the whole tensors."""
        mine = self._of(self._here)
        by_rank = [
            torch.split(whole, [self._count(shape, rank) for _, shape in mine])
            for rank, whole in enumerate(self._exchange.received())
        ]
        for number, (one, shape) in enumerate(mine):
            parts = [found[number] for found in by_rank]
            yield one, torch.cat(parts).view(tuple(shape)) if shape else parts[0].view(())

    def send_back(self, wholes: Mapping[Visitor, Tensor]) -> None:
        """Send every rank its rows of this rank's parameters."""
        ranks = range(self._shards.size)
        cut = []
        for one, shape in self._of(self._here):
            flat, counts = wholes[one].reshape(-1), [self._count(shape, rank) for rank in ranks]
            cut.append(torch.split(flat, counts) if shape else [flat for _ in ranks])
        self._exchange.send_back([rows[rank] for rank in ranks for rows in cut], self._dtype)

    def received_back(self) -> Iterator[tuple[Visitor, Tensor]]:
        """Yield all parameters with this rank's rows."""
        found = self._exchange.received_back()
        owners = [(replica, rank) for replica in range(self._replicas) for rank in range(self._shards.size)]
        order = [each for owner in owners for each in self._of(owner)]
        parts = torch.split(found, [self._count(shape, self._shards.rank) for _, shape in order])
        for (one, shape), part in zip(order, parts, strict=True):
            yield one, part.view(rows_of(shape, self._shards.rank, self._shards.size))


def rows_of(shape: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """Return the shape of a rank's rows of a tensor; of a number, which every rank has, its own."""
    if not shape:
        return ()
    edges = row_edges(shape[0], ranks)
    return (edges[rank + 1] - edges[rank], *shape[1:])


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
