"""Predicts memory and traffic from names, shapes and dtypes, before anything is allocated.

Persistent bytes are the sums of what is kept. On flat buffers transient bytes, and what is sent, are added up over the events of the
schedule that the stepper carries out (:mod:`.scheduling.schedule`); what a step computes on the way is found by stepping one piece of a
buffer. Of a transform with work that is not due at every step (``ctx.every``) the step is counted that takes the most, and sends the most.
Tensors of one element that come and go are left out, and so are activations and the gradients that autograd holds: one parameter's at a
time. Under ``optim_grads_params`` FSDP2 allocates most of what comes and goes, and that is estimated.

Bytes on the wire are what one rank sends, as a ring sends it. For ``n`` ranks, weights of ``w`` bytes in all, gradients of ``c`` bytes in
the wire's dtype, and ``k`` microbatches, up to the padding:

====================  ===============================================
strategy              sent by each rank in a step, in units of ``(n - 1) / n``
====================  ===============================================
no_shard              ``2 c``
optim                 ``c + w``
optim_grads           ``k c + w``
optim_grads_params    ``k (c + 2 w)``, of the model's own unit ``w`` once
====================  ===============================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from everybit.policies import short
from everybit.protocol import any_per_tensor
from everybit.stepping import Metrics, nbytes
from everybit_torch.collectives.reduction import has_own_processors
from everybit_torch.compiled.probing import is_number
from everybit_torch.sharded.gradient_norm import answers_first
from everybit_torch.sharded.hyperparameters import hyperparameters
from everybit_torch.sharded.ignored_parameters import Ignored
from everybit_torch.sharded.labelling import AnyPrecision, LabelledTransform, Labels, Transforms
from everybit_torch.sharded.layout import Layout, build
from everybit_torch.sharded.model_layout import describe
from everybit_torch.sharded.model_units import Units
from everybit_torch.sharded.pass_counts import NUMBERS
from everybit_torch.sharded.planning.distribution import distribution
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.metering import StepBytes, meter
from everybit_torch.sharded.planning.peaks import asked_peak, norm_peak, step_peak
from everybit_torch.sharded.planning.reductions import reduced_numbers
from everybit_torch.sharded.planning.report import Plan, Ranks
from everybit_torch.sharded.planning.traffic import agreed_bytes
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.scheduling.schedule import Settings, cycle
from everybit_torch.sharded.strategies import OuterStrategy, Sharding, Strategy, sharding
from everybit_torch.stepping import piece_size

__all__ = ["Plan", "Ranks", "plan", "plan_layout"]


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
    compile: bool = False,
    metrics: bool = False,
    device: torch.device | str = "cpu",
    rank: int | tuple[int, int] = 0,
    ignored: Ignored | None = None,
    nan: NanCheck = "off",
) -> Plan:
    """Predict the memory and traffic of a :class:`FlatStepper` of these arguments on one of its ranks, after it is made.

    Ranks differ by their padding and by counters, some bytes; and by what they have of tensors that must stay whole, of which
    :attr:`Plan.whole_tensors` names the rank with the most. What a model has beside its parameters (buffers) is not counted. Where a
    parameter had no gradient on any rank in some step, counters of its own are added, which only ``FlatStepper.plan`` can know.

    Args:
        model: May be on the meta device: no memory is taken.
        transform: The transform that computes updates; or one for each label, with ``labels``.
        policy: How weights, state and gradients are stored and sent, as for the stepper.
        strategy: What is sharded over the inner ranks: a name, or the number of the ZeRO stage.
        outer: What is sharded over the outer ranks as well: ``"no_shard"``, or ``"optim"``.
        ranks: The number of ranks, or (outer, inner).
        units: Modules, or classes of modules, whose parameters are gathered and reduced together.
        labels: A function from (name, parameter) to the key of its transform.
        microbatches: The number of backward passes in a step.
        compile: Whether the step is compiled, which changes its transient memory.
        metrics: Whether steps are measured; metrics persist from the first step on.
        device: The device of the training run; a step works on larger pieces on an accelerator than on a CPU.
        rank: The rank to plan: a number, counted as in the mesh, or (outer, inner).
        ignored: Parameters that the stepper does not manage; they are not counted.
        nan: As the stepper's.

    Raises:
        TypeError: As the stepper.
        ValueError: As the stepper; and for numbers below 1, or a rank that does not exist.

    Examples:
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
    kind, there = sharding(strategy, outer), Ranks(inner_size, outer_size, inner_rank, outer_rank)
    if kind.params:
        from everybit_torch.sharded.planning.rows import plan_rows

        return plan_rows(
            model, transform, policy=policy, units=units, labels=labels, ignored=ignored, kind=kind, ranks=there,
            microbatches=microbatches, metrics=metrics,
        )  # fmt: skip
    described = describe(model, transform, policy, units, labels, ignored)
    layout = build(
        described.specs, shards=inner_size * outer_size, units=[name for name, _ in described.units],
        shares=kind.shares(inner_size),
    )  # fmt: skip
    return plan_layout(
        layout, described.labelled, kind, there, nan=nan, microbatches=microbatches, compile=compile, metrics=metrics,
        device=device,
    )  # fmt: skip


def plan_layout(
    layout: Layout,
    labelled: Mapping[str, LabelledTransform],
    kind: Sharding,
    ranks: Ranks,
    *,
    microbatches: int = 1,
    compile: bool = False,
    metrics: bool = False,
    device: torch.device | str = "cpu",
    runs: Sequence[Sequence[tuple[int, ...]]] | None = None,
    nan: NanCheck = "off",
) -> Plan:
    """Plan any rank of a stepper on flat buffers, as :func:`plan`.

    Args:
        layout: Of the model.
        labelled: What its labels mean.
        kind: What is sharded.
        ranks: How many there are, and whose bytes.
        microbatches: As :func:`plan`'s, like the next ones.
        compile: See there.
        metrics: See there.
        device: See there.
        runs: For each group that is trained, the shapes of its runs, where they are known.
        nan: As :func:`plan`'s.
    """
    where = torch.device(device)
    groups = [GroupPlan.of(group, labelled, kind, ranks, where, compile=compile) for group in layout.groups]
    if runs is not None:
        trained = [number for number, one in enumerate(groups) if one.resolved is not None]
        for number, given in zip(trained, runs, strict=True):
            groups[number] = replace(groups[number], given_runs=tuple(given))
    persistent: Counter[str] = Counter()
    for one in groups:
        persistent.update(one.persistent(labelled))
    asking = [
        one for one in groups if one.resolved is not None and any_per_tensor([labelled[one.group.label].transform])
    ]
    stepped = [place.spec for one in groups if one.resolved is not None for place in one.group.placements]
    numbered = {spec: number for number, spec in enumerate(stepped)}
    if asking:
        # The parameters that each run's elements belong to, and their sizes.
        persistent["bookkeeping"] += len(numbered) * torch.float64.itemsize
        for one in asking:
            for members in one.members(labelled, numbered):
                persistent["bookkeeping"] += members.numbers.nbytes + members.edges.nbytes
    persistent["bookkeeping"] += len(layout.specs) * torch.int64.itemsize  # counts of non-finite gradients
    if kind.grads:
        persistent["bookkeeping"] += NUMBERS * torch.float64.itemsize  # sums of the ranks' numbers of backward passes
    if compile:
        values = [value for one in labelled.values() for value in hyperparameters(one.transform).values()]
        numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
        persistent["bookkeeping"] += sum(map(is_number, numbers)) * torch.float64.itemsize
    if metrics:
        persistent["bookkeeping"] += nbytes(Metrics.zero(torch.device("meta")))
    answered = int(answers_first(labelled))
    step = StepBytes(
        norm_peak(groups, agreed_bytes(groups), where),
        max(
            step_peak(groups, labelled, numbered, compile, piece_size(where)),
            asked_peak(groups, labelled, numbered, where, answered=answered),
        ),
        agreed_bytes(groups),
        # The norm of the gradient is found once, for the report and for a clip.
        tuple(reduced_numbers(labelled, len(numbered), alone=groups[0].alone)[answered:]),
        where,
        2 * len(layout.specs) * torch.int64.itemsize if nan == "param" else 0,
    )
    # All microbatches between the first and the last are alike.
    settings = Settings(kind, overlap_reductions=has_own_processors(where))
    transient, wire = meter(cycle(layout, settings, min(microbatches, 3)), groups, step, microbatches)
    weights: Counter[str] = Counter()
    for one in groups:
        name = "frozen" if one.resolved is None else short(one.resolved.params)
        weights[name] += one.group.numel
    return Plan(
        kind, ranks, layout.numel, layout.padding, in_order(persistent), transient, wire, microbatches, dict(weights),
        distribution(layout, ranks.inner, ranks.inner_rank) if kind.state else None,
    )  # fmt: skip


def in_order(persistent: Mapping[str, int]) -> dict[str, int]:
    """Bytes by use: what the model has first, then the optimizer's, then what is kept beside."""
    first = [name for name in ("parameters", "main parameters", "compensation", "gradients") if persistent.get(name)]
    last = ("counters", "bookkeeping")
    slots = [
        name for name in persistent if name not in ("parameters", "main parameters", "compensation", "gradients", *last)
    ]
    return {name: persistent.get(name, 0) for name in (*first, *slots, *last)}
