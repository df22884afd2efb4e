"""Collectives over one group of ranks: their traffic is counted, and a rank that is gone becomes an error that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Op = Any  # dist.ReduceOp.SUM and the like, whose types torch does not export


class Pending(Protocol):
    """A collective that may be under way."""

    def wait(self) -> None:
        """Until it is done."""
        ...


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        """Return at once."""


class _Work:
    def __init__(self, work: Any, describe: str, communicator: Communicator) -> None:
        self._work, self._describe, self._communicator = work, describe, communicator

    def wait(self) -> None:
        with self._communicator.explained(self._describe):
            self._work.wait()


class Communicator:
    """The ranks of a process group, or this process alone.

    A group of one rank takes the same paths as any other and sends nothing.

    Args:
        group: The process group; None for one process alone.

    Attributes:
        size: Number of ranks.
        rank: Of this process, in the group.
        sent: Bytes that this rank sends, by collective, as a ring (all-gather, reduce-scatter, all-reduce) or a direct exchange
            (all-to-all) sends them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent: Counter[str] = Counter()

    def all_gather(self, into: Tensor, shard: Tensor, what: str) -> Pending:
        """``into`` becomes the ranks' shards one after the other. ``shard`` may be this rank's part of ``into``."""
        if self.size == 1:
            if into.data_ptr() != shard.data_ptr():
                into.copy_(shard)
            return Done()
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._start("all_gather", gather, into, shard, what, sent=(self.size - 1) * shard.nbytes)

    def reduce_scatter(self, into: Tensor, whole: Tensor, what: str) -> Pending:
        """``into`` becomes this rank's part of the sum of ``whole`` over the ranks; it may be that part of ``whole``, which is spoilt."""
        if self.size == 1:
            if into.data_ptr() != whole.data_ptr():
                into.copy_(whole)
            return Done()
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._start("reduce_scatter", scatter, into, whole, what, sent=(self.size - 1) * into.nbytes)

    def all_to_all(self, into: Tensor, whole: Tensor, what: str) -> Pending:
        """``into`` becomes, rank after rank, every rank's part for this one."""
        if self.size == 1:
            into.copy_(whole)
            return Done()
        return self._start(
            "all_to_all", dist.all_to_all_single, into, whole, what, sent=(self.size - 1) * whole.nbytes // self.size
        )

    def all_reduce(self, x: Tensor, what: str, op: Op = dist.ReduceOp.SUM) -> Pending:
        """``x`` becomes the sum (or another ``op``) of the ranks'."""
        if self.size == 1:
            return Done()
        self.sent["all_reduce"] += 2 * (self.size - 1) * x.nbytes // self.size
        with self.explained(f"all_reduce of {what}"):
            work = dist.all_reduce(x, op=op, group=self.group, async_op=True)
        return _Work(work, f"all_reduce of {what}", self)

    def broadcast(self, x: Tensor, what: str) -> None:
        """``x`` becomes that of the group's first rank."""
        if self.size > 1:
            with self.explained(f"broadcast of {what}"):
                dist.broadcast(x, group=self.group, group_src=0)

    def clone(self) -> Communicator:
        """The same ranks, with an order of collectives of their own. Every rank of the group has to call it."""
        if self.group is None:
            return Communicator(None)
        group = dist.new_group(dist.get_process_group_ranks(self.group), use_local_synchronization=True)
        return Communicator(group)

    def _start(
        self, kind: str, function: Callable[..., Any], into: Tensor, given: Tensor, what: str, sent: int
    ) -> Pending:
        self.sent[kind] += sent
        with self.explained(f"{kind} of {what}"):
            work = function(into, given, group=self.group, async_op=True)
        return _Work(work, f"{kind} of {what}", self)

    @contextmanager
    def explained(self, describe: str) -> Iterator[None]:
        """Say of a collective that fails which one it was, and why that happens."""
        try:
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: {describe} did not complete: another rank died, ran into an error, or did not take part"
                f" within the process group's timeout. Look at the other ranks' output for the cause. ({error})"
            ) from error


class GroupAxis:
    """The axis of shards: sums and maxima over the ranks of a group (see :class:`everybit.Axis`)."""

    def __init__(self, communicators: tuple[Communicator, ...]) -> None:
        self._communicators = communicators

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """The greatest over the ranks."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def owned(self, tree: Any) -> Any:
        """``tree``: shards do not overlap, and their padding is no part of what is stepped."""
        return tree

    def _reduce(self, value: Tensor, op: Op) -> Tensor:
        if all(communicator.size == 1 for communicator in self._communicators):
            return value
        total = value.clone()
        if total.dtype is torch.bool:
            total = total.to(torch.int32)
        for communicator in self._communicators:
            communicator.all_reduce(total, "a measurement", op).wait()
        return total.to(value.dtype)
