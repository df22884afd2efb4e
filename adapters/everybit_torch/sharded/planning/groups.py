"""The bytes of one group of parameters on one rank: its persistent bytes, and its transient ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import everybit as eb
from everybit.base import dtype_name, torch_dtype
from everybit.policies import Resolved, resolve
from everybit.stepping import nbytes, state_bytes
from everybit_torch.collectives.reduction import Wire, chunk_size
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.layout import Group, ParameterSpec
from everybit_torch.sharded.planning.report import Ranks
from everybit_torch.sharded.planning.runs import Shape, indices, state_of
from everybit_torch.sharded.shard_optimizer import contiguous_runs
from everybit_torch.sharded.squares import scratch_bytes
from everybit_torch.sharded.strategies import Sharding
from everybit_torch.units import laid_out, numbered_by_block


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One group of a layout on one rank.

    Attributes:
        group: Of the layout.
        kind: What is sharded.
        ranks: How many ranks there are, and which one this is.
        low: The first element that this rank steps.
        high: The element after the last one.
        resolved: How everything is stored; None for frozen parameters.
        main: dtype of the main gradient.
        wire: How gradients are sent between the inner ranks.
        outer_wire: How they are sent between the outer ranks.
        device: Where it lies.
        fused: Whether what an exact wire has received is added up by compiled code.
        given_runs: The shape of each run that is stepped, where they are known; else they follow from the layout.
    """

    group: Group
    kind: Sharding
    ranks: Ranks
    low: int
    high: int
    resolved: Resolved | None
    main: torch.dtype
    wire: Wire
    outer_wire: Wire
    device: torch.device
    fused: bool
    given_runs: tuple[Shape, ...] | None = None

    @classmethod
    def of(
        cls,
        group: Group,
        labelled: Mapping[str, LabelledTransform],
        kind: Sharding,
        ranks: Ranks,
        device: torch.device,
        *,
        compile: bool,
    ) -> GroupPlan:
        """The group under what its label is stored as.

        Raises:
            ValueError: The policy cannot store it; the message says why.
        """
        fused = compile and device.type not in ("cpu", "meta")
        low, high = group.shard(ranks.inner_rank, ranks.inner) if kind.state else (0, group.padded)
        if not group.requires_grad:
            nothing = Wire(group.dtype, exact=False)
            return cls(group, kind, ranks, low, high, None, group.dtype, nothing, nothing, device, fused)
        resolved = resolve(labelled[group.label].policy, dtype_name(group.dtype, field="parameter"))
        return cls(
            group, kind, ranks, low, high, resolved, torch_dtype(resolved.grads_main),
            *Wire.pair(resolved, ranks.inner, ranks.outer), device, fused,
        )  # fmt: skip

    @property
    def chunk(self) -> int:
        """Elements converted at a time."""
        return chunk_size(self.device)

    @property
    def weights(self) -> int:
        """Bytes of the whole group's weights."""
        return self.group.padded * self.group.dtype.itemsize

    @property
    def part(self) -> int:
        """Elements of this inner rank's part: of its shard, or where nothing is sharded of an equal part."""
        if not self.kind.state:
            return self.group.padded // self.ranks.inner
        low, high = self.group.shard(self.ranks.inner_rank, self.ranks.inner)
        return high - low

    @property
    def main_numel(self) -> int:
        """Elements of the main gradient on this rank."""
        return self.part if self.kind.grads else self.group.padded

    @property
    def main_bytes(self) -> int:
        """Bytes of the main gradient on this rank; 0 for frozen parameters."""
        return 0 if self.resolved is None else self.main_numel * self.main.itemsize

    @property
    def bucket(self) -> int:
        """Bytes of the gradients that are sent, in the dtype of the wire."""
        return self.group.padded * self.wire.dtype.itemsize

    @property
    def received(self) -> int:
        """Bytes that an exact wire receives beside them."""
        return self.ranks.inner * self.part * self.wire.dtype.itemsize if self.wire.exact else 0

    @property
    def counts(self) -> bool:
        """Whether this rank finds the sum of the squares of what it steps; of ranks that hold copies the first one does."""
        return (self.kind.state or self.ranks.inner_rank == 0) and self.ranks.outer_rank == 0

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part of what this one steps, so that reductions go over this rank only."""
        return not self.kind.state or self.ranks.inner == 1

    @property
    def stepped(self) -> int:
        """Elements of the main gradient that this rank steps, up to the last one that is a parameter's."""
        slices = list(self.group.slices(self.low, self.high))
        return slices[-1].offset + slices[-1].high - slices[-1].low if slices else 0

    def squares_as_written(self, device: torch.device) -> int | None:
        """Bytes in which squares are added up while the main gradient is written; None where they are found in the step."""
        if self.resolved is None or not self.kind.grads or self.ranks.outer > 1 or device.type not in ("cpu", "meta"):
            return None
        return scratch_bytes(self.stepped, self.main, device)

    @property
    def whole(self) -> bool:
        """Whether each run is a whole tensor, or a batch of parts of one."""
        return any(place.spec.whole for place in self.group.placements)

    def runs(self, labelled: Mapping[str, LabelledTransform]) -> list[Shape]:
        """The shape of each run that is stepped: of elements of several parameters, or of a whole tensor."""
        if self.given_runs is not None:
            return list(self.given_runs)
        slices = list(self.group.slices(self.low, self.high))
        if self.whole:
            return [s.placement.spec.stepped_as(s.low, s.high) for s in slices] or [(0,)]
        own, block = labelled[self.group.label], labelled[self.group.label].policy.block
        runs = contiguous_runs(slices, by_index=own.draws_bits, block=block)
        return [(laid_out([slices[number].high - slices[number].low for number in run], block)[1],) for run in runs]

    def block(self, labelled: Mapping[str, LabelledTransform]) -> int:
        """Elements of a block, where each block of the runs has an index of its own; else 0."""
        slices, block = list(self.group.slices(self.low, self.high)), labelled[self.group.label].policy.block
        lengths, firsts = [s.high - s.low for s in slices], [s.placement.spec.index + s.low for s in slices]
        apart = not self.whole and numbered_by_block(lengths, firsts, laid_out(lengths, block)[1], block)
        return block if apart else 0

    def members(
        self, labelled: Mapping[str, LabelledTransform], numbers: Mapping[ParameterSpec, int]
    ) -> list[eb.Members]:
        """Return the parameters in each run, by their numbers; of a label whose transform asks for them."""
        slices = iter(self.group.slices(self.low, self.high))
        sizes = torch.tensor([spec.numel for spec in numbers], dtype=torch.float64)
        block = 1 if self.whole else labelled[self.group.label].policy.block
        found = []
        for shape in self.runs(labelled):
            here: list[int] = []
            lengths: list[int] = []
            while laid_out(lengths, block)[1] < math.prod(shape):
                one = next(slices)
                here.append(numbers[one.placement.spec])
                lengths.append(one.high - one.low)
            edges = torch.tensor([*laid_out(lengths, block)[0], math.prod(shape)])
            found.append(eb.Members(torch.tensor(here, dtype=torch.int64), edges, sizes))
        return found

    def persistent(self, labelled: Mapping[str, LabelledTransform]) -> Counter[str]:
        """Bytes that are kept between steps, by use."""
        found: Counter[str] = Counter()
        found["parameters"] = self.weights if self.group.requires_grad else self.group.numel * self.group.dtype.itemsize
        if self.resolved is None:
            return found
        found["gradients"] = self.main_numel * self.main.itemsize
        optimizer = eb.Optimizer(labelled[self.group.label].transform, labelled[self.group.label].policy)
        beside = (
            "main parameters" if any(part.name == "main" for part in self.resolved.params.parts()) else "compensation"
        )
        for shape in self.runs(labelled):
            state = state_of(optimizer, self.group.dtype, shape)
            found[beside] += nbytes(state.extra)
            found.update(state_bytes(state.inner, counters=state.step.nbytes))
            first = indices(shape, self.block(labelled))
            found["bookkeeping"] += torch.int64.itemsize if isinstance(first, int) else nbytes(first)
        return found
