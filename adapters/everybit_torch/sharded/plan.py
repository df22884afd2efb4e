"""Where memory goes, to the byte, and what travels: predicted from names, shapes and dtypes, before anything is allocated.

Persistent bytes are the sums of what is kept. Transient bytes follow the stepper through a forward pass, a backward pass and a step, as
it allocates and frees; what a step computes on the way is found by stepping one piece of a buffer. Tensors of one element that come and
go are left out, and so are activations and the gradients that autograd holds: one parameter's at a time.

Bytes on the wire are what one rank sends, as a ring sends it. For ``n`` ranks, weights of ``w`` bytes in all, gradients of ``c`` bytes in
the wire's dtype, and ``k`` microbatches, up to the padding:

====================  ===============================================================
strategy              sent by each rank in a step, in units of ``(n - 1) / n``
====================  ===============================================================
no_shard              ``2 c``
optim                 ``c + w``
optim_grads           ``k c + w``
optim_grads_params    ``k (c + 2 w)``, without ``reshard_after_forward`` ``k (c + w)``
====================  ===============================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import everybit as eb
from everybit.dtypes import dtype_name, torch_dtype
from everybit.metrics import Metrics
from everybit.optimizer import nbytes, state_bytes
from everybit.policies import short
from everybit.policy import Resolved, resolve
from everybit_torch.probing import is_number
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.layout import Group, Layout, build
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, Transforms, Units, describe
from everybit_torch.sharded.reduction import Wire, accumulate_bytes, chunk_size, install_bytes
from everybit_torch.sharded.shard_optimizer import LabelledTransform, contiguous_runs
from everybit_torch.sharded.strategies import OuterStrategy, Sharding, Strategy, sharding
from everybit_torch.stepping import PIECE, Part, find_totals, piece_size, step_in_place
from everybit_torch.units import Unit

AGREED = 4
"""Numbers beside one for each parameter in which ranks agree on a step."""

COMPARED = 5
"""Numbers in which ranks compare their ways through the units in a backward pass, where parameters are sharded."""

SMALLEST = 64
"""Transient tensors of fewer bytes are not counted."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks there are, and which of them is looked at."""

    inner: int = 1
    outer: int = 1
    inner_rank: int = 0
    outer_rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of one rank.

    Attributes:
        sharding: What is shared out.
        ranks: Among whom.
        parameters: Elements of the whole model.
        padding: Elements of all buffers that are no parameter's.
        persistent: Between steps, by use.
        transient: The most that is allocated on top, in each phase: ``forward``, ``backward``, ``step``.
        wire: Sent in one step, by collective.
        microbatches: Backward passes in one step.
        weights: Elements of the whole model by the format of their weights, as one would write it; ``"frozen"`` those of frozen ones.
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

    @property
    def persistent_bytes(self) -> int:
        """All that persists."""
        return sum(self.persistent.values())

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated at any moment."""
        return self.persistent_bytes + max(self.transient.values())

    @property
    def wire_bytes(self) -> int:
        """All that is sent in a step."""
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
        rows += [("transient", "at most", max(self.transient.values()))]
        rows += [("", name, size) for name, size in self.transient.items()]
        rows += [("wire", f"a step of {self.microbatches} microbatch{'es' * (self.microbatches > 1)}", self.wire_bytes)]
        rows += [("", name, size) for name, size in self.wire.items()]
        lines = [f"  {kind:<11}{name:<24}{size:>20,} bytes" for kind, name, size in rows]
        formats = [
            f"  {'' if number else 'weights':<11}{name:<36}{count:>12,} elements"
            for number, (name, count) in enumerate(self.weights.items())
        ]
        return "\n".join([title, *formats, *lines])


def plan(
    model: nn.Module,
    transform: Transforms,
    *,
    policy: AnyPrecision = None,
    strategy: Strategy | int = "optim",
    outer: OuterStrategy = "no_shard",
    ranks: int | tuple[int, int] = 1,
    units: Units | None = None,
    labels: Labels | None = None,
    microbatches: int = 1,
    reshard_after_forward: bool = True,
    compile: bool = False,
    keep_gradients: bool = True,
    metrics: bool = False,
    device: torch.device | str = "cpu",
    rank: int | tuple[int, int] = 0,
) -> Plan:
    """What a :class:`FlatStepper` of these arguments takes on one of its ranks, from the moment when it is made.

    Ranks differ by their padding and by counters, some bytes. What a model has beside its parameters (buffers) is not counted. Where a
    parameter had no gradient on any rank in some step, counters of its own are added, which only ``FlatStepper.plan`` can know.

    Args:
        model: May be on the meta device: no memory is taken.
        transform: As the stepper's.
        policy: As the stepper's.
        strategy: As the stepper's.
        outer: As the stepper's.
        ranks: How many there are, or (outer, inner).
        units: As the stepper's.
        labels: As the stepper's.
        microbatches: In a step.
        reshard_after_forward: As the stepper's.
        compile: As the stepper's.
        keep_gradients: As the stepper's; gradients that are not kept are among what is there for moments.
        metrics: As the stepper's; they are there from the first step on.
        device: Where it will run: accelerators are given larger pieces to work on than a CPU.
        rank: Whose bytes: a number, counted as in the mesh, or (outer, inner).

    Raises:
        TypeError: As the stepper.
        ValueError: As the stepper; and for numbers below 1, or a rank that there is not.

    Example:
        >>> import torch, everybit as eb
        >>> from everybit_torch import plan
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        >>> sizes = plan(model, eb.adamw(1e-3), policy=eb.policies.KAHAN_BF16, strategy="optim", ranks=8)
        >>> round(sizes.bytes_per_param, 2)
        4.75
    """
    outer_size, inner_size = ranks if isinstance(ranks, tuple) else (1, ranks)
    for name, value in (("ranks", inner_size), ("ranks", outer_size), ("microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}; accepted is 1 or more.")
    outer_rank, inner_rank = rank if isinstance(rank, tuple) else divmod(rank, inner_size)
    if not (0 <= outer_rank < outer_size and 0 <= inner_rank < inner_size):
        raise ValueError(f"rank: got {rank!r}; there are {outer_size} x {inner_size} ranks, counted from 0.")
    kind = sharding(strategy, outer)
    described = describe(model, transform, policy, units, labels)
    layout = build(described.specs, shards=inner_size * outer_size, units=[name for name, _ in described.units])
    return plan_layout(
        layout, described.labelled, kind, Ranks(inner_size, outer_size, inner_rank, outer_rank),
        microbatches=microbatches, reshard_after_forward=reshard_after_forward, compile=compile,
        keep_gradients=keep_gradients, metrics=metrics, device=device,
    )  # fmt: skip


def plan_layout(
    layout: Layout,
    labelled: Mapping[str, LabelledTransform],
    kind: Sharding,
    ranks: Ranks,
    *,
    microbatches: int = 1,
    reshard_after_forward: bool = True,
    compile: bool = False,
    keep_gradients: bool = True,
    metrics: bool = False,
    device: torch.device | str = "cpu",
    runs: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """As :func:`plan`, for any rank; ``runs``: for each group that is trained, elements of what is stepped at once."""
    where = torch.device(device)
    groups = [_GroupPlan.of(group, labelled, kind, ranks, chunk_size(where)) for group in layout.groups]
    if runs is not None:
        trained = [number for number, one in enumerate(groups) if one.resolved is not None]
        for number, given in zip(trained, runs, strict=True):
            groups[number] = replace(groups[number], given_runs=tuple(given))
    persistent: Counter[str] = Counter()
    for one in groups:
        persistent.update(one.persistent(labelled))
    persistent["bookkeeping"] += len(layout.specs) * torch.int64.itemsize  # counts of non-finite gradients
    if compile:
        from everybit_torch.sharded.hyperparameters import hyperparameters

        values = [value for one in labelled.values() for value in hyperparameters(one.transform).values()]
        numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
        persistent["bookkeeping"] += sum(map(is_number, numbers)) * torch.float64.itemsize
    if metrics:
        persistent["bookkeeping"] += nbytes(Metrics.zero(torch.device("meta")))
    lazy = 0 if keep_gradients else persistent.pop("gradients")
    order = ("parameters", "main parameters", "compensation", "gradients")
    ordered = {name: persistent[name] for name in order if persistent[name]}
    ordered |= {name: size for name, size in persistent.items() if name not in (*order, "counters", "bookkeeping")}
    ordered |= {name: persistent[name] for name in ("counters", "bookkeeping")}
    units = [[one for one in groups if one.group.unit == number] for number in range(len(layout.units))]
    transient = {
        "forward": _forward_peak(units, kind, reshard_after_forward) + (lazy if microbatches > 1 else 0),
        "backward": _backward_peak(units, kind, microbatches, reshard_after_forward, lazy=lazy > 0),
        "step": _step_peak(groups, labelled, compile, piece_size(where)) + lazy,
    }
    wire = _wire(groups, kind, ranks, microbatches, reshard_after_forward, _reductions(labelled))
    weights: Counter[str] = Counter()
    for one in groups:
        name = "frozen" if one.resolved is None else short(one.resolved.params)
        weights[name] += one.group.numel
    return Plan(kind, ranks, layout.numel, layout.padding, ordered, transient, wire, microbatches, dict(weights))


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    group: Group
    kind: Sharding
    ranks: Ranks
    low: int
    high: int
    resolved: Resolved | None
    main: torch.dtype
    wire: Wire
    outer_wire: Wire
    chunk: int
    given_runs: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, group: Group, labelled: Mapping[str, LabelledTransform], kind: Sharding, ranks: Ranks, chunk: int
    ) -> _GroupPlan:
        low, high = kind.own_range(group.padded, ranks.inner_rank, ranks.inner, ranks.outer_rank, ranks.outer)
        if not group.requires_grad:
            nothing = Wire(group.dtype, exact=False)
            return cls(group, kind, ranks, low, high, None, group.dtype, nothing, nothing, chunk)
        resolved = resolve(labelled[group.label].policy, dtype_name(group.dtype, field="parameter"))
        return cls(
            group, kind, ranks, low, high, resolved, torch_dtype(resolved.grads_main),
            *Wire.pair(resolved, ranks.inner, ranks.outer), chunk,
        )  # fmt: skip

    @property
    def weights(self) -> int:
        """Bytes of the whole group's weights."""
        return self.group.padded * self.group.dtype.itemsize

    @property
    def main_numel(self) -> int:
        return self.group.padded // (self.ranks.inner if self.kind.grads else 1)

    @property
    def main_bytes(self) -> int:
        return 0 if self.resolved is None else self.main_numel * self.main.itemsize

    @property
    def bucket(self) -> int:
        return self.group.padded * self.wire.dtype.itemsize

    @property
    def received(self) -> int:
        return self.bucket if self.wire.exact else 0

    def runs(self, labelled: Mapping[str, LabelledTransform]) -> list[int]:
        """Elements of each run that is stepped."""
        if self.given_runs is not None:
            return list(self.given_runs)
        slices = list(self.group.slices(self.low, self.high))
        policy = labelled[self.group.label].policy
        runs = contiguous_runs(slices, by_index=policy.draws_bits, block=policy.block)
        return [sum(slices[number].high - slices[number].low for number in run) for run in runs]

    def persistent(self, labelled: Mapping[str, LabelledTransform]) -> Counter[str]:
        found: Counter[str] = Counter()
        if self.kind.params:
            found["parameters"] = self.weights // self.ranks.inner
            # The NaN that stands for a parameter while it is not gathered.
            found["bookkeeping"] = self.group.dtype.itemsize * sum(p.spec.numel > 0 for p in self.group.placements)
        else:
            found["parameters"] = (
                self.weights if self.group.requires_grad else self.group.numel * self.group.dtype.itemsize
            )
        if self.resolved is None:
            return found
        found["gradients"] = self.main_numel * self.main.itemsize
        optimizer = eb.Optimizer(labelled[self.group.label].transform, labelled[self.group.label].policy)
        beside = (
            "main parameters" if any(part.name == "main" for part in self.resolved.params.parts()) else "compensation"
        )
        for numel in self.runs(labelled):
            state = optimizer.init([torch.empty(numel, dtype=self.group.dtype, device="meta")])
            found[beside] += nbytes(state.extra)
            found.update(state_bytes(state.inner, counters=state.step.nbytes))
            found["bookkeeping"] += torch.int64.itemsize  # the run's first global index
        return found


class _Meter:
    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, nbytes: int) -> int:
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        return nbytes

    def briefly(self, nbytes: int) -> None:
        self.add(nbytes)
        self.live -= nbytes


def _forward_peak(units: list[list[_GroupPlan]], kind: Sharding, reshard: bool) -> int:
    """The model's own unit, the one that computes and the next; or all, if they are kept."""
    if not kind.params:
        return 0
    sizes = [sum(one.weights for one in unit) for unit in units]
    if not reshard:
        return sum(sizes)
    pairs = [sum(sizes[number : number + 2]) for number in range(1, len(sizes))]
    return sizes[0] + max(pairs, default=0)


def _backward_peak(
    units: list[list[_GroupPlan]], kind: Sharding, microbatches: int, reshard: bool, *, lazy: bool
) -> int:
    """Follows the last backward pass of a step, from the last unit to the model's own."""
    meter = _Meter()
    opens = lazy and microbatches == 1  # main gradients are not there yet
    if lazy and not opens:
        meter.add(sum(one.main_bytes for unit in units for one in unit))
    sizes = [sum(one.weights for one in unit) for unit in units]
    trained = [[one for one in unit if one.resolved is not None] for unit in units]
    if kind.params:
        meter.add(sizes[0] if reshard else sum(sizes))
    buckets = {id(one): meter.add(one.bucket) for one in trained[0] if kind.grads}
    if opens and not kind.grads:
        meter.add(sum(one.main_bytes for one in trained[0]))
    in_flight: list[tuple[_GroupPlan, int]] = []

    def finish() -> None:
        for one, sent in in_flight:
            # What was received is added up; natively that is where what was sent is.
            needed = one.received or sent
            meter.live -= sent + one.received - needed
            meter.briefly(_install_bytes(one))
            meter.live -= needed
            if one.ranks.outer > 1:
                meter.briefly(_outer_bytes(one))
        in_flight.clear()

    for number in range(len(units) - 1, -1, -1):
        if kind.params and 0 < number < len(units) - 1:
            meter.live -= sizes[number + 1]  # which the pass has left
        if kind.params and reshard and number > 0:
            meter.add(sizes[number] if number == len(units) - 1 else 0)
            meter.add(sizes[number - 1] if number > 1 else 0)
        if kind.grads and number > 0:
            buckets |= {id(one): meter.add(one.bucket) for one in trained[number]}
        if opens and not kind.grads and number > 0:
            meter.add(sum(one.main_bytes for one in trained[number]))
        for one in trained[number]:
            largest = max(placement.spec.numel for placement in one.group.placements)
            into = one.wire.dtype if kind.grads else one.main
            adds = not kind.grads and microbatches > 1
            meter.briefly(
                accumulate_bytes(
                    largest,
                    into,
                    one.group.dtype,
                    adds=adds,
                    scale=one.wire.prescale if kind.grads else 1.0,
                    chunk=one.chunk,
                )
            )
        for one in reversed(trained[number]):
            finish()
            if opens and kind.grads:
                meter.add(one.main_bytes)
            sent = buckets.pop(id(one), 0)
            if not kind.grads and one.wire.dtype is not one.main:
                sent = meter.add(one.bucket)
                meter.briefly(
                    accumulate_bytes(
                        one.group.padded, one.wire.dtype, one.main, adds=False, scale=one.wire.prescale, chunk=one.chunk
                    )
                )
            meter.add(one.received)
            in_flight.append((one, sent))
    finish()
    return meter.peak


def _install_bytes(one: _GroupPlan) -> int:
    whole = not one.kind.state
    numel = one.group.padded // (1 if whole and not one.wire.exact else one.ranks.inner)
    same = one.wire.dtype is one.main and not one.kind.grads
    divides = one.ranks.outer == 1
    parts = one.ranks.inner if one.wire.exact else 1
    return install_bytes(
        numel,
        one.main,
        parts,
        in_place=same and not one.wire.exact,
        divides=divides,
        scale=1 / one.wire.prescale,
        chunk=one.chunk,
    )


def _outer_bytes(one: _GroupPlan) -> int:
    wire, outer = one.outer_wire, one.ranks.outer
    reduced = one.group.padded // (one.ranks.inner if one.kind.state else 1)
    scattered = one.kind.outer == "optim"
    sent = reduced * wire.dtype.itemsize
    cast = sent if wire.dtype is not one.main else 0
    received = sent if wire.exact else 0
    numel = reduced // outer if scattered or wire.exact else reduced
    parts = outer if wire.exact else 1
    scratch = install_bytes(
        numel,
        one.main,
        parts,
        in_place=not cast and not wire.exact,
        divides=True,
        scale=1 / wire.prescale,
        chunk=one.chunk,
    )
    return cast + received + scratch


def _step_peak(groups: list[_GroupPlan], labelled: Mapping[str, LabelledTransform], compile: bool, piece: int) -> int:
    """What stepping one piece computes on the way, or the norm of the gradient, for the run for which it is most."""
    peak = 0
    known: dict[tuple[str, torch.dtype, int], int] = {}
    for one in groups:
        if one.resolved is None:
            continue
        for numel in one.runs(labelled):
            block = one.resolved.policy.block
            size = min(numel, max(piece // block, 1) * block)
            key = (one.group.label, one.group.dtype, size)
            if size and key not in known:
                known[key] = max(_norm_bytes(size, one.main), 0 if compile else _piece_bytes(one, labelled, size))
            peak = max(peak, known.get(key, 0))
    return peak


def _norm_bytes(size: int, main: torch.dtype) -> int:
    return size * torch.float32.itemsize if main.itemsize < 4 else 0


def _piece_bytes(one: _GroupPlan, labelled: Mapping[str, LabelledTransform], size: int) -> int:
    assert one.resolved is not None
    block = one.resolved.policy.block
    known = max(PIECE // block, 1) * block
    if size > known:
        # What is computed on the way grows with the piece, element by element.
        return _piece_bytes(one, labelled, known) * size // known
    transform, policy = labelled[one.group.label].transform, labelled[one.group.label].policy
    optimizer = eb.Optimizer(transform, policy)
    tensor = torch.zeros(size, dtype=one.group.dtype)
    state = optimizer.init([tensor])
    gradient = torch.zeros(size, dtype=one.main)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        step_in_place(
            optimizer, [tensor], [gradient], state, 0, metrics=False, totals=_asked(labelled[one.group.label])
        )
    peak: int = counter.peak
    return peak


def _reductions(labelled: Mapping[str, LabelledTransform]) -> int:
    """How many reductions the transforms ask for in a step."""
    by_source = {one.source: one for one in labelled.values()}
    return sum(len(_asked(one)) for one in by_source.values())


def _asked(one: LabelledTransform) -> list[Tensor]:
    if one.transform.scope == "element":
        return []
    optimizer = eb.Optimizer(one.transform, one.policy)
    empty = torch.zeros(0, dtype=torch_dtype(one.policy.model_dtype))
    unit = Unit(0, [empty], [], optimizer.init([empty]), 0, flat=True, stored=optimizer.formats([empty]))
    return find_totals([Part(optimizer, unit, None)], eb.Local)


def _wire(
    groups: list[_GroupPlan], kind: Sharding, ranks: Ranks, microbatches: int, reshard: bool, reductions: int
) -> dict[str, int]:
    sent: Counter[str] = Counter()
    parameters = sum(len(one.group.placements) for one in groups)

    def all_reduce(nbytes: int, size: int) -> None:
        sent["all_reduce"] += 2 * (size - 1) * nbytes // size

    def exchange(kind: str, nbytes: int, size: int) -> None:
        sent[kind] += (size - 1) * nbytes // size

    def reduce(nbytes: int, main: int, wire: Wire, size: int, *, whole: bool) -> None:
        if wire.exact:
            exchange("all_to_all", nbytes, size)
            if whole:
                exchange("all_gather", main, size)
        elif whole:
            all_reduce(nbytes, size)
        else:
            exchange("reduce_scatter", nbytes, size)

    for one in groups:
        if kind.params:
            passes = microbatches * (2 if reshard and one.group.unit > 0 else 1)
            for _ in range(passes):
                exchange("all_gather", one.weights, ranks.inner)
        if one.resolved is None:
            continue
        for _ in range(microbatches if kind.grads else 1):
            reduce(one.bucket, one.group.padded * one.main.itemsize, one.wire, ranks.inner, whole=not kind.state)
        if ranks.outer > 1:
            reduced = one.group.padded // (ranks.inner if kind.state else 1)
            wire = one.outer_wire
            reduce(
                reduced * wire.dtype.itemsize,
                reduced * one.main.itemsize,
                wire,
                ranks.outer,
                whole=kind.outer != "optim",
            )
        if kind.outer == "optim":
            exchange("all_gather", one.weights // ranks.inner, ranks.outer)
        elif kind.state and not kind.params:
            exchange("all_gather", one.weights, ranks.inner)
    for size in (ranks.inner, ranks.outer):
        all_reduce((parameters + AGREED) * torch.float64.itemsize, size)  # who has gradients, and what they are like
        for _ in range(microbatches if kind.params else 0):
            all_reduce(COMPARED * torch.int64.itemsize, size)
    if kind.state:
        for size in (ranks.inner, ranks.outer) if kind.outer == "optim" else (ranks.inner,):
            for _ in range(reductions):
                all_reduce(torch.float64.itemsize, size)
    return {name: size for name, size in sent.items() if size}
