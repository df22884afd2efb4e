"""Collectives over one group of ranks: their traffic is counted, and a rank that is gone becomes an error that says so."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from everybit_torch import streams
from everybit_torch.collectives import own_groups
from everybit_torch.torch_internals.process_groups import timeout_of

Op = Any  # dist.ReduceOp.SUM and the like, whose types torch does not export

CPU = torch.device("cpu")

BROADCASTS = 8
"""Ranks up to which weights are gathered over gloo by a broadcast from each."""


class PendingCollective(Protocol):
    """A collective that may be under way."""

    def wait(self) -> None:
        """Wait until the collective is done."""
        ...

    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        ...


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        """Return at once, since the collective is over."""

    def is_done(self) -> bool:
        """Return True, since the collective is over."""
        return True


class _Waited:
    def __init__(self, work: Any, describe: str, communicator: Communicator) -> None:
        self._work, self._describe, self._communicator = work, describe, communicator

    def wait(self) -> None:
        with self._communicator.explained(self._describe):
            self._work.wait()
        self._communicator.completed(self._work)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())


class _Several:
    """Collectives that are waited for together."""

    def __init__(self, pending: Sequence[PendingCollective]) -> None:
        self._pending = list(pending)

    def wait(self) -> None:
        for one in self._pending:
            one.wait()

    def is_done(self) -> bool:
        return all(one.is_done() for one in self._pending)


class _Copied:
    """A collective with a result that is copied when the host waits for it."""

    def __init__(self, pending: PendingCollective, into: Tensor, result: Tensor) -> None:
        self._pending, self._into, self._result = pending, into, result

    def wait(self) -> None:
        self._pending.wait()
        self._into.copy_(self._result.view_as(self._into))

    def is_done(self) -> bool:
        return self._pending.is_done()


class Communicator:
    """The ranks of a process group, or this process alone.

    A group of one rank takes the same paths as any other, without messages.

    Args:
        group: The process group; None for one process alone.
        near: The device of the tensors that are sent. Small tensors of a communicator's own lie there too, if they cannot lie on the
            host. Torch's present device may be another.
        owned: Whether the group was made here. :meth:`close`, or the end of this object, then releases it for reuse.

    Attributes:
        size: Number of ranks.
        rank: The number of this process in the group.
        sent: Bytes that this rank sends, by collective, as a ring (all-gather, reduce-scatter, all-reduce) or a direct exchange
            (all-to-all) sends them; for parts of different lengths the mean over the ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, near: torch.device | None = None, owned: bool = False
    ) -> None:
        self._group, self._near = None if group is None else weakref.ref(group), near
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent: Counter[str] = Counter()
        self._under_way: list[Any] = []  # torch's objects, which do not keep this one alive
        self._give_back: weakref.finalize[Any, Communicator] | None = None
        if owned and self._group is not None:
            self._give_back = weakref.finalize(self, own_groups.give_back, self._group, self._under_way)
            self._give_back.atexit = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for one process alone. torch keeps it, and this object does not, so that it ends when it is destroyed.

        Raises:
            RuntimeError: It was destroyed.
        """
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise RuntimeError(
                f"a process group of {self.size} ranks was destroyed (destroy_process_group); accepted is to make steppers and optimizers"
                " of sharded parameters anew after init_process_group()."
            )
        return group

    def all_gather(self, into: Tensor, shard: Tensor, what: str, lengths: Sequence[int] = ()) -> PendingCollective:
        """``into`` becomes the ranks' shards one after the other. ``shard`` may be this rank's part of ``into``.

        ``lengths``: of the shards, if they differ.
        """
        if self.size == 1:
            if into.data_ptr() != shard.data_ptr():
                into.copy_(shard)
            return Done()
        sent = (self.size - 1) * into.nbytes // self.size
        on_gloo = self._goes_over_gloo(into.device) and self.size <= BROADCASTS
        if on_gloo or (lengths and not self._takes_lists(into.device)):
            # gloo gathers into memory of its own, equal parts only, and copies all of it. The same bytes without the copy:
            self.sent["all_gather"] += sent
            parts = self.parts(into, lengths)
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard.view(-1))
            return _Several([
                self._launch(f"all_gather of {what}", partial(dist.broadcast, part, group=self.group, group_src=rank, async_op=True))
                for rank, part in enumerate(parts)
                if part.numel()
            ])  # fmt: skip
        if lengths:
            # One group of broadcasts.
            return self._start("all_gather", dist.all_gather, self.parts(into, lengths), shard, what, sent=sent)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return self._start("all_gather", gather, into, shard, what, sent=sent)

    def reduce_scatter(self, into: Tensor, whole: Tensor, what: str, lengths: Sequence[int] = ()) -> PendingCollective:
        """``into`` becomes this rank's part of the sum of ``whole`` over the ranks, and may be that part of it; ``whole`` is spoilt.

        ``lengths``: of the ranks' parts, if they differ.
        """
        if self.size == 1:
            if into.data_ptr() != whole.data_ptr():
                into.copy_(whole)
            return Done()
        sent = (self.size - 1) * whole.nbytes // self.size
        if self._goes_over_gloo(whole.device) or (lengths and not self._takes_lists(whole.device)):
            # gloo sums a copy of all of it on every rank, and copies this rank's part of that. The same sum, without the two copies:
            self.sent["reduce_scatter"] += sent
            pending = self._launch(
                f"reduce_scatter of {what}", lambda: dist.all_reduce(whole, group=self.group, async_op=True)
            )
            own = self.parts(whole, lengths)[self.rank]
            return pending if own.data_ptr() == into.data_ptr() else _Copied(pending, into, own)
        if lengths:
            # One group of reductions.
            return self._start("reduce_scatter", dist.reduce_scatter, into, self.parts(whole, lengths), what, sent=sent)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._start("reduce_scatter", scatter, into, whole, what, sent=sent)

    def all_to_all(self, into: Tensor, whole: Tensor, what: str, lengths: Sequence[int] = ()) -> PendingCollective:
        """Fill ``into``, rank after rank, with every rank's part for this rank. ``lengths``: of the parts for each rank, if they differ."""
        if self.size == 1:
            into.copy_(whole)
            return Done()
        exchange: Callable[..., Any] = dist.all_to_all_single
        if lengths:
            received = [lengths[self.rank]] * self.size
            exchange = partial(exchange, output_split_sizes=received, input_split_sizes=list(lengths))
        return self._start("all_to_all", exchange, into, whole, what, sent=(self.size - 1) * whole.nbytes // self.size)

    def exchange(
        self, into: Tensor, whole: Tensor, what: str, *, received: Sequence[int], given: Sequence[int]
    ) -> PendingCollective:
        """Fill ``into``, rank after rank, with every rank's part for this rank, of the lengths ``received``.

        ``given``: the lengths of the parts of ``whole`` for each rank.
        """
        if self.size == 1:
            into.copy_(whole)
            return Done()
        exchange = partial(dist.all_to_all_single, output_split_sizes=list(received), input_split_sizes=list(given))
        sent = (whole.numel() - given[self.rank]) * whole.itemsize
        return self._start("all_to_all", exchange, into, whole, what, sent=sent)

    def parts(self, whole: Tensor, lengths: Sequence[int] = ()) -> list[Tensor]:
        """The ranks' parts of a 1-d tensor: of these lengths, or equally long."""
        return list(torch.split(whole, list(lengths))) if lengths else list(whole.view(self.size, -1))

    def all_reduce(self, x: Tensor, what: str, op: Op = dist.ReduceOp.SUM) -> PendingCollective:
        """``x`` becomes the sum (or another ``op``) of the ranks'."""
        if self.size == 1:
            return Done()
        self.sent["all_reduce"] += 2 * (self.size - 1) * x.nbytes // self.size
        return self._launch(f"all_reduce of {what}", lambda: dist.all_reduce(x, op=op, group=self.group, async_op=True))

    def broadcast(self, x: Tensor, what: str, source: int = 0) -> None:
        """Fill ``x`` with the values of the rank ``source`` of the group."""
        if self.size > 1:
            with self.explained(f"broadcast of {what}"):
                dist.broadcast(x, group=self.group, group_src=source)

    def drain(self) -> None:
        """Wait for everything that is under way, whether it fails or not: its buffers may be used again then."""
        while self._under_way:
            try:
                self._under_way[-1].wait()
            except Exception:  # one that failed does not write any more
                self._spoil()
            self._under_way.pop()

    @property
    def device(self) -> torch.device:
        """The device for tensors that are not the model's: the host, if the backend takes them."""
        if self.group is None or CPU in self._devices():
            return CPU
        first = self._devices()[0]
        return self._near if self._near is not None and self._near.type == first.type else first

    # -- groups of the same ranks -------------------------------------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta | None:
        """The timeout of the group's collectives; None if its backend does not say."""
        return timeout_of(self._required_group(), self._devices()[0])

    def clone(self) -> Communicator:
        """The same ranks, backend and timeout, with an order of collectives of their own. Every rank of the group has to call it."""
        if self.group is None:
            return Communicator(None)
        config = dist.get_backend_config(self.group)
        backends = {one.split(":")[-1] for one in config.split(",")}
        return self._new_group(backends.pop() if len(backends) == 1 else config)

    def for_host_memory(self) -> Communicator:
        """The same ranks, for tensors in the host's memory: over this group, if its backend takes them. Every rank has to call it.

        :meth:`drain` waits for the collectives over either of the two alone.
        """
        if self.device != CPU:
            return self._new_group("gloo")
        other = Communicator(self.group, near=self._near)
        other.sent = self.sent
        return other

    def close(self) -> None:
        """End all sending. A group that was made here is kept for the next communicator that needs one; every rank has to close it."""
        if self._give_back is not None and self._give_back.alive:
            self.drain()
            self._give_back()
            self._group = None

    def _new_group(self, backend: str) -> Communicator:
        ranks = dist.get_process_group_ranks(self._required_group())
        return Communicator(own_groups.take(ranks, backend, self.timeout), near=self._near, owned=True)

    def _devices(self) -> list[torch.device]:
        return list(self._required_group()._device_types)

    def _goes_over_gloo(self, device: torch.device) -> bool:
        """Whether collectives of tensors on a device are gloo's, in the host's memory."""
        if device.type != "cpu" or streams.has_streams(device):
            return False
        config = dist.get_backend_config(self._required_group()).split(",")
        return "cpu:gloo" in config or config == ["gloo"]

    def _takes_lists(self, device: torch.device) -> bool:
        """Whether the backend gathers and reduces parts of different lengths: NCCL does."""
        config = dist.get_backend_config(self._required_group()).split(",")
        return f"{device.type}:nccl" in config or config == ["nccl"]

    def _required_group(self) -> Any:
        group = self.group
        assert group is not None
        return group

    def _spoil(self) -> None:
        if self._group is not None:
            own_groups.spoil(self._group)

    # -- what is under way --------------------------------------------------------------------------------------------------------

    def _start(
        self,
        kind: str,
        function: Callable[..., Any],
        into: Tensor | list[Tensor],
        given: Tensor | list[Tensor],
        what: str,
        sent: int,
    ) -> PendingCollective:
        self.sent[kind] += sent
        return self._launch(f"{kind} of {what}", lambda: function(into, given, group=self.group, async_op=True))

    def _launch(self, describe: str, launch: Callable[[], Any]) -> PendingCollective:
        with self.explained(describe):
            # At once: whatever fails from here on, drain() waits for it.
            self._under_way.append(launch())
        return _Waited(self._under_way[-1], describe, self)

    def completed(self, work: Any) -> None:
        """A collective was waited for."""
        self._under_way[:] = [one for one in self._under_way if one is not work]

    @contextmanager
    def explained(self, describe: str) -> Iterator[None]:
        """Explain a collective's error: which collective failed, and why that happens. Other errors (out of memory, ...) pass unchanged."""
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise
            self._spoil()
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: {describe} did not complete: another rank died, ran into an error, or did not take part"
                f" within the process group's timeout. Look at the other ranks' output for the cause. ({error})"
            ) from error


class GroupAxis:
    """The axis of shards: sums and maxima over the ranks of a group (see :class:`everybit.Axis`)."""

    def __init__(self, communicators: tuple[Communicator, ...]) -> None:
        self._communicators = communicators

    @property
    def has_no_peers(self) -> bool:
        """Whether there is no other rank."""
        return all(communicator.size == 1 for communicator in self._communicators)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: Tensor) -> Tensor:
        """The greatest over the ranks."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, op: Op) -> Tensor:
        if self.has_no_peers:
            return value
        total = value.clone()
        if total.dtype is torch.bool:
            total = total.to(torch.int32)
        for communicator in self._communicators:
            communicator.all_reduce(total, "a measurement", op).wait()
        return total.to(value.dtype)
