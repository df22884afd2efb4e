"""Gives a model to a stepper: carries out the events of :mod:`..scheduling.construction` on the stepper's buffers.

A model that has its values hands its memory over tensor by tensor. One on the meta device is given memory, and values from a source, so
that a rank never has more of it than what it keeps, and what one initializer uses. Whatever fails on the way, on any rank, such a model is
on the meta device again, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from everybit_torch import notices
from everybit_torch.collectives.communicator import Communicator
from everybit_torch.dtensors import local
from everybit_torch.sharded.agreement import Everyone
from everybit_torch.sharded.construction.first_rank import FirstRank
from everybit_torch.sharded.construction.fitting import require_fit, widest_dtype
from everybit_torch.sharded.construction.initializers import (
    Initializer,
    buffer_initializers,
    calls_of,
    initializers_of,
)
from everybit_torch.sharded.construction.initializing import fingerprint, initialize, require_written, seeded, spoil
from everybit_torch.sharded.construction.main_weights import store
from everybit_torch.sharded.construction.reading import Request, Source
from everybit_torch.sharded.construction.safetensors_files import SafetensorsFiles
from everybit_torch.sharded.construction.schedule import ConstructionSchedule, chunk_of, names_in_parts
from everybit_torch.sharded.construction.sources import (
    FromCheckpoint,
    FromInitializers,
    FromSafetensors,
    FromStateDict,
    Values,
)
from everybit_torch.sharded.construction.tensors import Memory, ModelTensor, StandIns, tensors_of
from everybit_torch.sharded.fingerprint import Facts, require_alike
from everybit_torch.sharded.layout import Group
from everybit_torch.sharded.model_buffers import ModelBuffers, synchronize_values
from everybit_torch.sharded.model_layout import ModelLayout
from everybit_torch.sharded.model_parallel import ModelParallel
from everybit_torch.sharded.scheduling.construction import ConstructionEvent, ConstructionKind, Tensors
from everybit_torch.sharded.shard_optimizer import ShardOptimizer
from everybit_torch.sharded.tensor_parallel import part_beside
from everybit_torch.sharded.whole_tensors import cut


class Construction:
    """How one model is given to a stepper.

    Args:
        model: The model.
        described: The same.
        values: Where its values come from; None: it has them.
        device: Where it is to be.
        ranks: The inner and the outer ranks.
        beside: The ranks that hold other parts of the model.
        synchronize: Send the first rank's values to all others, where the model has values.

    Attributes:
        facts: What has to be the same on every rank.
        schedule: The events; known when the buffers are filled.

    Raises:
        OSError: The source cannot be read.
        TypeError: A source of the wrong kind.
        ValueError: It cannot work; nothing is changed then.
    """

    def __init__(
        self,
        model: nn.Module,
        described: ModelLayout,
        values: Values | None,
        device: torch.device,
        ranks: tuple[Communicator, Communicator],
        beside: ModelParallel,
        *,
        synchronize: bool,
    ) -> None:
        self._model, self._synchronize, self._beside = model, synchronize, beside
        self._everyone = Everyone(*reversed(beside.of_tensors), *ranks)
        self._stand_ins = StandIns(model)
        self._described, self._device, self._ranks = described, device, ranks
        self._values = values
        self._tensors: list[ModelTensor] = []
        self._initializers: list[Initializer] = []
        self._source: Source | None = None
        self._memory = Memory()
        self._absent: dict[int, str] = {}
        self._later: set[int] = set()
        self.schedule: ConstructionSchedule
        self._drawn: list[tuple[str, str]] = []
        self.facts: Facts = [("values", "the model's" if values is None else type(values).__name__)]
        if values is None:
            return
        self._tensors = tensors_of(model, described)
        self._memory.require_possible(self._tensors)
        if isinstance(values, FromInitializers):
            self._initializers = initializers_of(model, described.units, self._tensors, values)
            self.facts = [*self.facts, ("values.seed", repr(values.seed))]
            return
        self._initializers = buffer_initializers(model, self._tensors, values.buffers, type(values).__name__)
        self._source = self._open(values)
        if not isinstance(self._source, FirstRank):
            self._require_fit()
            table = self._source.table
            self.facts = [*self.facts, ("values", f"{ {name: table[name] for name in sorted(table)} }")]

    def _open(self, values: FromSafetensors | FromCheckpoint | FromStateDict) -> Source:
        if isinstance(values, FromSafetensors):
            return SafetensorsFiles(values.path)
        if isinstance(values, FromCheckpoint):
            # Torch's distributed checkpoints are imported by who reads one: they take longer than torch.distributed.
            from everybit_torch.sharded.construction.checkpoints import CheckpointFiles

            found = CheckpointFiles(values.path, values.prefix, self._tensors[0].names)
            if not found.is_checked and self._everyone.is_first:
                notices.warn(
                    f"{found.where}: has no checksums (it was written by dcp.save), so that nothing can be verified: bits that have changed"
                    " since it was written are taken over as they are."
                )
            if found.others:
                raise ValueError(
                    f"values: {found.where}: {', '.join(sorted(found.others))}: no tensor; accepted are tensors."
                )
            return found
        given = FirstRank(values.state_dict, self._everyone)
        given.require_ties([one.names for one in self._tensors])
        return given

    def _require_fit(self) -> None:
        assert self._source is not None
        require_fit(self._tensors, self._described.labelled, self._source.table, self._source.where)

    def meet(self) -> None:
        """Find out on all ranks what the first one has, if that is where values come from. Every rank has to call it.

        Raises:
            ValueError: It does not fit, which all ranks say.
        """
        if isinstance(self._source, FirstRank):
            self._on_all(self._meet)

    def _meet(self) -> None:
        assert isinstance(self._source, FirstRank)
        self._source.meet()
        self._require_fit()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """If what is done inside fails, a model that was on the meta device is there again."""
        try:
            yield
        except BaseException:
            self._stand_ins.end_all()
            self._memory.take_back()
            raise
        self._memory.keep()

    def _on_all(self, function: Callable[[], object]) -> None:
        """Call a function on every rank; if it fails on one, or for one part of the model, all ranks raise.

        Raises:
            RuntimeError: It failed on another rank.
            ValueError: Initializers made other values on other ranks.
        """
        refused: Exception | None = None
        try:
            function()
        except Exception as error:
            refused = error
        alone = Communicator(None)
        # Whole tensors are initialized, so that tensor-parallel ranks have the same values too; other parts have other tensors.
        compared: list[tuple[Facts, Communicator, Communicator]] = [(self._drawn, *self._ranks)]
        compared += [(self._drawn, one, alone) for one in self._beside.of_tensors]
        compared += [((), one, alone) for one in self._beside.given]
        for facts, inner, outer in compared:
            try:
                require_alike(refused or facts, inner, outer)
            except Exception as error:
                refused = refused or error
        if refused is not None:
            raise refused

    # -- weights -------------------------------------------------------------------------------------------------------------------

    def fill(self, buffers: ModelBuffers) -> None:
        """Allocate the buffers of weights, and have them take the model's values, as far as they are not read in :meth:`finish`."""
        names = [spec.name for spec in self._described.specs]
        tensors = Tensors(
            buffers.layout, buffers.sharding, names, max(len(self._tensors) - len(names), 0), names_in_parts(self._described)
        )  # fmt: skip
        if self._source is not None:
            self._later = self._wide(buffers)
        schedule = self.schedule = ConstructionSchedule(
            tensors,
            given=self._values is None,
            reads=self._source is not None,
            calls=calls_of(self._initializers),
            later=sorted(self._later),
            chunk=chunk_of(self._values),
        )
        events = schedule.events()
        handlers: dict[ConstructionKind, Callable[[int], None]] = {
            "lay out": lambda number: self._lay_out(buffers, number),
            "materialize": self._materialize,
            "place": lambda number: self._place(buffers, tensors, number),
            "stand in": self._stand_in,
            "initialize": self._initialize,
            "cut": lambda number: self._cut(buffers, tensors, number),
            "take": lambda number: self._take(buffers, tensors, number),
            "settle": self._settle,
            "read": lambda number: self._read(buffers, number),
            "read others": lambda _: self._read_others(tensors),
        }
        if self._values is None:
            if self._synchronize:
                synchronize_values(self._model, (self._ranks[1], self._ranks[0]), self._described.parameters)
            self._carry_out(events, handlers)
            return
        seed = self._values.seed if isinstance(self._values, FromInitializers) else 0
        with seeded(seed, self._device):
            self._on_all(lambda: self._carry_out(events, handlers))
        for one in self._tensors:
            self._move(one)

    @staticmethod
    def _carry_out(
        events: Iterator[ConstructionEvent], handlers: Mapping[ConstructionKind, Callable[[int], None]]
    ) -> None:
        for event in events:
            handlers[event.kind](event.number)

    @staticmethod
    def _lay_out(buffers: ModelBuffers, number: int) -> None:
        buffers.lay_out(number)

    def _materialize(self, number: int) -> None:
        one = self._tensors[number]
        if one.is_absent:
            self._give(one, torch.empty_like(local(one.tensor), device=self._device, requires_grad=False))
        elif self._source is not None and any(name in self._source.table for name in one.names):
            # A copy: what is read is not written over the model's own values, which it has again if something fails.
            self._give(one, local(one.tensor).detach().to(self._device, copy=True))
        else:
            self._move(one)

    def _move(self, one: ModelTensor) -> None:
        """A buffer that has its values is where the model is to be."""
        if not one.is_absent and one.tensor.device.type != self._device.type:
            self._give(one, local(one.tensor).detach().to(self._device))

    def _place(self, buffers: ModelBuffers, tensors: Tensors, number: int) -> None:
        weights = buffers.weights[tensors.group_of[number]]
        member = tensors.members[tensors.group_of[number]].index(number)
        self._give(self._tensors[number], weights.place_of(member))
        weights.adopt(member)

    def _give(self, one: ModelTensor, memory: Tensor) -> None:
        self._memory.give(one.tensor, memory.detach())
        if one.is_absent and (self._source is None or not one.is_saved):
            spoil(local(one.tensor).detach())

    def _stand_in(self, number: int) -> None:
        one = self._tensors[number]
        whole = torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device=self._device)
        spoil(whole)
        self._stand_ins.begin(one, whole)

    def _cut(self, buffers: ModelBuffers, tensors: Tensors, number: int) -> None:
        """Keep this rank's part of what was initialized whole."""
        one = self._tensors[number]
        assert one.spec is not None
        assert one.spec.part is not None
        part = one.spec.part
        whole = self._stand_ins.end(one)
        self._look_at(number, whole)
        if not tensors.is_in_buffer(number):
            memory = torch.empty(part.sizes, dtype=whole.dtype, device=whole.device)
            cut(whole, part, 0, part.numel, memory.view(-1))
            self._memory.give(one.tensor, memory)
            return
        weights = buffers.weights[tensors.group_of[number]]
        member = tensors.members[tensors.group_of[number]].index(number)
        place = weights.group.placements[member]
        low, high = (0, weights.group.padded)
        if tensors.sharded:
            low, high = weights.group.shard(weights.inner.rank, weights.inner.size)
            address = weights.place_of(member).untyped_storage().data_ptr()
            self._absent[address] = one.name
        kept = weights.shard if tensors.sharded else weights.whole
        start, stop = max(place.start, low), min(place.stop, high)
        if start < stop:
            cut(whole, part, start - place.start, stop - place.start, kept[start - low : stop - low])
        self._memory.give(one.tensor, weights.place_of(member))
        weights.adopt(member)

    def _initialize(self, number: int) -> None:
        one = self._initializers[number]
        advice = "accepted are functions that use the buffers of their own module alone."
        if isinstance(self._values, FromInitializers):
            advice = (
                "accepted are initializers that use the tensors of their own module (FromInitializers(function, whole_units=True): of their"
                " unit)."
            )
        initialize(one, self._absent, advice)

    def _take(self, buffers: ModelBuffers, tensors: Tensors, number: int) -> None:
        group = tensors.group_of[number]
        member = tensors.members[group].index(number)
        if self._values is not None:
            self._settle(number)
            address = buffers.weights[group].place_of(member).untyped_storage().data_ptr()
            self._absent[address] = self._tensors[number].name
        buffers.weights[group].take(member)

    def _settle(self, number: int) -> None:
        """A tensor has its values: they are looked at."""
        self._look_at(number, self._tensors[number].tensor)

    def _look_at(self, number: int, values: Tensor) -> None:
        one = self._tensors[number]
        require_written(one, values, next(call for call in reversed(self._initializers) if number in call.uses))
        self._drawn.append((f"the initial values of {one.name}", fingerprint(values)))

    # -- reading -------------------------------------------------------------------------------------------------------------------

    def _wide(self, buffers: ModelBuffers) -> set[int]:
        """The groups of which some parameter is read with more bits than its dtype has."""
        assert self._source is not None
        table = self._source.table
        return {
            number
            for number, group in enumerate(buffers.layout.groups)
            for place in group.placements
            if group.requires_grad
            and torch.promote_types(next(table[n].dtype for n in place.spec.names if n in table), group.dtype)
            is not group.dtype
        }

    def _read(self, buffers: ModelBuffers, number: int) -> None:
        weights = buffers.weights[number]
        self._deliver(weights.group, buffers.own_range(weights.group), weights.own)

    def _deliver(self, group: Group, own: tuple[int, int], into: Tensor) -> None:
        """Have the source write elements ``own`` of a group's buffer into a tensor."""
        assert self._source is not None
        low, high = own
        requests = []
        for place in group.placements:
            start, stop = max(place.start, low), max(min(place.stop, high), max(place.start, low))
            stop = max(start, stop)
            part = into[start - low : stop - low] if start < stop else into[:0]
            start, stop = (start, stop) if start < stop else (place.start, place.start)
            requests.append(Request(place.spec.names, start - place.start, stop - place.start, part, place.spec.part))
        self._source.deliver(requests)

    def _read_others(self, tensors: Tensors) -> None:
        """Read whole tensors that are in no buffer: buffers of the model, and frozen parameters that are on every rank."""
        assert self._source is not None
        others = [
            one
            for number, one in enumerate(self._tensors)
            if one.is_saved
            and not tensors.is_in_buffer(number)
            and any(name in self._source.table for name in one.names)
        ]
        for one in others:
            values = local(one.tensor).detach()
            flat = (
                values.view(-1)
                if values.is_contiguous()
                else torch.empty(values.numel(), dtype=values.dtype, device=values.device)
            )
            part = part_beside(one.tensor, None)
            self._source.deliver([Request(one.names, 0, values.numel(), flat, part)])
            if not values.is_contiguous():
                values.copy_(flat.view(values.shape))

    # -- what has more bits than the model -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, buffers: ModelBuffers, optimizer: ShardOptimizer, hand_out: Callable[[], Any]) -> None:
        """Read what has more bits than the model's dtype, to the main weights too; and hand out weights that ranks have read for others.

        Args:
            buffers: That were filled.
            optimizer: With its first state.
            hand_out: Hands out this rank's part of the weights to the ranks that keep copies.
        """
        if self._source is None:
            return
        self._on_all(lambda: self._read_later(buffers, optimizer))
        hand_out()

    def _read_later(self, buffers: ModelBuffers, optimizer: ShardOptimizer) -> None:
        for number in sorted(self._later):
            weights = buffers.weights[number]
            low, high = buffers.own_range(weights.group)
            staged = torch.zeros(high - low, dtype=self._staged_dtype(weights.group), device=self._device)
            self._deliver(weights.group, (low, high), staged)
            store(optimizer, next(one for one in optimizer.shards if one.weights is weights), staged)
            del staged

    def _staged_dtype(self, group: Group) -> torch.dtype:
        labelled = self._described.labelled
        found = [widest_dtype(place.spec, labelled, group.dtype) for place in group.placements]
        return found[0]
