"""The model's own tensors as pieces of flat buffers, whole on every rank or sharded and gathered unit by unit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from ctypes import string_at

import torch
from torch import Tensor, nn

from everybit_torch import streams
from everybit_torch.ambient import in_plain_mode
from everybit_torch.collectives.communicator import Communicator, Done, Pending
from everybit_torch.collectives.reduction import can_be_freed
from everybit_torch.dtensors import local
from everybit_torch.gradients import piece
from everybit_torch.memory_pool import MemoryPool
from everybit_torch.sharded.absent_parameters import hide, show
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.offload import HostCopies
from everybit_torch.sharded.strategies import Sharding
from everybit_torch.torch_internals.tensors import add_to_versions, plain_tensors, version

MOVED = (
    "{name}: was moved, cast or given other memory since the stepper was made, and is not in its buffer now. Cast and move a model first,"
    " then make its stepper; close() gives a model back."
)


class _Interrupted:
    """A gathering of which nobody knows whether it is under way, after an error."""

    def __init__(self, communicator: Communicator, what: str) -> None:
        self.communicator, self._what = communicator, what

    def wait(self) -> None:
        """Its result is not to be used."""
        raise RuntimeError(
            f"{self._what}: an error interrupted the gathering of these weights; accepted is zero_grad(), on every rank."
        )

    def is_done(self) -> bool:
        return False


class WeightBuffer:
    """The weights of one group of parameters.

    Where parameters are sharded, the model's tensors have their values only while their unit is gathered. At other times they have
    their shapes, and every element is NaN: whoever looks at them then sees that something is wrong, and no absent value is used by mistake.

    Args:
        group: Of the layout.
        parameters: The model's, in the group's order. They become pieces of the buffer when :meth:`take` is called for each.
        sharding: Decides what is kept.
        inner: The ranks that buffers are sharded over.
        outer: The ranks that hold copies of the same shards.
        device: Where the buffer lies.
        pool: Lends memory for the whole, while it is gathered.
        copies: Of the shard, if that lies on the host.

    Attributes:
        shard: This inner rank's shard, the only weights that are allocated between gatherings if parameters are sharded.
        gathered: Whether the weights are gathered, or being gathered.
        shown: Whether the model's tensors have their values.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[nn.Parameter],
        sharding: Sharding,
        inner: Communicator,
        outer: Communicator,
        device: torch.device,
        pool: MemoryPool,
        copies: HostCopies | None = None,
    ) -> None:
        self.group, self.parameters, self.sharding = group, list(parameters), sharding
        self._pool = pool
        # What has the memory: of a DTensor, this rank's part.
        self._tensors = [local(parameter) for parameter in self.parameters]
        self.inner, self.outer, self._copies = inner, outer, copies
        self._pending: Pending = Done()
        self._absent: list[Tensor] = []
        self._absent_at: list[int] = []
        self._low, self._high = group.shard(inner.rank, inner.size)
        # Of the inner ranks' shards, and of the outer ranks' parts of this one, where they differ.
        self._lengths = group.sizes(inner.size) if sharding.state else ()
        self._outer_lengths = (
            group.sizes_within(inner.rank, inner.size, outer.size) if sharding.outer == "optim" else ()
        )
        if sharding.params:
            # The whole is allocated when it is gathered first. Its memory comes and goes, and graphs hold tensors in it: they all have to
            # share its storage.
            self.whole = torch.empty(0, dtype=group.dtype, device=device)
            self._pieces: list[Tensor] = []
            numel = self._high - self._low
            self.shard = (
                torch.zeros(numel, dtype=group.dtype, device=device)
                if copies is None
                else copies.allocate_on_host(numel, group.dtype)
            )
            # One element for each, so that who writes to one spoils no other.
            self._nan = [
                torch.full((min(place.spec.numel, 1),), torch.nan, dtype=group.dtype, device=device)
                for place in group.placements
            ]
            self._nan_bytes = bytes(torch.tensor([torch.nan], dtype=group.dtype).view(torch.uint8).tolist())
            self._absent = [
                nan.expand(place.spec.numel).view(place.spec.shape)
                for nan, place in zip(self._nan, group.placements, strict=True)
            ]
            self._absent_at = [tensor.data_ptr() for tensor in self._absent]
            self._offsets = [place.start * group.dtype.itemsize for place in group.placements]
        else:
            self.whole = torch.zeros(group.padded, dtype=group.dtype, device=device)
            self._pieces = [
                piece(self.whole, place.start, place.stop, torch.Size(place.spec.shape)) for place in group.placements
            ]
            self.shard = self._own_of_whole() if sharding.state else self.whole
        self.gathered = self.shown = not sharding.params
        self._versions = [0 for _ in self.parameters]

    # -- taking the model's tensors ------------------------------------------------------------------------------------------------

    def place_of(self, number: int) -> Tensor:
        """The tensor that the group's parameter ``number`` is while the model does not compute: its place in the buffer, or no values."""
        return self._absent[number] if self.sharding.params else self._pieces[number]

    def take(self, number: int) -> None:
        """Copy the values of the parameter ``number`` to where they are kept, and give the parameter its place for its memory."""
        tensor, place = self._tensors[number], self.group.placements[number]
        values = tensor.detach()
        if self.sharding.params:
            start, stop = max(place.start, self._low), min(place.stop, self._high)
            if start < stop:
                part = values.reshape(-1)[start - place.start : stop - place.start]
                self.shard[start - self._low : stop - self._low].copy_(part)
        else:
            self._pieces[number].copy_(values)
        del values
        streams.keep(tensor)  # which may have been made on another stream
        tensor.data = self.place_of(number)
        self.adopt(number)

    def adopt(self, number: int) -> None:
        """The parameter ``number`` is what :meth:`place_of` returns, from now on."""
        self._tensors[number] = local(self.parameters[number])
        if self.sharding.params:
            add_to_versions([self._tensors[number]], 1)  # which :meth:`wait` takes back
            hide([self.parameters[number]])
        self._versions[number] = version(self._tensors[number])

    @property
    def what(self) -> str:
        """The name of this buffer in error messages."""
        others = len(self.parameters) - 1
        return f"{self.group.placements[0].spec.name}" + (f" and {others} other parameters" if others else "")

    @property
    def own(self) -> Tensor:
        """The part that this rank's optimizer steps."""
        if self.sharding.outer != "optim":
            return self.shard
        return self.outer.parts(self.shard, self._outer_lengths)[self.outer.rank]

    @property
    def own_range(self) -> tuple[int, int]:
        """The elements of the group's buffer that this rank's optimizer steps."""
        return self.sharding.own_range(self.group, self.inner.rank, self.inner.size, self.outer.rank, self.outer.size)

    @property
    def nbytes(self) -> int:
        """The number of bytes that persist between steps."""
        return self.shard.nbytes if self.sharding.params else self.whole.nbytes

    # -- parameters that are sharded ----------------------------------------------------------------------------------------------

    def start_gather(self, communicator: Communicator) -> None:
        """Ask the other ranks for their parts; :meth:`wait` for them before computing.

        Raises:
            RuntimeError: A parameter was written to, or given other memory, while its values were not there.
        """
        if self.gathered or not self.sharding.params:
            return
        with plain_tensors():
            self._require_unwritten()
        for nan in self._nan:
            if not nan.is_cpu:
                nan.fill_(torch.nan)
        self._allocate()
        self.gathered = True
        self.gather_again(communicator)

    def _require_unwritten(self) -> None:
        self._require_in_place(absent=True)
        # Writes by way of .data count no version. The host would wait for another device to see them; there the next read is NaN again.
        kept = [not nan.is_cpu or string_at(nan.data_ptr(), nan.nbytes) in (self._nan_bytes, b"") for nan in self._nan]
        for parameter, known, is_kept, place in zip(
            self._tensors, self._versions, kept, self.group.placements, strict=True
        ):
            if version(parameter) != known or not is_kept:
                raise RuntimeError(
                    f"{place.spec.name}: was written to while its values were sharded, and there was nothing to write to; accepted is"
                    " inside `with stepper.full_parameters():`."
                )

    def wait(self) -> None:
        """Wait until the model's tensors have their values."""
        if not self.gathered or self.shown:
            return
        self._pending.wait()
        self._pending = Done()
        show(self.parameters)
        for parameter, tensor in zip(self._tensors, self._pieces, strict=True):
            parameter.data = tensor
        add_to_versions(self._tensors, -1)
        self._versions = [version(parameter) for parameter in self._tensors]
        self.shown = True

    def release(self) -> None:
        """Give the memory back.

        Raises:
            RuntimeError: A parameter was given other memory, whose values are lost.
        """
        if not self.gathered or not self.sharding.params:
            return
        pending, self._pending = self._pending, Done()
        shown, self.shown = self.shown, False
        try:
            if isinstance(pending, _Interrupted):
                pending.communicator.drain()
                if self._copies is not None:
                    self._copies.end(self.whole.device)
            else:
                pending.wait()
            if shown:
                self._require_in_place(absent=False)
                self._require_kept()
        finally:
            for parameter, tensor in zip(self._tensors, self._absent, strict=True):
                parameter.data = tensor
            if shown:
                # A graph that saved a view of the weights would read memory that is not there: torch looks at sizes of storages only
                # where an operation makes a new view, and at counts of writes always.
                add_to_versions(self._tensors, 1)
            self._versions = [version(parameter) for parameter in self._tensors]
            hide(self.parameters)
            self._free()
            self.gathered = False

    def _require_kept(self) -> None:
        """Refuse writes that would be lost: each rank keeps its shard, and what is gathered is a copy."""
        for parameter, known, place in zip(self._tensors, self._versions, self.group.placements, strict=True):
            if version(parameter) != known:
                raise RuntimeError(
                    f"{place.spec.name}: was written to during a pass, in a copy that is freed after it. Accepted is to write to it after"
                    " the step, inside `with stepper.full_parameters():`."
                )

    def _views(self) -> list[Tensor]:
        return [
            self.whole[place.start : place.stop].view(p.shape)
            for p, place in zip(self._tensors, self.group.placements, strict=True)
        ]

    @in_plain_mode
    def _allocate(self) -> None:
        if self._pieces:
            self._pool.refill(self.whole)
        else:
            self.whole = self._pool.empty(self.group.padded, self.group.dtype, self.whole.device)
            self._pieces = self._views()

    @in_plain_mode
    def _free(self) -> None:
        if can_be_freed(self.whole):
            self._pool.take_back(self.whole)
        else:
            # It stays with whoever holds on to it, or with a graph that was made with it; the next is another.
            self._pool.leave(self.whole)
            self.whole, self._pieces = self.whole.new_empty(0), []

    def reset(self) -> None:
        """Take the values from the model's tensors after an error, whatever was done to them."""
        if not self.sharding.params:
            return
        with suppress(Exception):  # what is wrong was told
            self.release()
        show(self.parameters)
        for parameter, tensor, nan in zip(self._tensors, self._absent, self._nan, strict=True):
            nan.fill_(torch.nan)
            parameter.data = tensor
        hide(self.parameters)
        self._absent_at = [tensor.data_ptr() for tensor in self._absent]
        self._versions = [version(parameter) for parameter in self._tensors]

    def gather_again(self, communicator: Communicator) -> Pending:
        """Start to gather the model's tensors again after a step, while they have their values."""
        # Until it is known to be under way: an error may come when it is already.
        self._pending = _Interrupted(communicator, self.what)
        if self._copies is None:
            self._pending = communicator.all_gather(self.whole, self.shard, self.what, self._lengths)
        else:
            own = self._own_of_whole()
            self._pending = self._copies.bring_for(
                own, self.shard, lambda: communicator.all_gather(self.whole, own, self.what, self._lengths)
            )
        return self._pending

    def keep_what_was_written(self) -> None:
        """Copy the model's tensors, while they have their values, to this rank's shard.

        Raises:
            RuntimeError: A parameter was given other memory.
        """
        self._require_in_place(absent=False)
        self.shard.copy_(self._own_of_whole())
        self._versions = [version(parameter) for parameter in self._tensors]

    def drop_writes(self) -> None:
        """What was written to the model's tensors is lost, and meant to be."""
        self._versions = [version(parameter) for parameter in self._tensors]

    def _own_of_whole(self) -> Tensor:
        return self.whole[self._low : self._high]

    def _require_in_place(self, *, absent: bool) -> None:
        start = 0 if absent else self.whole.data_ptr()
        expected = self._absent_at if absent else [start + offset for offset in self._offsets]
        for parameter, address, place in zip(self._tensors, expected, self.group.placements, strict=True):
            if parameter.data_ptr() != address and place.spec.numel:
                raise RuntimeError(MOVED.format(name=place.spec.name))

    # -- after a step -------------------------------------------------------------------------------------------------------------

    def start_spread(self) -> Pending:
        """Start to gather the stepped weights on the ranks that keep copies of them."""
        if self.sharding.outer == "optim":
            return self.outer.all_gather(self.shard, self.own, self.what, self._outer_lengths)
        if self.sharding.state and not self.sharding.params:
            return self.inner.all_gather(self.whole, self.shard, self.what, self._lengths)
        return Done()

    def stepped(self) -> None:
        """Autograd did not see that the values changed; a graph that needs the old ones must not run."""
        torch.autograd.graph.increment_version(self.parameters)
        torch.autograd.graph.increment_version([x for x in self._tensors if not isinstance(x, nn.Parameter)])
        self._versions = [version(parameter) for parameter in self._tensors]
