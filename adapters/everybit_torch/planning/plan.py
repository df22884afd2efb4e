"""Predicts memory and traffic from names, shapes and dtypes, before anything is allocated.

Persistent bytes are the sums of all persistent tensors. Of temporaries the largest are counted: gradients that are being reduced, and the
tensors that the step of one piece computes, which is found by stepping one piece. Activations and the gradients that autograd holds, one
parameter's at a time, are left out. Under ``optim_grads_params`` FSDP2 allocates most temporaries, and they are estimated.

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

from typing import Unpack

import torch
from torch import nn

from everybit_torch.collectives import sizes_of
from everybit_torch.flat import BufferStepper, laid_out
from everybit_torch.fsdp2 import FSDP2Stepper, homes_of
from everybit_torch.planning.buffer_plan import plan_buffers
from everybit_torch.planning.report import Plan, PlannedRun, Ranks
from everybit_torch.planning.rows import plan_units
from everybit_torch.sharded.labelling import Labelled, Transforms, label_parameters
from everybit_torch.sharded.models import find_units, ignored_ids, require_model, require_some
from everybit_torch.sharded.options import StepperKeywords, StepperOptions

__all__ = ["Plan", "Ranks", "plan", "plan_stepper"]


def plan_stepper(engine: BufferStepper | FSDP2Stepper, microbatches: int) -> Plan:
    """Plan the rank of a stepper.

    Args:
        engine: The stepper's.
        microbatches: Backward passes in a step.
    """
    options, labelled = engine.judged.options, Labelled(engine.labels, engine.labelled)
    ranks = Ranks(engine.inner.size, engine.outer.size, engine.inner.rank, engine.outer.rank)
    device = next(iter(engine.parameters.values())).device
    metrics = engine.as_optimizer().metrics_enabled
    run = PlannedRun.of(options, ranks, microbatches, device, metrics=metrics)
    if isinstance(engine, BufferStepper):
        return plan_buffers(engine.parameters, engine.judged.buffers, labelled, run)
    return plan_units(engine.parameters, engine.judged.homes, labelled, run)


def plan(
    model: nn.Module,
    transform: Transforms,
    options: StepperOptions | None = None,
    *,
    ranks: int | tuple[int, int] | None = None,
    rank: int | tuple[int, int] = 0,
    microbatches: int = 1,
    metrics: bool = False,
    device: torch.device | str = "cpu",
    **changes: Unpack[StepperKeywords],
) -> Plan:
    """Predict the memory and traffic of a :class:`FlatStepper` with these arguments on a rank, after it is made.

    Ranks differ by their padding and by counters, some bytes; and by their share of tensors that must stay whole, of which
    :attr:`Plan.whole_tensors` names the rank with the most. A model's buffers (beside its parameters) are not counted. Where a
    parameter had no gradient on any rank in some step, it has counters of its own from then on, which are not counted.

    Args:
        model: May be on the meta device: no memory is taken.
        transform: The transform that computes updates; or one for each label, with ``labels``.
        options: The stepper's options; see :class:`~everybit_torch.StepperOptions`.
        ranks: The number of ranks, or (outer, inner). None: those of the options' mesh, or one.
        rank: The rank to plan: a number, counted as in the mesh, or (outer, inner).
        microbatches: The number of backward passes in a step.
        metrics: Whether steps are measured; metrics persist from the first step on.
        device: The device of the training run; a step works on larger pieces on an accelerator than on a CPU.
        **changes: Single options by name, in place of those of ``options``.

    Raises:
        TypeError: An argument that the stepper refuses.
        ValueError: An argument that the stepper refuses, numbers below 1, or a rank that does not exist.

    Examples:
        >>> import torch, everybit as eb
        >>> from everybit_torch import plan
        >>> with torch.device("meta"):
        ...     model = torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        >>> sizes = plan(model, eb.adamw(1e-3), policy=eb.policies.KAHAN_BF16, strategy="optim", ranks=8)
        >>> round(sizes.bytes_per_param, 2)
        4.75
    """
    chosen = StepperOptions.of(options, changes)
    several = sizes_of(chosen.mesh) if ranks is None else ranks
    outer_size, inner_size = several if isinstance(several, tuple) else (1, several)
    for name, value in (("ranks", inner_size), ("ranks", outer_size), ("microbatches", microbatches)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}; accepted is 1 or more.")
    outer_rank, inner_rank = rank if isinstance(rank, tuple) else divmod(rank, inner_size)
    if not (0 <= outer_rank < outer_size and 0 <= inner_rank < inner_size):
        raise ValueError(f"rank: got {rank!r}; there are {outer_size} x {inner_size} ranks, counted from 0.")
    there = Ranks(inner_size, outer_size, inner_rank, outer_rank)
    run = PlannedRun.of(chosen, there, microbatches, torch.device(device), metrics=metrics)
    require_model(model)
    left_alone, modules = ignored_ids(model, chosen.ignored), find_units(model, chosen.units)
    parameters = {name: p for name, p in model.named_parameters() if id(p) not in left_alone}
    require_some(parameters.values())
    labelled = label_parameters(model, parameters, transform, chosen.policy, chosen.labels)
    if run.kind.params:
        return plan_units(parameters, homes_of(model, modules, left_alone), labelled, run)
    buffers = laid_out(model, parameters, labelled, modules, left_alone, run.kind, (inner_size, outer_size))
    return plan_buffers(parameters, buffers, labelled, run)
