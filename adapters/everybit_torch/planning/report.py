"""The plan of a sharded model: persistent, transient and sent bytes of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from everybit.policies import Resolved
from everybit.stepping import OptimizerState, nbytes, state_bytes
from everybit_torch.flat import Buffer
from everybit_torch.segments import Segment, staging_bytes
from everybit_torch.sharded.options import StepperOptions
from everybit_torch.sharded.strategies import Sharding


@dataclass(frozen=True, slots=True)
class Ranks:
    """The numbers of inner and outer ranks, and the rank that is planned."""

    inner: int = 1
    outer: int = 1
    inner_rank: int = 0
    outer_rank: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A training run that is planned.

    Attributes:
        kind: The tensors that are sharded.
        ranks: The numbers of ranks, and the planned rank.
        microbatches: Backward passes in a step.
        metrics: Whether steps are measured.
        compile: Whether they are compiled.
        device: On which they are.
        watched: Whether changes of weights are noted.
        offloaded: Whether state lies in the host's memory.
    """

    kind: Sharding
    ranks: Ranks
    microbatches: int
    metrics: bool
    compile: bool
    device: torch.device
    watched: bool
    offloaded: bool

    @classmethod
    def of(
        cls, options: StepperOptions, ranks: Ranks, microbatches: int, device: torch.device, *, metrics: bool
    ) -> PlannedRun:
        """Return the run of a stepper with these options."""
        watched, offloaded = options.watch is not None, options.offload is not None
        return cls(options.sharding, ranks, microbatches, metrics, options.compile, device, watched, offloaded)


@dataclass(frozen=True, slots=True)
class WholeShares:
    """How whole tensors are distributed over the ranks that step different parameters, numbered as in the mesh.

    Attributes:
        tensors: How many there are.
        work: The work of each rank, by the transform's own account: multiply-adds of Muon's iteration, or else elements.
        elements: The elements of each rank.
    """

    tensors: int
    work: tuple[float, ...]
    elements: tuple[int, ...]

    @property
    def without(self) -> list[int]:
        """The ranks without whole tensors."""
        return [rank for rank, numel in enumerate(self.elements) if not numel]

    @property
    def fullest(self) -> int:
        """The rank with the most elements, and of several that with the most work."""
        return max(range(len(self.elements)), key=lambda rank: (self.elements[rank], self.work[rank], -rank))

    @property
    def imbalance(self) -> float:
        """The work of the rank with the most, over the mean: how much longer all ranks take than if the work were even."""
        return max(self.work) * len(self.work) / sum(self.work)

    def __str__(self) -> str:
        ranks, fullest = len(self.elements), max(self.elements) * len(self.elements) / sum(self.elements)
        return (
            f"{self.tensors:,} whole tensors on {ranks:,} ranks, {len(self.without):,} of which have none; of the mean, the busiest"
            f" rank has {self.imbalance:.2f} times the work and the fullest {fullest:.2f} times the elements"
        )


def distribution(buffers: Sequence[Buffer], ranks: int) -> WholeShares | None:
    """Return the distribution of the whole tensors of a layout over so many ranks; None without whole tensors."""
    work, elements = [0.0] * ranks, [0] * ranks
    owned = [(buffer, place) for buffer in buffers for place in buffer.places if place.spec.is_whole and place.numel]
    for rank in range(ranks):
        for buffer, place in owned:
            if place.within(buffer.share(rank)).numel:
                work[rank] += place.spec.cost or place.numel
                elements[rank] += place.numel
    return WholeShares(len(owned), tuple(work), tuple(elements)) if owned else None


@dataclass(frozen=True, slots=True)
class Plan:
    """The persistent, transient and sent bytes of one rank.

    Attributes:
        sharding: The tensors that are sharded.
        ranks: The ranks over which it is sharded.
        parameters: Elements of the whole model.
        padding: Elements of all buffers that belong to no parameter.
        persistent: Bytes between steps, by use: ``parameters``, ``compensation`` or ``main parameters``, ``gradients``, each slot
            (``momentum``, ``variance``), ``changed`` with ``watch``, ``counters``, ``bookkeeping``. With ``offload`` there is ``staging``,
            the memory for two pieces of state, in place of slots and residuals. Of parameters that visit owners it is an estimate.
        transient: The largest temporaries on top of the persistent bytes, by phase: in ``forward`` the weights that FSDP2 gathers; in
            ``backward`` gradients under way, of all buffers at once; in ``step`` the temporaries of one piece. Under
            ``optim_grads_params`` FSDP2 allocates most of them, and they are estimates.
        wire: Bytes sent in one step, by collective: ``reduce_scatter``, ``all_gather``, ``all_reduce``, ``all_to_all``. Numbers that a
            transform requests of all ranks, some bytes, are not counted.
        microbatches: Backward passes in one step.
        weights: Elements of the whole model by the format of their weights, as code; ``"frozen"`` for frozen parameters.
        whole_tensors: How evenly tensors that must stay whole are distributed over the ranks; None without such tensors, or if no tensor is
            sharded.
        host: Bytes in the host's memory, by use: with ``offload`` slots and residuals.
    """

    sharding: Sharding
    ranks: Ranks
    parameters: int
    padding: int
    persistent: Mapping[str, int]
    transient: Mapping[str, int]
    wire: Mapping[str, int]
    microbatches: int = field(default=1)
    weights: Mapping[str, int] = field(default_factory=dict)
    whole_tensors: WholeShares | None = field(default=None)
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def persistent_bytes(self) -> int:
        """The sum of all bytes that persist between steps, without those of ``host``."""
        return sum(self.persistent.values())

    @property
    def peak_bytes(self) -> int:
        """The peak of all allocated bytes."""
        return self.persistent_bytes + max(self.transient.values())

    @property
    def wire_bytes(self) -> int:
        """The sum of all bytes that are sent in a step."""
        return sum(self.wire.values())

    @property
    def host_bytes(self) -> int:
        """The sum of all bytes in the host's memory."""
        return sum(self.host.values())

    @property
    def bytes_per_param(self) -> float:
        """Persistent bytes of this rank for each element of the whole model."""
        return self.persistent_bytes / self.parameters

    def __str__(self) -> str:
        outer = f" x {self.ranks.outer} outer ({self.sharding.outer})" if self.ranks.outer > 1 else ""
        lines = [
            f"{self.sharding.strategy}, {self.ranks.inner} rank{'s' * (self.ranks.inner > 1)}{outer}: {self.parameters:,} parameters,"
            f" {self.bytes_per_param:.3f} bytes each on this rank"
        ]
        for number, (name, count) in enumerate(self.weights.items()):
            lines.append(f"  {'' if number else 'weights':<11}{name:<36}{count:>12,} elements")
        most, how = max(self.transient.values()), "about" if self.sharding.params else "at most"
        a_step = f"a step of {self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        for kind, note, total, parts in (
            ("persistent", "", self.persistent_bytes, self.persistent),
            ("transient", how, most, self.transient),
            ("wire", a_step, self.wire_bytes, self.wire),
            *([("host", "", self.host_bytes, self.host)] if self.host else []),
        ):
            rows = [(kind, note, total), *(("", name, size) for name, size in parts.items())]
            lines += [f"  {kind:<11}{name:<24}{size:>20,} bytes" for kind, name, size in rows]
        return "\n".join([*lines, *([] if self.whole_tensors is None else [f"  {self.whole_tensors}"])])


def in_order(persistent: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by use: first the model's, then the optimizer's, then those beside them."""
    first, last = ("parameters", "main parameters", "compensation", "gradients"), ("counters", "bookkeeping")
    slots = [name for name in persistent if name not in (*first, *last)]
    named = [*(name for name in first if persistent.get(name)), *slots, *last]
    return {name: persistent.get(name, 0) for name in named}


def placed(
    persistent: Counter[str], state: Counter[str], segments: Iterable[Segment], run: PlannedRun
) -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes by use, where the model lies and in the host's memory.

    Args:
        persistent: Without the state.
        state: Those of the state.
        segments: The rank's; may be on the meta device.
        run: Says whether state lies in the host's memory.
    """
    if not run.offloaded:
        return in_order({**state, **persistent}), {}
    host = {name: size for name, size in state.items() if size and name != "counters"}
    staging = staging_bytes(segments)
    return in_order({**persistent, "staging": staging, "counters": state["counters"]}), host


def kept_by(state: OptimizerState[Any], formats: Resolved) -> Counter[str]:
    """Bytes of a state by use, without weights."""
    is_main = any(part.name == "main" for part in formats.params.parts())
    found = Counter({"main parameters" if is_main else "compensation": nbytes(state.extra)})
    found.update(state_bytes(state.inner, counters=state.step.nbytes))
    return found
