"""The plan of a sharded model: persistent, transient and sent bytes of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everybit_torch.planning.whole_tensors import WholeTensors
from everybit_torch.sharded.strategies import Sharding


@dataclass(frozen=True, slots=True)
class Ranks:
    """The numbers of inner and outer ranks, and the rank that is planned."""

    inner: int = 1
    outer: int = 1
    inner_rank: int = 0
    outer_rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The persistent, transient and sent bytes of one rank.

    Attributes:
        sharding: The tensors that are sharded.
        ranks: The ranks over which it is sharded.
        parameters: Elements of the whole model.
        padding: Elements of all buffers that belong to no parameter.
        persistent: Bytes between steps, by use: ``parameters``, ``compensation`` or ``main parameters``, ``gradients``, each slot
            (``momentum``, ``variance``), ``counters``, ``bookkeeping``.
        transient: The largest temporaries on top of the persistent bytes, by phase: in ``forward`` the weights that FSDP2 gathers; in
            ``backward`` gradients under way, of all buffers at once; in ``step`` the temporaries of one piece. Under
            ``optim_grads_params`` FSDP2 allocates most of them, and they are estimates.
        wire: Bytes sent in one step, by collective: ``reduce_scatter``, ``all_gather``, ``all_reduce``, ``all_to_all``. Numbers that a
            transform requests of all ranks, some bytes, are not counted.
        microbatches: Backward passes in one step.
        weights: Elements of the whole model by the format of their weights, as code; ``"frozen"`` for frozen parameters.
        whole_tensors: How evenly tensors that must stay whole are distributed over the ranks; None without such tensors, or if no tensor is
            sharded.
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
    whole_tensors: WholeTensors | None = field(default=None)

    @property
    def persistent_bytes(self) -> int:
        """The sum of all bytes that persist between steps."""
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
    def bytes_per_param(self) -> float:
        """Persistent bytes of this rank for each element of the whole model."""
        return self.persistent_bytes / self.parameters

    def __str__(self) -> str:
        outer = f" x {self.ranks.outer} outer ({self.sharding.outer})" if self.ranks.outer > 1 else ""
        title = (
            f"{self.sharding.strategy}, {self.ranks.inner} rank{'s' * (self.ranks.inner > 1)}{outer}: {self.parameters:,} parameters,"
            f" {self.bytes_per_param:.3f} bytes each on this rank"
        )
        rows = [("persistent", "", self.persistent_bytes)]
        rows += [("", name, size) for name, size in self.persistent.items()]
        rows += [("transient", "about" if self.sharding.params else "at most", max(self.transient.values()))]
        rows += [("", name, size) for name, size in self.transient.items()]
        rows += [("wire", f"a step of {self.microbatches} microbatch{'es' * (self.microbatches > 1)}", self.wire_bytes)]
        rows += [("", name, size) for name, size in self.wire.items()]
        lines = [f"  {kind:<11}{name:<24}{size:>20,} bytes" for kind, name, size in rows]
        formats = [
            f"  {'' if number else 'weights':<11}{name:<36}{count:>12,} elements"
            for number, (name, count) in enumerate(self.weights.items())
        ]
        even = [] if self.whole_tensors is None else [f"  {self.whole_tensors}"]
        return "\n".join([title, *formats, *lines, *even])


_FIRST = ("parameters", "main parameters", "compensation", "gradients")
_LAST = ("counters", "bookkeeping")


def in_order(persistent: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by use: first the model's, then the optimizer's, then those beside them."""
    slots = [name for name in persistent if name not in (*_FIRST, *_LAST)]
    first = [name for name in _FIRST if persistent.get(name)]
    return {name: persistent.get(name, 0) for name in (*first, *slots, *_LAST)}
