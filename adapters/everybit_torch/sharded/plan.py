"""Predicts memory, to the byte, and traffic from names, shapes and dtypes, before anything is allocated.

Persistent bytes are the sums of what is kept. Transient bytes, and what is sent, are added up over the events of the schedule that the
stepper carries out (:mod:`.scheduling.schedule`); what a step computes on the way is found by stepping one piece of a buffer. Of a
transform with work that is not due at every step (``ctx.every``) the step is counted that takes the most, and sends the most. Tensors of
one element that come and go are left out, and so are activations and the gradients that autograd holds: one parameter's at a time.

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

With ``defer_reduction`` ``c`` is sent once instead of ``k`` times.
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
from everybit_torch.dtensors import mesh_of
from everybit_torch.probing import is_number
from everybit_torch.sharded.construction.schedule import ConstructionSchedule, construction_of
from everybit_torch.sharded.construction.sources import Values
from everybit_torch.sharded.gradient_norm import answers_first
from everybit_torch.sharded.hyperparameters import hyperparameters
from everybit_torch.sharded.ignored_parameters import Ignored
from everybit_torch.sharded.layout import Layout, ParameterSpec, build
from everybit_torch.sharded.model_layout import AnyPrecision, Labels, Transforms, Units, describe
from everybit_torch.sharded.offload import Offload, is_host
from everybit_torch.sharded.offload_rules import require_offload
from everybit_torch.sharded.packing import MOST
from everybit_torch.sharded.pass_counts import NUMBERS
from everybit_torch.sharded.planning.access import access_bytes
from everybit_torch.sharded.planning.construction import construction_peak
from everybit_torch.sharded.planning.distribution import WholeTensors, distribution
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.metering import StepBytes, meter
from everybit_torch.sharded.planning.peaks import asked_peak, bucket_peak, norm_peak, step_peak
from everybit_torch.sharded.planning.reductions import reduced_numbers
from everybit_torch.sharded.planning.report import Plan, Ranks
from everybit_torch.sharded.planning.traffic import agreed_bytes
from everybit_torch.sharded.reports import NanCheck
from everybit_torch.sharded.scheduling.schedule import Settings, cycle
from everybit_torch.sharded.scheduling.weights import Prefetch, Retained
from everybit_torch.sharded.shard_optimizer import LabelledTransform
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
    reshard_after_forward: bool = True,
    reshard_after_backward: bool = True,
    compile: bool = False,
    keep_gradients: bool = True,
    defer_reduction: bool = False,
    metrics: bool = False,
    second_order: bool = False,
    device: torch.device | str = "cpu",
    rank: int | tuple[int, int] = 0,
    values: Values | type[Values] | None = None,
    ignored: Ignored | None = None,
    model_parallel: int | tuple[int, ...] = (),
    nan: NanCheck = "off",
    offload: bool | Offload = False,
    most_elements: float = MOST,
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
        reshard_after_forward: Whether a unit's weights are freed after its forward pass, under ``optim_grads_params``.
        reshard_after_backward: Whether they are freed after a backward pass, too, and not kept for the next microbatch's forward pass; see
            :meth:`FlatStepper.set_reshard_after_backward`.
        compile: Whether the step is compiled, which changes its transient memory.
        keep_gradients: Whether main gradients are kept from one step to the next; if not, they count as transient.
        defer_reduction: Whether sharded gradients are summed over the ranks in a step's last backward pass only. Between the others whole
            gradients are kept, which count as transient.
        metrics: Whether steps are measured; metrics persist from the first step on.
        second_order: Whether each microbatch has ``torch.autograd.grad(create_graph=True)`` of its input before its backward pass, as a
            gradient penalty does; weights of ``optim_grads_params`` then stay gathered in between.
        device: The device of the training run; a step works on larger pieces on an accelerator than on a CPU.
        rank: The rank to plan: a number, counted as in the mesh, or (outer, inner).
        values: Where the stepper's model is to get its values from when it is constructed, or the class of that, such as
            ``FromSafetensors``: nothing is read. None: it has them, so that the phase "construction" begins with the whole model.
        ignored: Parameters that the stepper does not manage; they are not counted.
        model_parallel: The number of ranks with other parts of the model, by dimension: stages of a pipeline, or experts. Those over which
            DTensors lie are found. What is sent to them counts; of parameters that they have and this rank has not ``FlatStepper.plan``
            alone knows, which a transform that reduces over each parameter has numbers for.
        nan: As the stepper's; ``"param"`` sends more to ranks with other parts of the model.
        offload: What is kept in the host's memory, as for the stepper; for a ``device`` that is not the host.
        most_elements: The most elements that a rank has of tensors that stay whole, as for the stepper.

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
    kind = sharding(strategy, outer)
    described = describe(model, transform, policy, units, labels, ignored, is_part=model_parallel not in ((), 1))
    mesh = mesh_of(described.parameters)
    given = model_parallel if isinstance(model_parallel, tuple) else (model_parallel,)
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"model_parallel: got {model_parallel!r}; accepted is 1 or more, or several such numbers.")
    beside = (*(() if mesh is None else mesh.shape), *given)
    if (away := Offload.of(offload)).anything and is_host(torch.device(device)):
        raise ValueError(
            f"offload: got {offload!r} for device={str(device)!r}, whose memory is the host's; accepted is False."
        )
    require_offload(away, kind, described.labelled, keep_gradients=keep_gradients)
    names = [name for name, _ in described.units]
    layout = build(
        described.specs, shards=inner_size * outer_size, units=names, shares=kind.shares(inner_size, outer_size),
        within=kind.within(outer_size), most=most_elements,
    )  # fmt: skip
    return plan_layout(
        layout, described.labelled, kind, Ranks(inner_size, outer_size, inner_rank, outer_rank, beside), nan=nan,
        construction=construction_of(model, described, layout, kind, values),
        microbatches=microbatches,
        retained=Retained.of(
            len(layout.units), reshard_after_forward=reshard_after_forward, reshard_after_backward=reshard_after_backward
        ),
        compile=compile, keep_gradients=keep_gradients, defer_reduction=defer_reduction, metrics=metrics, second_order=second_order,
        device=device, offload=offload,
    )  # fmt: skip


def plan_layout(
    layout: Layout,
    labelled: Mapping[str, LabelledTransform],
    kind: Sharding,
    ranks: Ranks,
    *,
    construction: ConstructionSchedule,
    microbatches: int = 1,
    retained: Retained | None = None,
    compile: bool = False,
    keep_gradients: bool = True,
    defer_reduction: bool = False,
    metrics: bool = False,
    second_order: bool = False,
    prefetch: Prefetch | None = None,
    offload: bool | Offload = False,
    device: torch.device | str = "cpu",
    runs: Sequence[Sequence[tuple[int, ...]]] | None = None,
    others: tuple[Sequence[int], Sequence[int]] = ((), ()),
    nan: NanCheck = "off",
) -> Plan:
    """Plan for any rank, as :func:`plan`.

    Args:
        layout: Of the model.
        labelled: What its labels mean.
        kind: What is sharded.
        ranks: How many there are, and whose bytes.
        construction: How the stepper is given the model.
        microbatches: As :func:`plan`'s, like the next ones.
        retained: Which units' weights stay gathered; None: none.
        compile: See there.
        keep_gradients: See there.
        metrics: See there.
        device: See there.
        runs: For each group that is trained, the shapes of its runs, where they are known.
        defer_reduction: As :func:`plan`'s.
        second_order: See there.
        prefetch: What the stepper was told of gathers; None: nothing.
        others: The sizes of parameters of other parts of the model, that come before this rank's, and after.
        nan: As :func:`plan`'s.
        offload: As :func:`plan`'s.
    """
    where = torch.device(device)
    groups = [GroupPlan.of(group, labelled, kind, ranks, where, compile=compile) for group in layout.groups]
    if runs is not None:
        trained = [number for number, one in enumerate(groups) if one.resolved is not None]
        for number, given in zip(trained, runs, strict=True):
            groups[number] = replace(groups[number], given_runs=tuple(given))
    made = construction_peak(
        construction.events(), construction.tensors, groups, labelled, given=construction.given, chunk=construction.chunk,
        later=construction.later, keep_gradients=keep_gradients, offload=Offload.of(offload),
    )  # fmt: skip
    persistent: Counter[str] = Counter()
    for one in groups:
        persistent.update(one.persistent(labelled))
    asking = [
        one for one in groups if one.resolved is not None and any_per_tensor([labelled[one.group.label].transform])
    ]
    stepped = [place.spec for one in groups if one.resolved is not None for place in one.group.placements]
    elsewhere = [
        [ParameterSpec((f"{side}.{n}",), (size,), torch.float32) for n, size in enumerate(sizes)]
        for side, sizes in zip(("before", "after"), others, strict=True)
    ]
    numbered = {spec: number for number, spec in enumerate([*elsewhere[0], *stepped, *elsewhere[1]])}
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
    if not keep_gradients:
        del persistent["gradients"]
    away = Offload.of(offload)
    host = _on_host(persistent, groups, away)
    order = ("parameters", "main parameters", "compensation", "gradients")
    ordered = {name: persistent[name] for name in order if persistent[name]}
    ordered |= {name: size for name, size in persistent.items() if name not in (*order, "counters", "bookkeeping")}
    ordered |= {name: persistent[name] for name in ("counters", "bookkeeping")}
    answered = answers_first(labelled)
    step = StepBytes(
        norm_peak(groups, agreed_bytes(groups), where),
        max(
            bucket_peak(groups, labelled, numbered, compile, piece_size(where), away)
            if away.state
            else step_peak(groups, labelled, numbered, compile, piece_size(where)),
            asked_peak(groups, labelled, numbered, where, answered=answered, fetches=away.state),
        ),
        agreed_bytes(groups),
        # The norm of the gradient is found once, for the report and for a clip.
        tuple(reduced_numbers(labelled, len(numbered), alone=groups[0].alone)[answered:]),
        where,
        # The sum of squares and whether to skip; under "param" whether any gradient is not finite.
        (2 * torch.float64.itemsize, *([torch.float64.itemsize] if nan == "param" else [])),
        2 * len(layout.specs) * torch.int64.itemsize if nan == "param" else 0,
    )
    settings = Settings(
        kind, True, keep_gradients, defer_reduction, prefetch or Prefetch(), retained or Retained(),
        overlap_reductions=has_own_processors(where),
    )  # fmt: skip
    # All microbatches between the first and the last are alike.
    stages = cycle(layout, settings, min(microbatches, 3), second_order=second_order)
    cycled, wire = meter(stages, groups, step, microbatches)
    transient = {"construction": made, **cycled}
    access = access_bytes(layout, settings, groups, step, labelled)
    weights: Counter[str] = Counter()
    for one in groups:
        name = "frozen" if one.resolved is None else short(one.resolved.params)
        weights[name] += one.group.numel
    return Plan(
        kind, ranks, layout.numel, layout.padding, ordered, transient, wire, microbatches, dict(weights), access, host,
        _whole_tensors(layout, kind, ranks),
    )  # fmt: skip


def _whole_tensors(layout: Layout, kind: Sharding, ranks: Ranks) -> WholeTensors | None:
    outer = kind.within(ranks.outer)
    if not kind.state:
        return None
    own = ranks.inner_rank * outer + (ranks.outer_rank if outer > 1 else 0)
    return distribution(layout, ranks.inner * outer, own, (ranks.inner, outer))


def _on_host(persistent: Counter[str], groups: Sequence[GroupPlan], offload: Offload) -> dict[str, int]:
    """Take what lies on the host out of what persists."""
    here = {"counters", "bookkeeping", *(() if offload.weights else ("parameters",))}
    here |= set() if offload.gradients else {"gradients"}
    found = {name: persistent[name] for name in list(persistent) if offload.anything and name not in here}
    for name in found:
        del persistent[name]
    if offload.gradients:
        # Room on the device for those of one group, for each dtype.
        room: dict[torch.dtype, int] = {}
        for one in groups:
            room[one.main] = max(one.main_bytes, room.get(one.main, 0))
        persistent["gradients"] = sum(room.values())
    return {name: size for name, size in found.items() if size}
