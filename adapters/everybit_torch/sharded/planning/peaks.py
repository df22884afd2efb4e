"""The temporary bytes of a step: of finding the norm, and of the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import everybit as eb
from everybit.base import Blocks
from everybit.protocol import any_per_tensor
from everybit_torch import reductions
from everybit_torch.asking import Reads
from everybit_torch.gradients import Grads
from everybit_torch.host_counts import Due
from everybit_torch.joint_steps import JointSteps, arranged, does_joint_work
from everybit_torch.sharded.allocations import AllocationCounter
from everybit_torch.sharded.labelling import LabelledTransform
from everybit_torch.sharded.layout import ParameterSpec
from everybit_torch.sharded.planning.groups import GroupPlan
from everybit_torch.sharded.planning.reductions import answers_of, no_members, reduced_numbers, totals_of, unit_of
from everybit_torch.sharded.planning.runs import Shape, indices
from everybit_torch.sharded.squares import scratch_bytes
from everybit_torch.stepping import PIECE, Begun, step_in_place
from everybit_torch.units import Unit

SMALLEST = 64
"""Transient tensors of fewer bytes are not counted."""

MANY = 8
"""Tensors of one shape of which a step is measured; what one more takes is the same for any number."""

SMALL = 16
"""Rows or columns of a matrix that is not made smaller for a measurement."""


Numbers = Mapping[ParameterSpec, int]
"""The number of each parameter that is trained, among all of them."""


def step_peak(
    groups: list[GroupPlan], labelled: Mapping[str, LabelledTransform], numbers: Numbers, compile: bool, piece: int
) -> int:
    """Return the peak temporary bytes of stepping one piece, over all runs and all answers to which periodic work is due.

    Work that is done for all matrices of one shape together is counted with what is held for it. Compiled code has no temporaries where
    parameters are cut; of whole tensors it is planned with those of uncompiled code, which are no fewer.
    """
    if compile:
        groups = [one for one in groups if one.whole]
    if not groups:
        return 0
    # All totals are there while one piece is stepped.
    counts = reduced_numbers(labelled, len(numbers), alone=groups[0].alone)
    sizes = [count * torch.float64.itemsize for count in counts]
    totals = sum(size for size in sizes if size >= SMALLEST)
    apart = [one for one in groups if not _works_together(one, labelled)]
    pieces = _peak_of_pieces(apart, labelled, numbers, piece, PIECE, _step_one)
    return totals + max(pieces, _peak_together([one for one in groups if one not in apart], labelled, numbers))


def asked_peak(
    groups: list[GroupPlan],
    labelled: Mapping[str, LabelledTransform],
    numbers: Numbers,
    device: torch.device,
    *,
    answered: int,
) -> int:
    """Return the peak temporary bytes of what a transform that reduces is asked for, a chunk at a time, over all runs.

    The first ``answered`` of its reductions are answered by the norm that the report is made with.
    """
    reducing = [one for one in groups if one.resolved is not None and labelled[one.group.label].transform.reduces]
    chunk = reductions.piece_size(device)
    return _peak_of_pieces(reducing, labelled, numbers, chunk, reductions.PIECE, partial(_ask_one, answered))


Run = Callable[[eb.Optimizer[Any], Tensor, Tensor, eb.Members, int | Blocks, Due], int]


def _peak_of_pieces(
    groups: list[GroupPlan],
    labelled: Mapping[str, LabelledTransform],
    numbers: Numbers,
    piece: int,
    largest: int,
    run: Run,
) -> int:
    """Return the peak temporary bytes of ``run``, over pieces of at most ``piece`` elements; of ``largest`` it is measured."""
    peak = 0
    known: dict[tuple[str, torch.dtype, Shape, int, int], int] = {}
    for one in groups:
        if one.resolved is None:
            continue
        label = labelled[one.group.label]
        asks = any_per_tensor([label.transform])
        nobody = no_members(torch.zeros(len(numbers), dtype=torch.float64))
        runs = one.runs(labelled)
        for shape, members in zip(runs, one.members(labelled, numbers) if asks else [nobody] * len(runs), strict=True):
            block = one.resolved.policy.block
            size = shape if one.whole else (min(*shape, max(piece // block, 1) * block),)
            numbered = one.block(labelled)
            key = (one.group.label, one.group.dtype, size, len(members.numbers), numbered)
            if math.prod(size) and key not in known:
                known[key] = (
                    _tensor_bytes(one, label, members, size, run)
                    if one.whole
                    else _piece_bytes(one, label, members, size[0], largest, run, numbered)
                )
            peak = max(peak, known.get(key, 0))
    return peak


def norm_peak(groups: list[GroupPlan], agreed: int, device: torch.device) -> int:
    """The bytes needed to compute the norm of the gradient: the ``agreed`` bytes that ranks exchange, and the scratch for widening."""
    trained = [one for one in groups if one.resolved is not None and one.counts]
    trained = [one for one in trained if one.squares_as_written(device) is None]
    scratch = max((scratch_bytes(one.stepped, one.main, device) for one in trained), default=0)
    return sum(size for size in (agreed, scratch) if size >= SMALLEST)


def _tensor_bytes(one: GroupPlan, label: LabelledTransform, members: eb.Members, shape: Shape, run: Run) -> int:
    """Of a whole tensor; of one with more than :data:`PIECE` elements what a smaller one takes, times the elements.

    What is computed on the way has one number for each element, or few beside these: for each row, or one in all. Products of a matrix
    with itself grow as it does if it keeps its proportions.
    """
    smaller = list(shape)
    while math.prod(smaller) > PIECE:
        halved = [max(range(len(smaller)), key=smaller.__getitem__)]
        if len(shape) > 1 and min(smaller[-2:]) > SMALL:
            halved = [len(shape) - 2, len(shape) - 1]
        for dimension in halved:
            smaller[dimension] = -(-smaller[dimension] // 2)
    optimizer = eb.Optimizer(label.transform, label.policy)
    tensor, gradient = torch.zeros(smaller, dtype=one.group.dtype), torch.zeros(smaller, dtype=one.main)
    measured = max(
        run(optimizer, tensor, gradient, members, 0, due)
        for due in answers_of(optimizer, members.sizes, alone=one.alone)
    )
    return measured * math.prod(shape) // math.prod(smaller)


def _works_together(one: GroupPlan, labelled: Mapping[str, LabelledTransform]) -> bool:
    """Whether whole tensors of one shape are stepped with work that is done for all of them."""
    label = labelled.get(one.group.label)
    return one.resolved is not None and one.whole and label is not None and does_joint_work(label.transform)


def _peak_together(groups: list[GroupPlan], labelled: Mapping[str, LabelledTransform], numbers: Numbers) -> int:
    """Return the peak temporary bytes of stepping tensors of one shape with work that is done for all of them, over all shapes."""
    counts: Counter[tuple[str, torch.dtype, Shape]] = Counter()
    of_kind: dict[tuple[str, torch.dtype, Shape], GroupPlan] = {}
    for one in groups:
        for shape in filter(math.prod, one.runs(labelled)):
            kind = one.group.label, one.group.dtype, shape
            counts[kind] += 1
            of_kind[kind] = one
    nobody = no_members(torch.zeros(len(numbers), dtype=torch.float64))
    peak = 0
    for (label, dtype, shape), count in counts.items():
        found = [
            _tensor_bytes(of_kind[label, dtype, shape], labelled[label], nobody, shape, partial(_step_together, number))
            for number in sorted({min(count, MANY), min(count, MANY - 1)})
        ]
        # Of more tensors each takes what the last of many took.
        peak = max(peak, found[-1] + (count - MANY) * (found[-1] - found[0]) if count > MANY else found[-1])
    return peak


def _piece_bytes(
    one: GroupPlan, label: LabelledTransform, members: eb.Members, size: int, largest: int, run: Run, numbered: int
) -> int:
    assert one.resolved is not None
    block = one.resolved.policy.block
    known = max(largest // block, 1) * block
    if size > known:
        # What is computed on the way grows with the piece, element by element.
        return _piece_bytes(one, label, members, known, largest, run, numbered) * size // known
    optimizer = eb.Optimizer(label.transform, label.policy)
    tensor, gradient = torch.zeros(size, dtype=one.group.dtype), torch.zeros(size, dtype=one.main)
    answers, first = answers_of(optimizer, members.sizes, alone=one.alone), indices((size,), numbered, "cpu")
    return max(run(optimizer, tensor, gradient, members, first, due) for due in answers)


def _step_one(
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    gradient: Tensor,
    members: eb.Members,
    first: int | Blocks,
    due: Due,
) -> int:
    state, totals = optimizer.init([tensor]), totals_of(optimizer, members.sizes, due)
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        here = (members.cut(0, tensor.numel()) if tensor.numel() < members.edges[-1] else members,)
        step_in_place(
            optimizer, [tensor], [gradient], state, first, metrics=False, totals=totals, members=here, due=due
        )
    peak: int = counter.peak
    return peak


def _step_together(
    count: int,
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    gradient: Tensor,
    members: eb.Members,
    first: int | Blocks,
    due: Due,
) -> int:
    """As :func:`_step_one`, for so many tensors of one shape."""
    totals = totals_of(optimizer, members.sizes, due)
    tensors = [tensor, *(torch.zeros_like(tensor) for _ in range(count - 1))]
    work: list[tuple[Unit, Grads]] = [
        (replace(unit_of(optimizer, one, members), flat=False), [gradient]) for one in tensors
    ]

    def begin(unit: Unit, _grads: Grads) -> Begun | None:
        return Begun.of(optimizer, unit, gradient, totals, due)

    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        for unit, _, results, _ in arranged(work, JointSteps(), lambda _: optimizer, begin):
            step_in_place(
                optimizer,
                [unit.tensor],
                [gradient],
                unit.state,
                first,
                metrics=False,
                totals=[*totals, *results],
                members=(members,),
                due=due,
                answers=len(results),
            )
    peak: int = counter.peak
    return peak


def _ask_one(
    answered: int,
    optimizer: eb.Optimizer[Any],
    tensor: Tensor,
    gradient: Tensor,
    members: eb.Members,
    first: int | Blocks,
    due: Due,
) -> int:
    part, reads = reductions.Part(optimizer, unit_of(optimizer, tensor, members, first), gradient, due=due), Reads()
    known = reductions.find_totals([part], eb.Local, reads)[:answered]
    with torch.no_grad(), AllocationCounter(smallest=SMALLEST) as counter:
        reductions.find_totals([part], eb.Local, reads, known)
    peak: int = counter.peak
    return peak
